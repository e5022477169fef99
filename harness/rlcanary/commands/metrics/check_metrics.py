"""Check a run's metrics against limits."""

import json
import os
from pathlib import Path
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from rlcanary.console import report_console
from rlcanary.errors import UserError
from rlcanary.history.run_result import read_json
from rlcanary.run_metrics.expression import Check, Verdict, shown
from rlcanary.run_metrics.windows import is_finite
from rlcanary.system.files import require_writable
from rlcanary.system.printable import printable


@click.command("check-metrics", context_settings={"ignore_unknown_options": True})
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option(
    "--record",
    type=click.Path(path_type=Path),
    envvar="RLCANARY_METRIC_CHECKS",
    metavar="FILE",
    help="Append the result to this file as a line of JSON; default $RLCANARY_METRIC_CHECKS.",
)
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("checks", nargs=-1, required=True, metavar="CHECK...")
def check_metrics(file: Path, checks: tuple[str, ...], record: Path | None, as_json: bool) -> int:
    """Check a run's metrics against CHECKs such as 'max(data["train/loss"]) < 2'.

    FILE is JSON: `{"metric": {"step": value}}` as `rlcanary dump-logs` writes it, or a results file of the tests.

    Exit codes: 0 every check passes, 1 one fails, 2 the file or a check could not be read, 3 internal error.
    """
    parsed = [Check(text) for text in checks]
    if record is not None:
        require_writable(record)
    read = read_json(file, pipes=True)  # such as `rlcanary check-metrics <(…)`
    if isinstance(read, str):
        raise UserError(f"cannot read {file}: {read}")
    if not isinstance(read.document, dict):
        raise UserError(f"{file} holds no metrics: its top level is not an object")
    verdicts = [check.on(read.document) for check in parsed]
    if as_json:
        click.echo(json.dumps([vars(verdict) | {"values": jsonable(verdict.values)} for verdict in verdicts], indent=2))
    else:
        report_console(highlight=False).print(verdict_table(verdicts))
    passed = all(verdict.passed for verdict in verdicts)
    if record is not None:
        append_line(record, {"passed": passed, "failed": [verdict.check for verdict in verdicts if not verdict.passed]})
    return 0 if passed else 1


def append_line(file: Path, document: dict[str, Any]) -> None:
    """Append a line of JSON and wait until it is on disk."""
    with file.open("a", encoding="utf-8") as stream:
        stream.write(f"{json.dumps(document)}\n")
        stream.flush()
        os.fsync(stream.fileno())


def jsonable(values: list[Any]) -> list[Any]:
    """Replace values that are not finite by null."""
    return [value if isinstance(value, str) or is_finite(value) else None for value in values]


def verdict_table(verdicts: list[Verdict]) -> Table:
    table = Table(title="Metric Checks", show_lines=True)
    table.add_column("Status", no_wrap=True)
    table.add_column("Check", overflow="fold")
    table.add_column("Value", justify="right", overflow="fold")
    table.add_column("Message", overflow="fold")
    for verdict in verdicts:
        status = Text("PASS", style="green") if verdict.passed else Text("FAIL", style="bold red")
        values = ", ".join(map(shown, verdict.values))
        table.add_row(status, *(Text(printable(text)) for text in (verdict.check, values, verdict.message)))
    return table
