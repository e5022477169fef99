"""Mistakes in the start of a run fail their checks, and a start that is right is accused of none."""

from typing import Any, Self

import pytest
from building_mutants import CAUGHT_BY
from first_failure import first_failure
from styles.run_starts import RunStarts

from rlcanary.adapters.grpo import GrpoAdapter
from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.checks import all_checks, run_check
from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.conventions import Conventions

CHECKS = {check.id: check for check in all_checks() if check.area in ("building", "plan")}
PASSED_BY_ALL = {
    f"building.{name}"
    for name in (
        *("learning_rates", "resumed_rates", "weight_decay", "optimizer", "trained_parts", "starts_as_the_model"),
        *("small_updates_are_kept", "reference_model", "kl_starts_at_zero"),
    )
}
DECAYS_MATRICES = Conventions(decayed="matrices")


class Built(RunStarts, ReferenceAdapter):
    """A start by hand, without decay of norms and biases, under the reference's updates, which log a KL."""

    run_plan = ReferenceAdapter.run_plan

    def __init__(self, conventions: Conventions = DECAYS_MATRICES) -> None:
        super().__init__(conventions)

    def configured(self, **changes: Any) -> Self:
        if "decayed" in changes:
            raise NotProvided("norms and biases never decay")
        return super().configured(**changes)


@pytest.mark.parametrize("mutant", CAUGHT_BY, ids=lambda mutant: mutant.__name__)
def test_mistake_is_caught_by_its_check(mutant: type[ReferenceAdapter]) -> None:
    assert first_failure(CHECKS[CAUGHT_BY[mutant]], mutant()).status == "fail"


@pytest.mark.parametrize("adapter", [Built, GrpoAdapter])
def test_correct_start_is_never_accused(adapter: type[ReferenceAdapter]) -> None:
    found = {name: run_check(check, adapter(), "unused") for name, check in CHECKS.items()}
    assert {name: each.message for name, each in found.items() if each.status in ("fail", "error")} == {}
    passed = {name for name, each in found.items() if each.status == "pass"}
    assert passed >= PASSED_BY_ALL
    assert adapter is GrpoAdapter or passed == CHECKS.keys()
