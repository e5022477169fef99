"""The checks of trainers and engines catch mistakes of many kinds and accuse no correct trainer."""

from dataclasses import replace
from typing import Any

import checkpoint_mutants
import pytest
import rl_step_mutants
import trainer_mutants
from first_failure import first_failure
from trainer_mutants import CORRECT, IGNORED, DropoutAndSampledEvaluation

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.bugs.detection import relevant_checks
from rlcanary.checks import all_checks, run_check
from rlcanary.contract.presets import GRPO

CAUGHT_BY = {**trainer_mutants.CAUGHT_BY, **checkpoint_mutants.CAUGHT_BY, **rl_step_mutants.CAUGHT_BY}
AREAS = ("step", "rl_step", "metrics", "checkpoint", "order", "evaluation", "sync", "parity")
CHECKS = {check.id: check for check in all_checks() if check.area in AREAS}


@pytest.mark.parametrize(("mutant", "check_id"), CAUGHT_BY.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_mistake_is_caught_and_its_snippet_tells_it_from_the_reference(
    mutant: type[ReferenceAdapter], check_id: str
) -> None:
    spec = f"{mutant.__module__}:{mutant.__name__}"
    result = first_failure(CHECKS[check_id], mutant(), spec)
    assert result.status == "fail", result.message
    with pytest.raises(AssertionError):
        exec(result.snippet, {})
    exec(result.snippet.replace(spec, "reference"), {})


@pytest.mark.parametrize(("mutant", "check_id"), IGNORED.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_declaration_that_is_ignored_turns_a_check_red(mutant: type[ReferenceAdapter], check_id: str) -> None:
    result = first_failure(CHECKS[check_id], mutant(), f"trainer_mutants:{mutant.__name__}")
    assert result.status == "fail", result.message
    with pytest.raises(AssertionError):
        exec(result.snippet, {})
    exec(result.snippet.replace(mutant.__name__, DropoutAndSampledEvaluation.__name__), {})


def test_lost_moments_are_not_told_as_an_older_checkpoint() -> None:
    result = run_check(CHECKS["checkpoint.latest_is_loaded"], checkpoint_mutants.MomentsNotLoaded(), "unused")
    assert result.status == "pass"


def test_evaluation_that_changes_much_is_told_by_parts() -> None:
    class MovesOn(ReferenceAdapter):
        def evaluate(self, state: Any) -> dict[str, float]:
            state.optimizer.step()
            state.scheduler.step()
            return super().evaluate(state)

    result = run_check(CHECKS["evaluation.changes_nothing"], MovesOn(), "unused")
    assert result.status == "fail"
    for part in ("20 more of model", "more of optimizer", "more of scheduler"):
        assert part in result.message


@pytest.mark.parametrize("trainer", CORRECT, ids=lambda trainer: trainer.__name__)
def test_correct_trainer_is_never_accused(trainer: type[ReferenceAdapter]) -> None:
    # On one model: what depends on the model is in tests/unit/checks/styles.
    checks = [replace(check, worlds=()) for check in relevant_checks(trainer) if check.area in AREAS]
    results = [run_check(check, trainer(), "unused") for check in checks]
    assert [(result.id, result.message) for result in results if result.status in ("fail", "error")] == []


def test_declared_dropout_and_sampled_evaluation_are_not_held_against_a_trainer() -> None:
    trainer = ReferenceAdapter(GRPO.replace(training_dropout=True, evaluation_temperature=0.7))
    # On one model, as above.
    on_one_model = {check_id: replace(check, worlds=()) for check_id, check in CHECKS.items()}
    results = {check_id: run_check(check, trainer, "reference") for check_id, check in on_one_model.items()}
    assert {result.id for result in results.values() if result.status != "pass"} == {
        "step.dropout_is_off",
        "evaluation.repeatable",
        "evaluation.current_weights",
        "sync.buffers",
    }
    assert results["step.dropout_is_off"].message == "does not apply: updates keep dropout on"
