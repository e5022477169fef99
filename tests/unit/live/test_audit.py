"""The audit of a loop of one's own: it finds what the update is, is silent where it is right, and changes nothing."""

import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlcanary import reference
from rlcanary.contract.batch import PolicyBatch
from rlcanary.contract.conventions import PIECES, Conventions
from rlcanary.contract.presets import DAPO, GRPO, PAPERS
from rlcanary.live import Audit, Stopped

B, T = 8, 6
MASK = torch.arange(T) < torch.tensor([6, 2, 4, 5, 1, 3, 6, 2]).unsqueeze(1)
REWARDS = torch.tensor([1.0, 0, 0, 1, 0, 0, 1, 0])
GROUPS = torch.arange(B) // 4
WHOLE, HALVES = [torch.arange(B)], list(torch.arange(B).split(4))

Loss = Callable[[Tensor, Tensor, PolicyBatch], Tensor]
"""The loss of a micro-batch: from its watched logprobs, its rows and the whole update."""


def drawn(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs [B, T] of trainer, sampler and reference model."""
    source = torch.Generator().manual_seed(seed)
    logprobs_BT = -3 * torch.rand(B, T, generator=source)
    sampler_BT = logprobs_BT + 0.05 * torch.randn(B, T, generator=source)
    reference_BT = logprobs_BT - 0.3 * torch.rand(B, T, generator=source)
    return logprobs_BT.to(dtype), sampler_BT, reference_BT


def correct(conventions: Conventions, scale: float = 1.0) -> Loss:
    def loss(logprobs: Tensor, rows: Tensor, whole: PolicyBatch) -> Tensor:
        piece = whole.rows(rows)
        piece.logprobs = logprobs
        piece.global_tokens = float(whole.mask.sum())
        piece.global_sequences = reference.count_sequences(whole, conventions)
        return scale * reference.policy_loss(piece, conventions).loss

    return loss


def run(
    audit: Audit, loss: Loss, pieces: Sequence[Tensor] = WHOLE, dtype: torch.dtype = torch.float32, **given: Any
) -> list[str]:
    """One update -> the kinds of its findings."""
    logprobs_BT, sampler_BT, reference_BT = drawn(audit.updates, dtype)
    policy = logprobs_BT.clone().requires_grad_()
    conventions = audit.conventions or GRPO
    advantages = reference.advantages(REWARDS, GROUPS, conventions)
    whole = PolicyBatch(policy, sampler_BT, advantages, MASK, reference_BT, sampler_BT, group_ids=GROUPS)
    known = {
        "rewards": REWARDS,
        "group_ids": GROUPS,
        "sampler_logprobs": sampler_BT.masked_fill(~MASK, torch.nan),
        "ref_logprobs": reference_BT,
    }
    with audit.update(mask=MASK, **{**known, **given}) as update:
        for rows in pieces:
            loss(update.watch(policy[rows], rows=rows), rows, whole).backward()
    return [finding.invariant for finding in update.findings]


def several(updates: int, *run_of: Any, **given: Any) -> list[str]:
    return [kind for _ in range(updates) for kind in run(*run_of, **given)]


@pytest.mark.parametrize("pieces", [WHOLE, HALVES], ids=["one piece", "two pieces"])
@pytest.mark.parametrize("name", PAPERS)
def test_a_correct_update_has_no_finding(name: str, pieces: list[Tensor]) -> None:
    audit = Audit(PAPERS[name].replace(kl_coef=0.1, kl_placement="loss"), every=1)
    with warnings.catch_warnings(action="error"):
        for _ in range(20):
            assert run(audit, correct(audit.conventions), pieces) == []
    assert audit.audited == 20


def test_rounding_of_half_precision_is_no_finding() -> None:
    audit = Audit(DAPO, every=1)
    for _ in range(20):
        assert run(audit, correct(DAPO), HALVES, torch.bfloat16) == []


def means_of_pieces(logprobs: Tensor, rows: Tensor, whole: PolicyBatch) -> Tensor:
    piece = whole.rows(rows)
    piece.logprobs = logprobs
    return reference.policy_loss(piece, DAPO).loss / 2


def over_padding(logprobs: Tensor, rows: Tensor, whole: PolicyBatch) -> Tensor:
    return -(logprobs * whole.advantages[rows].unsqueeze(1)).mean()


def where_trap(logprobs: Tensor, rows: Tensor, whole: PolicyBatch) -> Tensor:
    return torch.where(whole.mask[rows], logprobs, torch.sqrt(logprobs - logprobs)).sum()


def detached(logprobs: Tensor, rows: Tensor, whole: PolicyBatch) -> Tensor:
    return (0 * logprobs).sum() + correct(GRPO)(logprobs.detach(), rows, whole)


@pytest.mark.parametrize(
    ("conventions", "loss", "pieces", "found", "told"),
    [
        (GRPO, correct(GRPO, 0.278), WHOLE, "gradient.scale", "the update is 0.278 times the declared one"),
        (GRPO, correct(GRPO, -1.0), WHOLE, "gradient.direction", "cosine -1.0000"),
        (GRPO, correct(DAPO), WHOLE, "gradient.direction", "it is that of aggregation='token_mean'"),
        (DAPO, means_of_pieces, HALVES, "gradient.direction", "the mean of the losses of 2 micro-batches"),
        (GRPO, over_padding, WHOLE, "gradient.outside_the_mask", "19 tokens outside of the mask are trained"),
        (None, over_padding, WHOLE, "gradient.outside_the_mask", "19 tokens outside of the mask are trained"),
        (None, where_trap, WHOLE, "gradient.not_finite", "a gradient that is not finite"),
        (GRPO, detached, WHOLE, "gradient.missing", "no gradient reaches the logprobs"),
    ],
)
def test_a_wrong_update_is_found_with_its_cause(
    conventions: Conventions | None, loss: Loss, pieces: list[Tensor], found: str, told: str
) -> None:
    audit = Audit(conventions, every=1)
    with pytest.warns(UserWarning, match="rlcanary: gradient"):
        assert found in run(audit, loss, pieces)
    assert any(told in str(finding) for finding in audit.findings), list(map(str, audit.findings))


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"advantages": REWARDS}, "advantages"),
        ({"versions": torch.full((B,), 3), "trainer_version": 2}, "staleness.from_the_future"),
        ({"versions": torch.arange(B), "trainer_version": 9}, "staleness.too_old"),
        ({"versions": torch.zeros(B), "trainer_version": 0, "sampler_logprobs": drawn()[0] - 1}, "sampling.ratio"),
        ({"sampler_logprobs": drawn()[1].masked_fill(torch.arange(T) > 3, torch.nan)}, "mask.undrawn"),
    ],
)
def test_what_the_update_is_given_is_judged_too(given: dict[str, Any], found: str) -> None:
    audit = Audit(GRPO, every=1, on_finding="log", max_staleness=8)
    assert found in run(audit, correct(GRPO), **given)


def test_a_drawn_token_in_the_middle_of_a_row_that_is_not_trained_is_found_and_a_tool_token_is_none() -> None:
    policy = drawn()[0].requires_grad_()
    mask = MASK.clone()
    mask[0, 2] = False
    for undrawn in (torch.nan, 0.0):
        sampler_BT = drawn()[1].clone()
        for expected in (["mask.untrained"], []):
            audit = Audit(every=1, on_finding="log")
            with audit.update(mask=mask, sampler_logprobs=sampler_BT) as update:
                (update.watch(policy * 1) * mask).sum().backward()
            assert [finding.invariant for finding in update.findings] == expected
            sampler_BT[0, 2] = undrawn


@pytest.mark.parametrize(
    ("metrics", "found"),
    [
        ({}, []),
        ({"entropy": 3.0, "tokens": 12, "kl": 0.5}, ["logged.kl"]),
        ({"ratio_max": 1.0}, ["logged.ratio_max"]),
        ({"loss": 1.0, "reward": 3.0}, ["logged.loss", "logged.reward"]),
    ],
)
def test_logged_numbers_are_those_of_the_update(metrics: dict[str, float], found: list[str]) -> None:
    conventions = GRPO.replace(kl_coef=0.1)
    audit = Audit(conventions, every=1, on_finding="log")
    logprobs_BT, sampler_BT, reference_BT = drawn()
    policy = logprobs_BT.requires_grad_()
    advantages = reference.advantages(REWARDS, GROUPS, conventions)
    whole = PolicyBatch(policy, sampler_BT, advantages, MASK, reference_BT, sampler_BT, group_ids=GROUPS)
    given = {"rewards": REWARDS, "group_ids": GROUPS, "sampler_logprobs": sampler_BT, "ref_logprobs": reference_BT}
    with audit.update(mask=MASK, **given) as update:
        whole.logprobs = update.watch(policy * 1)
        output = reference.policy_loss(whole, conventions)
        output.loss.backward()
        right = {**output.metrics, "loss": output.loss, "reward": REWARDS.mean()}
        update.log({**right, **metrics})
    assert [finding.invariant for finding in update.findings] == found


def test_the_factor_on_the_loss_for_half_precision_is_taken_off() -> None:
    assert run(Audit(GRPO, every=1), correct(GRPO, 65536.0), loss_scale=65536.0) == []


def test_a_kind_of_finding_is_told_once_and_counted() -> None:
    audit = Audit(GRPO, every=2)
    with pytest.warns(UserWarning, match="2 times the declared one") as told:
        several(6, audit, correct(GRPO, 2.0))
    assert len(told) == 1
    assert (audit.updates, audit.audited) == (6, 3)
    (finding,) = audit.findings
    assert (finding.since, finding.updates) == (0, 3)
    assert audit.metrics() == {
        "canary/findings": 1.0,
        "canary/audited_updates": 3.0,
        "canary/gradient.scale": pytest.approx(1.0),
    }


def test_stop_raises_behind_the_update() -> None:
    told = "2 times the declared one"
    with pytest.warns(UserWarning, match=told), pytest.raises(Stopped, match=told):
        run(Audit(GRPO, every=1, on_finding="stop"), correct(GRPO, 2.0))


def test_the_gradient_is_the_same_to_the_last_bit() -> None:
    gradients = []
    for every in (1, 1000):
        audit = Audit(DAPO, every=every, on_finding="log")
        audit.updates = 1
        policy = drawn(1)[0].requires_grad_()
        with audit.update(mask=MASK, rewards=REWARDS, group_ids=GROUPS) as update:
            means_of_pieces(
                update.watch(policy.exp().log()), WHOLE[0], PolicyBatch(policy, drawn(1)[1], REWARDS, MASK)
            ).backward()
        gradients.append(policy.grad)
    assert torch.equal(*gradients)


def test_a_failure_of_the_audit_is_a_warning_once_and_none_of_the_run() -> None:
    audit = Audit(GRPO, every=1)
    with pytest.warns(UserWarning, match="the audit of an update failed, the run is not affected") as told:
        assert several(3, audit, correct(GRPO), rewards=REWARDS[:3]) == []
    assert len(told) == 1
    assert told[0].filename == __file__


def test_a_name_that_an_update_does_not_know_is_told_with_the_one_that_was_meant() -> None:
    with pytest.warns(UserWarning, match="nothing that is called reward: did you mean rewards"):
        run(Audit(GRPO, every=1), correct(GRPO), reward=REWARDS)


def test_an_error_of_the_run_stays_its_own() -> None:
    def broken(*_: Any) -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(Audit(GRPO, every=1), broken)


def test_the_loop_of_the_page_has_the_finding_that_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs/live.md").read_text()
    _, loop, sync = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(loop, names)
    exec(sync, names)
    assert len(names["audit"].findings) == 1
    (shown,) = re.findall(r"```\n(gradient.*?)\n```", page, re.DOTALL)
    assert " ".join(shown.split()) == capsys.readouterr().out.strip()


class Largest(TorchDispatchMode):
    """Notes the largest tensor that is made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return made


def in_chunks(audit: Audit | None, is_doubled: bool = False) -> int:
    """An update on two rows of 1024 tokens of 512, in chunks of 64 -> the size of the largest tensor that it makes."""
    length, width, chunk = 1024, 512, 64
    source = torch.Generator().manual_seed(0)
    head = torch.randn(width, 8, generator=source).requires_grad_()
    hidden_BTD = torch.randn(2, length, 8, generator=source)
    mask, advantages = torch.ones(2, length).bool(), torch.tensor([1.0, -1.0])
    with Largest() as largest:
        update = None if audit is None else audit.update(mask=mask, advantages=advantages)
        for start in range(0, length, chunk):
            logits = hidden_BTD[:, start : start + chunk] @ head.T
            logprobs = logits.log_softmax(-1)[..., 0]
            if update is not None:
                update.watch(logprobs, start=start)
            ratio = torch.exp(logprobs - logprobs.detach())
            scale = 2 if is_doubled and start == 0 else 1
            (-scale * (ratio * advantages.unsqueeze(1)).sum() / mask.sum()).backward()
        if update is not None:
            update.end()
    return largest.numel


def test_long_rows_are_judged_in_chunks_without_a_tensor_over_the_vocabulary_of_its_own() -> None:
    audit = Audit(DAPO.replace(old_logprobs="trainer"), every=1, on_finding="log")
    assert in_chunks(audit) == in_chunks(None)
    assert list(audit.findings) == []
    in_chunks(audit, is_doubled=True)
    (finding,) = audit.findings
    assert "128 of 2048 tokens differ" in finding.message


@pytest.mark.parametrize("with_piece", [False, True])
def test_what_rows_have_one_of_may_come_as_a_column(with_piece: bool) -> None:
    audit, mask = Audit(GRPO, every=1, on_finding="log"), torch.ones(4, 3).bool()
    rewards = torch.tensor([[1.0], [0.0], [1.0], [0.0]])
    advantages = reference.advantages(rewards[:, 0], torch.zeros(4), GRPO).unsqueeze(1)
    known = {"mask": mask, "advantages": advantages, "rewards": rewards, "sampler_logprobs": torch.zeros(4, 3)}
    logprobs = torch.zeros(4, 3, requires_grad=True)
    with audit.update(**({} if with_piece else known)) as update:
        watched = update.watch(logprobs, **(known if with_piece else {}))
        (-(watched.exp() * advantages).mean()).backward()
    assert audit.audited == 1
    assert update.findings == []


def test_an_update_that_is_dropped_is_not_judged() -> None:
    audit = Audit(GRPO, every=1)
    with audit.update(mask=torch.ones(2, 3).bool()) as update:
        update.watch(torch.zeros(2, 3, requires_grad=True))
        update.drop()
    assert audit.audited == 0


def test_rows_that_are_lost_and_completions_that_are_too_long_are_found_where_they_are_declared() -> None:
    mask = torch.zeros(3, 6).bool()
    mask[0, 1:4] = mask[1, 2:4] = True
    mask[2, [1, 5]] = True  # with a tool's tokens between its own

    def found(rows: int | None, max_tokens: int | None) -> list[str]:
        audit = Audit(every=1, on_finding="log", rows=rows, max_tokens=max_tokens)
        with audit.update(mask=mask) as update:
            (update.watch(torch.zeros(3, 6, requires_grad=True)) * mask).sum().backward()
        return [finding.invariant for finding in update.findings]

    assert found(None, None) == found(3, 5) == []
    assert found(4, 5) == ["size.rows"]
    assert found(3, 4) == ["size.tokens"]


@pytest.mark.parametrize("piece", PIECES)
def test_under_a_custom_piece_the_laws_alone_judge_the_loss(piece: str, caplog: pytest.LogCaptureFixture) -> None:
    conventions = DAPO.replace(kl_coef=0.05, importance_level="token")
    audit = Audit(conventions.replace(**{piece: "custom"}), every=1, on_finding="log")
    assert f"judged by the laws alone: {piece} is custom" in caplog.text
    policy = drawn()[0].requires_grad_()
    known = {"rewards": REWARDS, "group_ids": GROUPS, "advantages": reference.advantages(REWARDS, GROUPS, conventions)}
    with audit.update(mask=MASK, sampler_logprobs=drawn()[1], ref_logprobs=drawn()[2], **known) as update:
        (update.watch(policy) * 7 * MASK).sum().backward()
        update.log({"loss": 3.0, "kl": 9.0, "clip_fraction": 0.5})
    assert audit.findings == []
    with audit.update(mask=MASK, **known) as update:
        update.watch(policy).sum().backward()
    assert [finding.invariant for finding in audit.findings] == ["gradient.outside_the_mask"]


@pytest.mark.parametrize("with_rows", [False, True], ids=["update", "micro-batch"])
def test_rewards_and_groups_may_be_lists(with_rows: bool) -> None:
    audit = Audit(GRPO, every=1, on_finding="log")
    policy = drawn()[0].requires_grad_()
    wrong = {"rewards": REWARDS.tolist(), "group_ids": GROUPS.tolist(), "advantages": [5.0] * B}
    with audit.update(**({} if with_rows else {"mask": MASK, **wrong})) as update:
        (update.watch(policy, **({"mask": MASK, **wrong} if with_rows else {})) * 0).sum().backward()
    assert "advantages" in {finding.invariant for finding in audit.findings}


def test_the_name_of_a_preset_is_no_conventions() -> None:
    with pytest.raises(TypeError, match="'DAPO' is no Conventions"):
        Audit("DAPO")  # type: ignore[arg-type]


def test_rows_that_were_never_watched_are_named() -> None:
    audit = Audit(GRPO, every=1, on_finding="log")
    run(audit, lambda logprobs, rows, whole: correct(GRPO)(logprobs, rows, whole), [torch.arange(6)])
    (finding,) = audit.findings
    assert "`watch` was given no logprobs of row 6 and 1 more" in finding.message
