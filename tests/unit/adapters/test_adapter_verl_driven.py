"""What verl's own code is given: nothing masked, cast or divided that its trainer hands on as it is."""

import math
from dataclasses import replace

import pytest
import torch

from rlcanary.adapters import load_adapter
from rlcanary.contract.records.credit import CreditBatch, ValueBatch
from rlcanary.contract.records.lengths import Lengths
from rlcanary.contract.records.other_losses import DistillationBatch
from rlcanary.errors import UserError


@pytest.fixture(scope="module")
def verl():
    pytest.importorskip("verl")
    return load_adapter("verl")


def test_the_teacher_of_a_distillation_stays_at_temperature_1(verl):
    """As `_get_teacher_sampling_params` asks for its logprobs, whatever the rollouts' temperature."""
    logits_BTV = torch.tensor([[[2.0, 0.0, -1.0]]], requires_grad=True)
    ids_BT, mask_BT = torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1, dtype=torch.bool)
    batch = DistillationBatch(logits_BTV, logits_BTV.detach() / 2, ids_BT, mask_BT, temperature=2.0)
    assert float(verl.distillation_loss(batch).loss.detach()) == pytest.approx(0, abs=1e-6)
    equal = replace(batch, teacher_logits=logits_BTV.detach())
    assert float(verl.distillation_loss(equal).loss.detach()) > 0.05


def test_nan_behind_the_mask_of_a_critic_comes_back_as_gradient(verl):
    """The workers' `value_loss` masks behind the arithmetic."""
    batch = ValueBatch(
        values=torch.tensor([[0.5, 0.0]], requires_grad=True),
        returns=torch.tensor([[1.0, math.nan]]),
        mask=torch.tensor([[True, False]]),
        old_values=torch.zeros(1, 2),
    )
    loss = verl.value_loss(batch).loss
    loss.backward()
    assert loss.isfinite()
    assert batch.values.grad[0, 1].isnan()


def test_the_values_of_untrained_tokens_reach_gae_as_they_are(verl):
    batch = CreditBatch(
        rewards=torch.tensor([1.0, 0.0]),
        mask=torch.tensor([[True, False, True], [True, True, True]]),
        group_ids=torch.tensor([0, 1]),
        values=torch.tensor([[0.5, math.nan, 0.25], [0.1, 0.2, 0.3]]),
    )
    gae = verl.configured(token_credit="gae", whitening="mean_std")
    assert gae.token_advantages(replace(batch, values=batch.values.nan_to_num(7.0))).advantages.isfinite().all()
    assert gae.token_advantages(batch).advantages.isnan().any()


def test_rewards_of_tokens_are_masked_as_the_kl_in_the_reward_is(verl, monkeypatch):
    """verl's own rewards of tokens are that KL, and `apply_kl_penalty` multiplies it with the mask."""
    from verl.trainer.ppo import ray_trainer

    taken = []
    applied = ray_trainer.apply_kl_penalty
    monkeypatch.setattr(
        ray_trainer, "apply_kl_penalty", lambda *args, **named: taken.append(1) or applied(*args, **named)
    )
    batch = CreditBatch(
        rewards=torch.tensor([1.0, 0.0]),
        mask=torch.tensor([[True, False], [True, True]]),
        group_ids=torch.tensor([0, 0]),
        token_rewards=torch.tensor([[0.25, -5.0], [0.5, 0.5]]),
    )
    advantages = verl.configured(advantage_scale="none").token_advantages(batch).advantages
    assert advantages.tolist() == [[0.125, 0.0], [-0.125, -0.125]]
    assert taken


def test_lengths_are_punished_by_the_reward_manager_that_the_trainer_runs(verl, monkeypatch):
    from verl.experimental.reward_loop.reward_manager.dapo import DAPORewardManager
    from verl.workers.reward_manager import dapo

    def older(*_, **__):
        raise AssertionError("the older manager, which no trainer runs")

    monkeypatch.setattr(dapo.DAPORewardManager, "__init__", older)
    ran, run_single = [], DAPORewardManager.run_single
    monkeypatch.setattr(DAPORewardManager, "run_single", lambda *args: ran.append(1) or run_single(*args))
    lengths = Lengths(torch.tensor([2, 7, 8]), torch.tensor([1, 2, 3]), max_new_tokens=8, max_prompt_tokens=3)
    punished = verl.configured(overlong_buffer=4, overlong_penalty=1.0)
    assert punished.shape_rewards(torch.tensor([1.0, 0.5, 0.0]), lengths).tolist() == [1.0, -0.25, -1.0]
    assert len(ran) == 3


def test_the_critic_follows_the_actor_where_its_settings_say_nothing(verl):
    """As `critic.yaml` interpolates them."""
    from rlcanary.adapters.verl.adapter import VerlAdapter

    means = VerlAdapter(actor={"loss_agg_mode": "seq-mean-token-mean"})
    assert means.conventions.value_aggregation == "sequence_mean"
    own = VerlAdapter(actor={"loss_agg_mode": "seq-mean-token-mean"}, critic={"loss_agg_mode": "token-mean"})
    assert own.conventions.value_aggregation == "token_mean"


def test_a_reduction_of_the_critic_without_words_in_the_conventions_is_refused(verl):
    from rlcanary.adapters.verl.adapter import VerlAdapter

    with pytest.raises(UserError, match=r"critic\.loss_agg_mode='token-sum': this adapter knows token-mean"):
        VerlAdapter(critic={"loss_agg_mode": "token-sum"})
