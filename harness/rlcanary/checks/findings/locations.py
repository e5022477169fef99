"""The line of the user's code at which a failure is shown: in CI, in a code review."""

from __future__ import annotations

import inspect
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rlcanary.checks.check import Check, Result
from rlcanary.checks.registry import all_checks
from rlcanary.contract.adapter import Adapter


@dataclass(frozen=True)
class Location:
    """A line of a file of the repository.

    Attributes:
        path: the file, relative to the repository, with slashes.
        line: the line, counted from 1.
    """

    path: str
    line: int


def repository_root() -> Path:
    """Return the folder that paths are relative to: GitHub's checkout where a workflow runs, else the current folder."""
    here, named = Path.cwd(), os.environ.get("GITHUB_WORKSPACE")
    workspace = Path(named).resolve() if named else here  # the current folder has no links in it either
    return workspace if here.is_relative_to(workspace) else here


def location_of(result: Result, check: Check, adapter: Adapter, root: Path) -> Location | None:
    """Return the line of the repository at which a failure belongs, None if the adapter's code lies elsewhere.

    That is the line that raised, else the definition of the capability that failed, else that of the adapter's class, which
    may inherit the capability from a bundled adapter.
    """
    raised = next((found.frames for found in result.findings if found.is_error), ())
    places = [*(reversed(raised) if result.status == "error" else ()), *_definitions(adapter, capability_of(check))]
    return next((found for file, line in places if (found := _within(root, file, line))), None)


def line_of(check_id: str, expected_path: Path, root: Path) -> Location | None:
    """Return the line of a check in the file of expected failures, None if that lies elsewhere."""
    path, lines = expected_path.resolve(), expected_path.read_text(encoding="utf-8").split("\n")
    numbers = {line.partition("#")[0].strip(): number for number, line in enumerate(lines, start=1)}
    return _within(root, str(path), numbers[check_id])


def capability_of(check: Check) -> str:
    """Return the capability that a check is about: of those that it needs, the one that fewest checks need."""
    return min(check.needs, key=lambda name: _calls()[name])


@cache
def _calls() -> Counter[str]:
    return Counter(name for check in all_checks() for name in check.needs)


def _definitions(adapter: Adapter, capability: str) -> Iterator[tuple[str, int]]:
    """Yield where the adapter defines a capability, and where its class begins."""
    code = getattr(inspect.unwrap(getattr(adapter, capability)), "__code__", None)
    if code is not None:  # what is written in C has none
        yield code.co_filename, code.co_firstlineno
    for owner in type(adapter).__mro__:
        yield from _class_line(owner)


def _class_line(owner: type[Any]) -> Iterable[tuple[str, int]]:
    try:
        return [(inspect.getfile(owner), inspect.getsourcelines(owner)[1])]
    except (OSError, TypeError):  # a class without source, such as object
        return []


def _within(root: Path, file: str, line: int) -> Location | None:
    path = Path(file).resolve()
    if not path.is_relative_to(root.resolve()):
        return None
    inside = path.relative_to(root.resolve())
    # An environment often lies in the repository.
    return None if "site-packages" in inside.parts else Location(inside.as_posix(), line)
