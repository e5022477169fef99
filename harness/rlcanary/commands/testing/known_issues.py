"""Show the registry of known issues."""

from __future__ import annotations

import datetime
from pathlib import Path

import click

from rlcanary.errors import UserError
from rlcanary.known_issues import FILE_NAME, PRIORITIES, read_issues


@click.command("known-issues")
@click.argument("path", type=click.Path(path_type=Path), default=Path(FILE_NAME))
def known_issues(path: Path) -> None:
    """Show the registry of known issues (PATH, or known_issues.toml)."""
    from rich.table import Table

    from rlcanary.console import report_console

    if not path.exists():
        raise UserError(f"there is no registry {path} here: give its path, or write one (see docs/gates.md)")
    issues = read_issues(path)
    headings = ("Id", "Priority", "Since", "Until", "Owner", "Reason", "Workaround", "Upstream", "Tests")
    table = Table(*headings, title="Known issues")
    for issue in sorted(issues, key=lambda issue: (PRIORITIES.index(issue.priority), issue.id)):
        passed = issue.ended(datetime.date.today())
        reason = issue.reason + (f" (does not show here: {passed})" if passed else "")
        cells = (
            issue.id,
            issue.priority,
            str(issue.since or ""),
            str(issue.until or ""),
            issue.owner,
            reason,
            issue.workaround,
            issue.upstream,
            "\n".join(issue.tests),
        )
        table.add_row(*cells)
    report_console().print(table)
