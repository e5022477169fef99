"""Show which tests the gates hold back, and why."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from rlcanary.errors import UserError
from rlcanary.gates import REPORT_OPTION


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("pytest_arguments", nargs=-1, type=click.UNPROCESSED)
def gates(pytest_arguments: tuple[str, ...]) -> None:
    """Show which tests each gate holds back, and why.

    PYTEST_ARGUMENTS are those of a run, such as `tests/unit --hf-gated`. No test is run.
    """
    from rich.table import Table

    from rlcanary.console import report_console

    report = collect(pytest_arguments)
    console = report_console()
    if not report["held"]:
        console.print(f"{report['collected']} tests collected, none held back")
        return
    table = Table("Gate", "Test", "Why", title=f"{len(report['held'])} of {report['collected']} tests are held back")
    rows = [(held["gate"], test, held["reason"]) for test, reasons in report["held"].items() for held in reasons]
    before = ""
    for gate, test, reason in sorted(rows):
        table.add_row("" if gate == before else gate, test, reason)
        before = gate
    console.print(table)


def collect(arguments: Iterable[str]) -> Mapping[str, Any]:
    """Collect the tests with pytest and return the plugin's report on them.

    Raises:
        UserError: pytest could not collect them.
    """
    with tempfile.TemporaryDirectory(prefix="rlcanary-gates-") as folder:
        report = Path(folder) / "gates.json"
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", f"{REPORT_OPTION}={report}", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not report.exists() or done.returncode not in (0, 5):
            print(done.stdout + done.stderr, file=sys.stderr)
            raise UserError(f"pytest could not collect the tests (exit code {done.returncode}); see above")
        found: Mapping[str, Any] = json.loads(report.read_text())
        return found
