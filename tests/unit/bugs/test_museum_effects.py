"""The pictures of the museum are computed: the push of an update on each token, and a run with and without a bug."""

import pytest
import torch

from rlcanary import reference
from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.bugs import Bug
from rlcanary.bugs.effect import GROUPS, effect_of
from rlcanary.bugs.layouts.layout_scale import LossTimesContextRanks
from rlcanary.bugs.objective.advantage import BatchInsteadOfGroup
from rlcanary.bugs.objective.loss import AdvantagesAsMask
from rlcanary.bugs.scoring.mask import MaskByPadId
from rlcanary.bugs.training_run import reaches_a_run, rewards
from rlcanary.bugs.update import update, watched
from rlcanary.checks.worlds.training.tiny_trainer import sampled, state_of, tiny_policy


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("padding", ["right", "left"])
def test_push_is_minus_the_gradient_of_the_loss_by_the_logprob_of_each_token(temperature: float, padding: str) -> None:
    adapter = ReferenceAdapter().configured(temperature=temperature)
    policy = tiny_policy()
    state, batch = state_of(adapter, policy), sampled(policy, adapter.conventions, GROUPS, 0.5, prompt_padding=padding)
    given = reference.policy_batch(policy, None, batch, adapter.conventions)
    (expected_BT,) = torch.autograd.grad(adapter.policy_loss(given).loss, given.logprobs)
    with watched(state.model) as seen:
        update(adapter, state, batch)
    push_BS = seen.of(batch, temperature)
    assert push_BS is not None
    for row, start in enumerate(batch.completion_starts.tolist()):
        mask_T = batch.completion_mask[row]
        places = (start + mask_T.nonzero().flatten()).tolist()
        torch.testing.assert_close(push_BS[row, places], -expected_BT[row, mask_T])
        push_BS[row, places] = 0
    torch.testing.assert_close(push_BS, torch.zeros_like(push_BS))


@pytest.mark.parametrize("bug", [AdvantagesAsMask, BatchInsteadOfGroup, LossTimesContextRanks])
def test_bug_of_an_update_pushes_other_tokens_or_otherwise_than_the_reference(bug: type[Bug]) -> None:
    effect = effect_of(bug)
    assert effect is not None
    for row in effect.picture["rows"]:
        for expected, got, is_off in zip(row["strips"]["expected"], row["strips"]["got"], row["off"], strict=True):
            assert is_off == (expected != got) or expected == pytest.approx(got, rel=1e-3, abs=1e-3)
    assert any(any(row["off"]) for row in effect.picture["rows"])


def test_bug_that_no_update_goes_through_has_no_push() -> None:
    assert effect_of(MaskByPadId) is None
    assert not reaches_a_run(MaskByPadId)


def test_run_learns_without_a_bug_and_not_with_squared_advantages() -> None:
    right, wrong = (rewards(adapter, rounds=16) for adapter in (ReferenceAdapter(), AdvantagesAsMask()))
    assert right[0] == wrong[0]
    assert right[-1] > right[0] + 0.2
    assert wrong[-1] < right[-1] - 0.2
