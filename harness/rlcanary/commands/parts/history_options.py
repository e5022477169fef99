"""Shared options and warnings of the commands that read a history."""

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from rlcanary.history.history import History, find_history, load_history
from rlcanary.history.repository import require_own_project
from rlcanary.system.printable import printable

MOST_WARNINGS = 20
Item = TypeVar("Item")
Callback = TypeVar("Callback", bound=Callable[..., Any])


def history_options(command: Callback) -> Callback:
    """Add the options of every command that reads a history: `folder` and `any_project`, for `open_history`."""
    command = click.option(
        "--any-project", is_flag=True, help="Also read runs of commits that this repository does not have."
    )(command)
    return click.option(
        "--dir",
        "folder",
        type=click.Path(path_type=Path),
        help="Folder with the results of past runs [default: pytest's rlcanary_results, else unit_results beside "
        "the tests].",
    )(command)


def open_history(folder: Path | None, any_project: bool) -> History:
    """Open the history that a command reads, and warn about problems in its folder.

    Raises:
        UserError: The folder has no runs, or its history belongs to another project.
    """
    history = load_history(folder or find_history(Path.cwd()), read_with_progress)
    warn(history.problems)
    if not any_project:
        require_own_project(history, Path.cwd())
    return history


def read_with_progress(names: list[str]) -> Iterable[str]:
    return with_progress(names, "reading results", many=2000)


def with_progress(items: Sequence[Item], doing: str, many: int) -> Iterable[Item]:
    """Iterate over the items, with a progress bar on a terminal if there are many."""
    if len(items) < many or not sys.stderr.isatty():
        return items
    from rich.console import Console
    from rich.progress import track

    return track(items, doing, console=Console(stderr=True), transient=True)


def warn(problems: Sequence[object]) -> None:
    for problem in problems[:MOST_WARNINGS]:
        click.echo(printable(f"rlcanary: warning: {problem}"), err=True)
    if len(problems) > MOST_WARNINGS:
        click.echo(f"rlcanary: warning: … and {len(problems) - MOST_WARNINGS} more like these", err=True)
