"""Drawn cases find what the fixed ones cannot, show it small, and repeat with their seed."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.checks import Result, all_checks, run_check
from rlcanary.checks.examples import LARGEST
from rlcanary.checks.worlds import rows
from rlcanary.contract.batch import LossOutput, PolicyBatch
from rlcanary.contract.presets import GRPO

CHECKS = {check.id: check for check in all_checks()}


class AdvantagesHeldToTen(ReferenceAdapter):
    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        return super().policy_loss(replace(batch, advantages=batch.advantages.clamp(-10, 10)))


class LogprobsOfAtMostTenNats(ReferenceAdapter):
    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        return super().policy_loss(replace(batch, logprobs=batch.logprobs.clamp(min=-10)))


class RewardsHeldToAThousand(ReferenceAdapter):
    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        return super().advantages(rewards.clamp(-1000, 1000), group_ids)


class ManyGroupsShifted(ReferenceAdapter):
    """Groups of three and more rows are off where there are three and more of them."""

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        result = super().advantages(rewards, group_ids)
        for group in group_ids.unique():
            rows = group_ids == group
            if rows.sum() > 2 and len(group_ids.unique()) > 2:
                result[rows] += 0.1
        return result


class SharpLogitsRounded(ReferenceAdapter):
    def token_logprobs(self, logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
        return super().token_logprobs(logits.clamp(-20, 20), token_ids, temperature)


PLANTED = [
    (AdvantagesHeldToTen, "loss.declared_gradient"),
    (LogprobsOfAtMostTenNats, "loss.declared_gradient"),
    (RewardsHeldToAThousand, "advantage.declared_formula"),
    (ManyGroupsShifted, "advantage.declared_formula"),
    (SharpLogitsRounded, "logprob.is_log_softmax"),
]


def run(adapter: ReferenceAdapter, check_id: str, examples: int, seed: int = 0) -> Result:
    return run_check(CHECKS[check_id], adapter, "reference", seed, examples=examples)


@pytest.mark.parametrize(("planted", "check_id"), PLANTED, ids=lambda value: getattr(value, "__name__", value))
def test_drawn_case_finds_what_no_fixed_case_shows_and_its_program_repeats_it(
    planted: type[ReferenceAdapter], check_id: str
) -> None:
    assert run(planted(), check_id, 0).status == "pass"
    result = run(planted(), check_id, 60)
    assert result.status == "fail"
    with pytest.raises(AssertionError):
        exec(result.snippet.replace("load_adapter('reference')", f"{planted.__name__}()"), dict(globals()))
    exec(result.snippet, {})


def test_findings_of_drawn_cases_are_those_of_one_small_case_and_repeat_with_the_seed() -> None:
    results = [run(AdvantagesHeldToTen(), "loss.declared_value", 60) for _ in range(2)]
    cases = {found.fingerprint.case for found in results[0].findings}
    assert results[0].findings == results[1].findings
    assert len(cases) == 1
    (case,) = cases
    assert int(case.rpartition("size ")[2]) < LARGEST / 2


def test_other_seeds_draw_other_cases() -> None:
    assert (
        run(AdvantagesHeldToTen(), "loss.declared_value", 60).findings
        != run(AdvantagesHeldToTen(), "loss.declared_value", 60, seed=1).findings
    )


def test_case_that_fails_only_once_keeps_its_finding() -> None:
    class OnceWrong(ReferenceAdapter):
        calls = 0

        def policy_loss(self, batch: PolicyBatch) -> LossOutput:
            self.calls += 1
            output = super().policy_loss(batch)
            return LossOutput(output.loss * (2 if self.calls == 11 else 1), output.metrics)

    assert len(run(OnceWrong(), "loss.declared_value", 5).findings) == 1


def test_drawn_batches_hold_every_kind_of_row_and_every_regime_of_the_ratio() -> None:
    conventions = GRPO.replace(dual_clip=3.0)
    generators = (torch.Generator().manual_seed(seed) for seed in range(120))
    batches = [rows.policy_batch(rng, 1 + index % LARGEST, conventions) for index, rng in enumerate(generators)]
    trained = [row.tolist() for batch in batches for row in batch.mask]
    assert [True] * 5 in trained
    assert any(not any(row) for row in trained)
    assert any(True in row[row.index(False) :] for row in trained if False in row and row[0])
    assert any(not batch.mask.any() for batch in batches)
    ratio = torch.cat([(batch.logprobs.detach() - batch.old_logprobs)[batch.mask].exp() for batch in batches])
    sign = torch.cat([batch.advantages[:, None].expand_as(batch.mask)[batch.mask] for batch in batches]).sign()
    for low, high in ((0.0, 0.8), (0.8, 1.0), (1.0, 1.2), (1.2, 3.0), (3.0, torch.inf)):
        inside = (ratio > low) & (ratio < high)
        assert {-1.0, 0.0, 1.0} == set(sign[inside].tolist()), (low, high)
