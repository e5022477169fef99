"""Write one HTML page with the findings of several codebases or releases."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import click

from rlcanary.console import progress_bar
from rlcanary.errors import UserError
from rlcanary.html.findings import name_of
from rlcanary.html.gallery_page import Column, gallery_page
from rlcanary.system.files import require_writable, write_whole


@click.command(epilog="Exit codes: 0 the page is written, whatever the checks found, 2 usage error, 3 internal error.")
@click.argument("reports", metavar="REPORT...", nargs=-1, required=True)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default="gallery.html",
    show_default=True,
    metavar="FILE",
    help="The page.",
)
def gallery(reports: tuple[str, ...], output: Path) -> None:
    """Write one HTML page of several codebases or releases: areas by codebase, and each finding drawn.

    REPORT is a file that `rlcanary check ADAPTER --json FILE` wrote, or an ADAPTER, which is then checked. Reports of one
    framework in several releases show since which of them a check fails.
    """
    require_writable(output)
    files = {name: Path(name) for name in reports if name.endswith(".json")}
    found = {name: _read(path) for name, path in files.items()}
    adapters = [name for name in dict.fromkeys(reports) if name not in files]
    with progress_bar() as progress:
        task = progress.add_task("checking", total=len(adapters))
        for name in adapters:
            progress.update(task, description=f"checking {name}")
            found[name] = _check(name)
            progress.advance(task)
    ordered = {name: found[name] for name in reports}
    names = [name_of(report) for report in ordered.values()]
    for told in (lambda file: file.stem, str):  # where two are alike, what tells them apart
        alike = Counter(names)
        names = [
            name if alike[name] == 1 else f"{name_of(report)} ({told(Path(file))})"
            for name, (file, report) in zip(names, ordered.items(), strict=True)
        ]
    columns = [Column(name, report) for name, report in zip(names, ordered.values(), strict=True)]
    write_whole(output, gallery_page(columns))
    click.echo(f"{output}: {len(columns)} report{'' if len(columns) == 1 else 's'}")


def _check(adapter: str) -> dict[str, Any]:
    """Run `rlcanary check` in a process of its own, so that no framework meets another one.

    Raises:
        UserError: it refused.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command = [sys.executable, "-m", "rlcanary", "check", adapter, "--json", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        report = _read(path) if path.exists() else {}
        if done.returncode == 2 or report.get("exit_code") != done.returncode:
            why = "".join(done.stderr.strip().splitlines()[-1:]).removeprefix("rlcanary: ")
            raise UserError(f"cannot check {adapter}: {why}")
        return report


def _read(path: Path) -> dict[str, Any]:
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON: write it with `rlcanary check ADAPTER --json {path}`") from error
    needed = {"id", "area", "status", "severity", "message", "snippet", "findings"}
    is_report = (
        isinstance(report, dict) and isinstance(report.get("adapter"), str) and isinstance(report.get("checks"), list)
    )
    if not is_report or not all(isinstance(each, dict) and needed <= each.keys() for each in report["checks"]):
        raise UserError(f"{path} is no report: write it with `rlcanary check ADAPTER --json {path}`")
    return report
