"""Loops that are right and written in unusual ways are neither accused nor ended by the audit."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcanary.contract.conventions import Conventions
from rlcanary.contract.presets import DAPO
from rlcanary.live import Audit
from rlcanary.live.hooks.steps import Steps

MASK = torch.ones(4, 3).bool()
ADVANTAGES = torch.tensor([1.0, -1.0, 2.0, -0.5])


def policy() -> Tensor:
    return -torch.rand(4, 3, generator=torch.Generator().manual_seed(0))


def loss_of(logprobs: Tensor, old: Tensor, advantages: Tensor, tokens: int = 12) -> Tensor:
    return -((logprobs - old).exp() * advantages[:, None]).sum() / tokens


def findings_of(audit: Audit) -> list[str]:
    return [finding.invariant for finding in audit.findings]


def test_logprobs_without_a_gradient_beside_an_output_with_one_are_found() -> None:
    """Autograd calls the hook of such an output with None."""
    audit, both = Audit(DAPO, every=1, on_finding="log"), torch.rand(4, 3, 2).requires_grad_()
    with audit.update(mask=MASK, advantages=ADVANTAGES) as update:
        logprobs, entropy = both.unbind(-1)
        update.watch(logprobs)
        entropy.mean().backward()
    assert findings_of(audit) == ["gradient.missing"]


def test_a_loss_may_overwrite_the_logprobs() -> None:
    audit, old = Audit(DAPO, every=1, on_finding="log"), policy() * 1.01
    with audit.update(mask=MASK, advantages=ADVANTAGES, old_logprobs=old) as update:
        logprobs = update.watch(policy().requires_grad_() * 1)
        (-(logprobs.sub_(old).exp() * ADVANTAGES[:, None]).mean()).backward()
    assert findings_of(audit) == []


def test_micro_batches_may_share_a_buffer() -> None:
    audit, old, buffer = Audit(DAPO, every=1, on_finding="log"), policy(), torch.zeros(2)
    with audit.update() as update:
        for start in (0, 2):
            rows = slice(start, start + 2)
            buffer.copy_(ADVANTAGES[rows])
            logprobs = policy()[rows].requires_grad_()
            update.watch(logprobs, mask=MASK[rows], advantages=buffer, old_logprobs=old[rows])
            loss_of(logprobs, old[rows], buffer).backward()
    assert findings_of(audit) == []


def updated_in_halves(audit: Audit, rewards: tuple[list[float | None], ...]) -> None:
    old = policy()
    with audit.update() as update:
        for rows, of_rows in zip((slice(0, 2), slice(2, 4)), rewards, strict=True):
            logprobs = policy()[rows].requires_grad_()
            given = {"advantages": ADVANTAGES[rows], "old_logprobs": old[rows], "rewards": of_rows}
            update.watch(logprobs, mask=MASK[rows], **given)
            loss_of(logprobs, old[rows], ADVANTAGES[rows]).backward()


def test_an_update_of_which_a_micro_batch_could_not_be_watched_is_not_judged() -> None:
    audit = Audit(DAPO, every=1, on_finding="log")
    with pytest.warns(UserWarning, match="the audit of an update failed") as told:
        updated_in_halves(audit, ([1.0, 0.0], [1.0, None]))
    assert (findings_of(audit), len(told)) == ([], 1)


@pytest.mark.parametrize("with_piece", [False, True])
def test_what_is_said_of_the_whole_update_may_come_with_a_micro_batch(with_piece: bool) -> None:
    """Samples at a low temperature, which a run may say that it drew."""
    audit, logits = Audit(DAPO, every=1, on_finding="log"), torch.linspace(0, 4, 5).requires_grad_()
    ids = torch.full((4, 3), 4)
    of_update = {"drawn_freely": False, "trainer_version": 0}
    known = {"versions": [0] * 4, "sampler_logprobs": logits.detach().log_softmax(-1)[ids]}
    for _ in range(40):
        with audit.update(mask=MASK, advantages=ADVANTAGES, **({} if with_piece else of_update), **known) as update:
            log_probs = logits.log_softmax(-1)
            entropy = -(log_probs.exp() * log_probs).sum().detach().expand(4, 3)
            logprobs = update.watch(log_probs[ids], entropy=entropy, **(of_update if with_piece else {}))
            loss_of(logprobs, logprobs.detach(), ADVANTAGES).backward()
    assert not [kind for kind in findings_of(audit) if kind == "sampling.surprise"]


def test_completions_of_a_policy_to_which_all_tokens_are_equally_likely_are_no_repeats() -> None:
    audit, logits = Audit(DAPO, every=1, on_finding="log"), torch.zeros(10, requires_grad=True)
    ids = torch.randint(10, (4, 3), generator=torch.Generator().manual_seed(0))
    sampler = logits.detach().log_softmax(-1)[ids]
    groups, versions = torch.zeros(4).long(), [0] * 4
    given = {"group_ids": groups, "sampler_logprobs": sampler, "versions": versions, "trainer_version": 0}
    for _ in range(10):
        with audit.update(mask=MASK, advantages=ADVANTAGES, **given) as update:
            logprobs = update.watch(logits.log_softmax(-1)[ids])
            loss_of(logprobs, logprobs.detach(), ADVANTAGES).backward()
    assert findings_of(audit) == []


@pytest.mark.parametrize(
    "other", ["train", None, [1, 2], {"a": 1.0}, torch.ones(3)], ids=lambda other: type(other).__name__
)
def test_logged_values_that_are_no_numbers_are_left_out(other: Any) -> None:
    audit = Audit(DAPO, every=1, on_finding="log")
    with audit.update(mask=MASK, advantages=ADVANTAGES) as update:
        logprobs = update.watch(policy().requires_grad_())
        loss_of(logprobs, policy(), ADVANTAGES).backward()
        update.log({"loss": torch.tensor([99.0]), "other": other})
    assert findings_of(audit) == ["logged.loss"]


def test_logprobs_of_the_prompt_too_are_told_apart_from_the_mask_of_the_completion() -> None:
    audit = Audit(DAPO, every=1, on_finding="log")
    update = audit.update(mask=MASK, advantages=ADVANTAGES)
    with pytest.warns(UserWarning, match="logprobs of columns 0 to 6, and the mask of the update has 3"), update:
        loss_of(update.watch(policy().repeat(1, 2).requires_grad_())[:, 3:], policy(), ADVANTAGES).backward()
    assert findings_of(audit) == []


@pytest.mark.parametrize("call", ["watch", "log"])
def test_what_comes_behind_the_end_of_an_update_is_told(call: str) -> None:
    audit = Audit(DAPO, every=1, on_finding="log")
    with audit.update(mask=MASK, advantages=ADVANTAGES) as update:
        logprobs = update.watch(policy().requires_grad_())
        loss_of(logprobs, policy(), ADVANTAGES).backward()
    with pytest.warns(UserWarning, match="update 0 is over: call `watch` and `log` before it ends"):
        update.watch(policy().requires_grad_()) if call == "watch" else update.log({"loss": 99.0})
    assert findings_of(audit) == []


def test_advantages_outside_the_mask_may_be_nan() -> None:
    audit, mask = Audit(DAPO, every=1, on_finding="log"), MASK.clone()
    mask[:, 2] = False
    rewards, groups = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.zeros(4).long()
    advantages = (rewards - rewards.mean()) / (rewards.std() + DAPO.advantage_eps)
    audit.rollout(
        mask=mask,
        rewards=rewards,
        group_ids=groups,
        advantages=advantages[:, None].masked_fill(~mask, torch.nan).expand(4, 3),
    )
    assert findings_of(audit) == []


def textbook(rewards: Tensor, eps: float) -> Tensor:
    return (rewards - rewards.mean()) / (rewards.std() + eps)


def rollout(conventions: Conventions, rewards: Tensor, advantages: Tensor) -> list[str]:
    audit = Audit(conventions, every=1, on_finding="log")
    groups = torch.zeros(len(rewards)).long()
    audit.rollout(mask=torch.ones(len(rewards), 1), rewards=rewards, group_ids=groups, advantages=advantages)
    return findings_of(audit)


@pytest.mark.parametrize("count", [3, 5, 6, 7, 12, 16])
def test_the_rounding_of_equal_rewards_is_no_wrong_advantage(count: int) -> None:
    """Three rewards of 0.9 have the mean 0.89999998 in float32, which over an epsilon of 1e-6 makes 0.056."""
    for tenths in range(1, 20):
        rewards = torch.full((count,), tenths / 10)
        assert rollout(DAPO, rewards, textbook(rewards, DAPO.advantage_eps)) == []


@pytest.mark.parametrize(("reward", "advantage"), [(0.9, 0.8), (1.0, 0.05)])
def test_an_advantage_of_equal_rewards_that_no_rounding_makes_is_found(reward: float, advantage: float) -> None:
    rewards = torch.full((3,), reward)
    assert rollout(DAPO, rewards, torch.full((3,), advantage)) == ["advantages"]


def test_the_rounding_of_equal_rewards_is_no_wrong_gradient() -> None:
    audit, old = Audit(DAPO, every=1, on_finding="log"), torch.cat([policy(), policy()])[:6]
    rewards, groups = torch.tensor([0.0, 0.0, 1.0, 0.9, 0.9, 0.9]), torch.tensor([0, 0, 0, 1, 1, 1])
    advantages = torch.cat([textbook(each, DAPO.advantage_eps) for each in rewards.split(3)])
    mask = torch.ones(6, 3).bool()
    with audit.update(mask=mask, rewards=rewards, group_ids=groups, sampler_logprobs=old) as update:
        logprobs = update.watch(old.clone().requires_grad_())
        loss_of(logprobs, old, advantages, 18).backward()
    assert float(advantages[3:].abs().max()) > 0.01
    assert findings_of(audit) == []


def test_an_update_may_end_where_no_gradient_is_recorded() -> None:
    audit, old = Audit(DAPO, every=1, on_finding="log"), policy()
    update = audit.update(mask=MASK, advantages=ADVANTAGES, old_logprobs=old)
    update.begin()
    loss_of(update.watch(policy().requires_grad_()), old, ADVANTAGES).backward()
    with torch.no_grad():
        update.end()
    assert (findings_of(audit), audit.audited) == ([], 1)


def test_a_run_may_overwrite_what_it_gave_before_the_update_ends() -> None:
    audit, old, advantages = Audit(DAPO, every=1, on_finding="log"), policy().double(), ADVANTAGES.clone()
    with audit.update(mask=MASK, advantages=advantages) as update:
        update.know(old_logprobs=old)
        loss_of(update.watch(policy().double().requires_grad_()), old, advantages).backward()
        old.zero_()
        advantages.zero_()
    assert findings_of(audit) == []


@pytest.mark.parametrize("backward_passes", [1, 2])
def test_micro_batches_of_a_loop_that_is_not_ours_are_one_update(backward_passes: int) -> None:
    """Also where all of them are in one backward pass, until which there is no gradient."""
    audit, weights = Audit(DAPO.replace(old_logprobs="trainer"), every=3, on_finding="log"), torch.nn.Linear(3, 4)
    optimizer = torch.optim.SGD(weights.parameters(), lr=0.01)
    steps = Steps(audit, optimizer, weights)
    for _ in range(6):
        losses = []
        for rows in (slice(0, 2), slice(2, 4)):
            logprobs = weights.weight.log_softmax(0)[rows]
            steps.update().watch(logprobs, mask=MASK[rows], advantages=ADVANTAGES[rows])
            losses.append(loss_of(logprobs, logprobs.detach(), ADVANTAGES[rows]))
            if backward_passes == 2:
                losses.pop().backward()
        if losses:
            sum(losses).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    assert (findings_of(audit), audit.updates, audit.audited) == ([], 6, 2)


def test_a_gradient_that_is_thrown_away_is_not_judged() -> None:
    audit, weights = Audit(DAPO.replace(old_logprobs="trainer"), every=1, on_finding="log"), torch.nn.Linear(3, 4)
    optimizer = torch.optim.SGD(weights.parameters(), lr=0.01)
    steps = Steps(audit, optimizer, weights)
    for is_kept in (False, True):
        logprobs = weights.weight.log_softmax(0)
        steps.update().watch(logprobs, mask=MASK, advantages=ADVANTAGES)
        loss_of(logprobs, logprobs.detach(), ADVANTAGES).backward()
        if is_kept:
            optimizer.step()
        optimizer.zero_grad()
    assert (findings_of(audit), audit.audited) == ([], 1)


def test_a_failure_of_the_audit_ends_no_run_that_makes_errors_of_warnings() -> None:
    audit = Audit(DAPO, every=1)
    with warnings.catch_warnings(action="error"), audit.update(mask=MASK, advantages=ADVANTAGES) as update:
        update.watch(torch.rand(4, 5, requires_grad=True))
    assert findings_of(audit) == []


def test_a_run_may_have_another_default_device() -> None:
    audit = Audit(DAPO, every=1, on_finding="log")
    logprobs, old, mask = policy().requires_grad_(), policy(), MASK
    rewards, groups = [1.0, 0.0, 1.0, 0.0], [0, 0, 1, 1]
    with torch.device("meta"):  # in place of a GPU
        with audit.update(mask=mask, advantages=ADVANTAGES, sampler_logprobs=old) as update:
            loss_of(update.watch(logprobs * 1), old, 2 * ADVANTAGES).backward()
        audit.rollout(mask=mask, rewards=rewards, group_ids=groups, advantages=ADVANTAGES)
    assert findings_of(audit) == ["gradient.scale", "advantages"]


def test_a_rollout_that_cannot_be_read_ends_no_run() -> None:
    audit = Audit(DAPO, every=1)
    with pytest.warns(UserWarning, match="the audit of an update failed, the run is not affected"):
        assert audit.rollout(mask=MASK.tolist(), rewards=[1.0], group_ids=[0], advantages=ADVANTAGES) == []  # type: ignore[arg-type]
