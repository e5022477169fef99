"""Show which tests an edit would run with --testmon, and why."""

from __future__ import annotations

import os
import sqlite3
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlcanary.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

# The same value as in testmon, whose own function imports coverage and the pytest plugin.
DATAFILE = os.environ.get("TESTMON_DATAFILE", ".testmondata")
MODULE = "<module>"
CONFIGURATIONS = ("pytest.ini", ".pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg")


@click.group()
def selection() -> None:
    """Show which tests an edit would run, and why."""


@selection.command(short_help="Show what TEST depends on.")
@click.argument("test")
def explain(test: str) -> None:
    """Show which files and functions TEST depends on, and through which process.

    TEST is a test's id as pytest prints it, or a part of one that no other test has.
    """
    from rlcanary.console import report_console

    found = recorded(datafile())
    name = matching(test, found)
    table = new_table("File", "Function", "Through", title=name)
    before = ""
    for file, function, ways in found[name]["through"]:
        table.add_row("" if file == before else file, shown(function), ", ".join(ways))
        before = file
    console = report_console()
    console.print(table)
    for call in found[name]["unrecorded"]:
        console.print(f"{call} was not recorded: the test depends on every module imported there", markup=False)


@selection.command(short_help="Show which tests an edit of FILE would run.")
@click.argument("file")
@click.argument("function", required=False)
def why(file: str, function: str | None) -> None:
    """Show which tests an edit of FILE, or of one FUNCTION in it, would run, and through which process they use it."""
    from rlcanary.console import report_console

    path = datafile()
    relative = inside(root_of(path), file)
    users: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    found = recorded(path)
    for test, entry in found.items():
        for used, name, ways in entry["through"]:
            if used == relative and (function is None or function in (name, name.rpartition(".")[2])):
                users[name].append((test, ", ".join(ways)))
    console = report_console()
    if not users:
        what = f"{relative} {function}" if function else relative
        reason = never_recorded(Path(file), relative) or f"none of the {len(found)} recorded tests used it"
        console.print(f"no test depends on {what}: {reason}", markup=False)
        return
    table = new_table("Function", "Test", "Through", title=relative)
    for name, tests in sorted(users.items()):
        for number, (test, ways) in enumerate(sorted(tests)):
            table.add_row("" if number else shown(name), test, ways)
    console.print(table)


@selection.command(short_help="Delete the recorded dependencies.")
def reset() -> None:
    """Delete the recorded dependencies, so that the next run with --testmon runs every test."""
    from rlcanary.selection import run_folders

    path = datafile(must_exist=False)
    removed = [each for suffix in ("", "-wal", "-shm", "-journal") if (each := Path(f"{path}{suffix}")).exists()]
    for each in removed:
        each.unlink()
    for folder in run_folders.killed_runs(root_of(path).resolve()):
        run_folders.discard(folder)
    click.echo(f"removed {', '.join(map(str, removed))}" if removed else f"nothing to remove: there is no {path}")


def datafile(must_exist: bool = True) -> Path:
    """Find the database of testmon, in this folder or the nearest parent that has one."""
    here = Path.cwd()
    path = next(
        (folder / DATAFILE for folder in (here, *here.parents) if (folder / DATAFILE).exists()), here / DATAFILE
    )
    if must_exist and not path.exists():
        raise UserError(f"there is no {DATAFILE} here or above: run `pytest --testmon` first")
    return path


def root_of(path: Path) -> Path:
    """Return the root of the recorded tests: the database's folder, unless TESTMON_DATAFILE moves the database."""
    here = Path.cwd()
    if here.is_relative_to(path.parent):
        return path.parent
    configured = (
        folder for folder in (here, *here.parents) if any((folder / name).exists() for name in CONFIGURATIONS)
    )
    return next(configured, here)


def recorded(path: Path) -> dict[str, dict[str, Any]]:
    """Read the stored facts of every test (see `testmon_data.packed`)."""
    from rlcanary.selection.stored import stored

    try:
        connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        try:
            found = stored(connection)
        finally:
            connection.close()
    except sqlite3.DatabaseError as error:
        raise UserError(f"{path} cannot be read ({error}): `rlcanary selection reset` removes it") from error
    if not found:
        raise UserError(f"{path} holds nothing that rlcanary recorded: run `pytest --testmon` with its plugins on")
    return found


def matching(test: str, found: dict[str, Any]) -> str:
    if test in found:
        return test
    names = [name for name in found if test in name]
    if len(names) == 1:
        return names[0]
    if not names:
        raise UserError(f"no recorded test has {test!r} in its id; `pytest --collect-only -q` lists the tests")
    raise UserError(
        f"{len(names)} tests have {test!r} in their ids, such as {', '.join(names[:3])}: give a longer part of one id"
    )


def inside(root: Path, file: str) -> str:
    absolute = Path(file).resolve()
    if not absolute.is_relative_to(root.resolve()):
        raise UserError(f"{file} is not below {root}, where the recorded tests are")
    return absolute.relative_to(root.resolve()).as_posix()


def never_recorded(path: Path, relative: str) -> str | None:
    """Explain why no test can ever depend on a file; None if one can."""
    from rlcanary.selection.injected.rlcanary_recorder.files import NEVER, TOOLS, is_recordable

    if not is_recordable(relative):
        folders = [name.strip("/") for name in NEVER]
        return f"what lies in {', '.join(sorted({*TOOLS, *folders}))} is never recorded"
    if path.is_dir():
        return "it is a folder, of which only the names in it are recorded, for tests that list them"
    if not path.exists():
        return "there is no such file; the tests that looked for it run when it appears"
    return None


def shown(function: str) -> str:
    return {MODULE: "(the module itself)", "": "(data)"}.get(function, function)


def new_table(*columns: str, title: str) -> Table:
    from rich.table import Table as RichTable

    table = RichTable(title=title)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
