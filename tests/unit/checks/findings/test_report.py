"""The report of `rlcanary check` can be read in a narrow terminal and in a wide one."""

import io

import pytest
from rich.console import Console

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.bugs.causes import causes_of
from rlcanary.checks import all_checks, run_check
from rlcanary.checks.findings.expected import compare
from rlcanary.checks.findings.report import show
from rlcanary.contract.batch import LossOutput, PolicyBatch
from rlcanary.contract.conventions import Conventions

SHOWN = ("loss.declared_value", "loss.padding_amount", "step.dropout_is_on")
CHECKS = [check for check in all_checks() if check.id in SHOWN]


class Thirds(ReferenceAdapter):
    name = "thirds"

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        output = super().policy_loss(batch)
        return LossOutput(output.loss / 3, output.metrics)


def report(width: int) -> str:
    results = [run_check(check, Thirds(Conventions()), "thirds") for check in CHECKS]
    out = Console(file=io.StringIO(), width=width)
    causes = causes_of(CHECKS, results, Thirds(Conventions()), seconds=0).causes
    show(out, "thirds", CHECKS, results, compare(results, {}), causes)
    return out.file.getvalue()  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("width", [80, 150])
def test_table_names_what_was_found_and_what_is_missing(width: int) -> None:
    table = report(width).partition("└")[0]
    assert "0.333 times the declared one" in table
    assert "updates have no dropout" in table
    assert all(name in table for name in ("loss.declared_value", "FAIL", "update", "not provided"))
    assert all(len(line) <= width for line in table.splitlines())
