"""A mutant is reached by the checks that run what its mistake changes, to the expression."""

from collections.abc import Iterable
from pathlib import Path

import pytest
from mutable import PickingAdapter, picked

from rlcanary.checks import all_checks
from rlcanary.mutants.functions import mutants_of
from rlcanary.mutants.reach import places_of, runs_on_original


@pytest.fixture(scope="module")
def reached() -> dict[str, bool]:
    """Whether the checks of advantages reach each mutant of `picked`, by the line with the mistake."""
    checks = [check for check in all_checks() if check.id == "advantage.declared_formula"]
    (run,) = runs_on_original(PickingAdapter(), "mutable:PickingAdapter", checks, ("mutable",))
    return {each.diff.partition("\n+ ")[2]: bool(each.reached_by(run)) for each in mutants_of(picked)}


def of(reached: dict[str, bool], lines: Iterable[str]) -> set[bool]:
    return {reached[line] for line in lines}


def test_expressions_that_run_are_reached(reached: dict[str, bool]) -> None:
    lines = [
        "centred_B = rewards_B + rewards_B.mean()",
        "scaled_B = centred_B / 2 if wide else centred_B * 4",
        "scaled_B = centred_B / 2 if wide else centred_B / 3",
        "if wide and (wide and rewards_B[0] > 5):",
    ]
    assert of(reached, lines) == {True}


def test_an_expression_that_does_not_run_on_a_line_that_does_is_unreached(reached: dict[str, bool]) -> None:
    lines = [
        "scaled_B = centred_B / 3 if wide else centred_B * 3",
        "scaled_B = centred_B * 2 if wide else centred_B * 3",
        "if wide or (wide and rewards_B[0] >= 5):",
        "if wide or (wide and rewards_B[1] > 5):",
        "scaled_B = scaled_B + 8",
    ]
    assert of(reached, lines) == {False}


def test_to_leave_out_a_branch_is_reached_where_the_branch_runs(reached: dict[str, bool]) -> None:
    assert of(reached, ["scaled_B = centred_B / 2", "if True:", "if wide or rewards_B[0] > 5:"]) == {True}
    assert of(reached, ["scaled_B = centred_B * 3", "if False:", "if wide or wide:"]) == {False}


def test_places_are_those_of_the_file_also_of_an_indented_function() -> None:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()

    def indented(x: float) -> float:
        return x + 1

    texts = {lines[first - 1][start:end] for _, first, start, last, end in filter(None, places_of(indented.__code__))}
    assert {"x + 1", "return x + 1"} <= texts
