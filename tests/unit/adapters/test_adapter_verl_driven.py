"""What verl's own code is given: nothing masked, cast or divided that its trainer hands on as it is."""

from dataclasses import replace

import pytest
import torch

from rlcanary.adapters import load_adapter
from rlcanary.contract.records.lengths import Lengths
from rlcanary.contract.records.other_losses import DistillationBatch


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
