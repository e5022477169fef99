"""Inputs are larger than what a chunk, a block or a page holds, and the program of a finding shows it."""

import pytest
from size_mutants import SIZE_MUTANTS

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.checks import all_checks, run_check
from rlcanary.checks.asserts import Finding

CHECKS = {check.id: check for check in all_checks()}


@pytest.mark.parametrize(("mutant", "check_id"), SIZE_MUTANTS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_limit_is_found_and_the_program_tells_it_from_the_reference(
    mutant: type[ReferenceAdapter], check_id: str
) -> None:
    result = run_check(CHECKS[check_id], mutant(), f"size_mutants:{mutant.__name__}")
    assert result.status == "fail", result.message
    with pytest.raises(Finding):
        exec(result.snippet, {})
    exec(result.snippet.replace(f"size_mutants:{mutant.__name__}", "reference"), {})
