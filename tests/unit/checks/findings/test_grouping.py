"""Failures without a known cause are folded by what their checks call, and the fold claims no more than that."""

import torch

from rlcanary.checks import Check, Result
from rlcanary.checks.case import Case
from rlcanary.checks.findings.grouping import factor_of, grouped
from rlcanary.checks.tally import Compared, Fingerprint, Found


def ran(name: str, needs: tuple[str, ...], factor: float | None = None, passed: bool = False) -> tuple[Check, Result]:
    """Make a check that calls these capabilities, and its result: a gradient off by this factor."""
    expected = torch.tensor([1.0, -2.0])
    compared = None if factor is None else Compared(expected * factor, expected, torch.tensor([True, True]))
    found = Found(Fingerprint("", "gradient", 1.0), "the gradient is another one", "", False, compared)
    check = Check(name, needs, lambda: None, lambda: [Case()], lambda _: None, lambda _: ())
    status = "pass" if passed else "fail"
    return check, Result(name, name.partition(".")[0], status, "", "", 0.0, () if passed else (found,))


def folds(*rows: tuple[Check, Result]) -> list[tuple[str, list[str]]]:
    failures = [result for _, result in rows if result.status == "fail"]
    found = grouped(failures, [check for check, _ in rows], [result for _, result in rows])
    return [(fold.capability, [member.id for member in fold.members]) for fold in found]


def test_checks_of_one_capability_are_one_fold_and_those_that_also_call_it_come_under_it() -> None:
    assert folds(
        ran("step.both", ("policy_loss", "advantages")),
        ran("loss.value", ("policy_loss",)),
        ran("loss.gradient", ("policy_loss",)),
        ran("mask.ends", ("completion_mask",)),
    ) == [("policy_loss", ["loss.value", "loss.gradient", "step.both"]), ("completion_mask", ["mask.ends"])]


def test_capability_that_passed_checks_call_is_not_the_name_of_the_fold() -> None:
    assert folds(
        ran("sync.each", ("sync_weights", "generate")),
        ran("sync.tied", ("sync_weights", "generate")),
        ran("parity.greedy", ("generate",), passed=True),
    ) == [("sync_weights", ["sync.each", "sync.tied"])]


def test_one_factor_in_several_checks_is_told_in_one_line() -> None:
    rows = [ran("loss.a", ("policy_loss",), 2.0), ran("loss.b", ("policy_loss",), 2.0)]
    (fold,) = grouped([result for _, result in rows], [check for check, _ in rows], [result for _, result in rows])
    assert fold.told == (
        "policy_loss: the gradient is 2 times the expected one in 2 checks\nAlso red, through the same policy_loss: loss.b"
    )


def test_different_factors_are_not_told_as_one() -> None:
    rows = [ran("loss.a", ("policy_loss",), 2.0), ran("loss.b", ("policy_loss",), 3.0)]
    (fold,) = grouped([result for _, result in rows], [check for check, _ in rows], [result for _, result in rows])
    assert fold.told == "Also red, through the same policy_loss: loss.b"


def test_single_failure_stands_alone() -> None:
    rows = [ran("loss.a", ("policy_loss",), 2.0)]
    (fold,) = grouped([rows[0][1]], [rows[0][0]], [rows[0][1]])
    assert fold.told == ""


def test_number_where_zero_is_expected_is_no_factor() -> None:
    compared = Compared(torch.tensor([2.0, 1.0]), torch.tensor([1.0, 0.0]), torch.tensor([True, True]))
    found = Found(Fingerprint("", "gradient"), "", "", False, compared)
    assert factor_of(found) is None
