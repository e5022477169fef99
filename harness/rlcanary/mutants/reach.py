"""Runs of the checks on the original code, with the lines of it that each one runs."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

from rlcanary.checks import Check, run_check
from rlcanary.contract.adapter import Adapter
from rlcanary.mutants.mutant import Line, Run, wrapped


def runs_on_original(adapter: Adapter, spec: str, checks: Iterable[Check], packages: tuple[str, ...]) -> Iterator[Run]:
    """Run the checks on the original code, and yield those that pass or fail with the lines they run.

    A check that does not apply under the adapter's conventions runs no line.

    Args:
        adapter: the original.
        spec: its name for `load_adapter`.
        checks: the checks to run.
        packages: the modules and packages whose lines are recorded.
    """
    for check in checks:
        lines: dict[str, set[Line]] = defaultdict(set)
        result = run_check(check, wrapped(adapter, partial(_traced, lines, packages)), spec)
        if result.status in ("pass", "fail") or (not result.missing and check.applies(adapter.conventions)):
            reached = {name: frozenset(ran) for name, ran in lines.items()}
            yield Run(check, result.seconds, reached, tuple(found.fingerprint for found in result.findings))


def is_within(module: str, packages: Iterable[str]) -> bool:
    """Tell whether a module is one of these, or in one of these packages."""
    return any(module == package or module.startswith(f"{package}.") for package in packages)


@contextmanager
def _traced(found: dict[str, set[Line]], packages: tuple[str, ...], capability: str) -> Iterator[None]:
    lines = found[capability]

    def enter(frame: FrameType, _event: str, _argument: Any) -> Any:
        return line if is_within(frame.f_globals.get("__name__", ""), packages) else None

    def line(frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "line":
            lines.add((frame.f_code.co_filename, frame.f_lineno))
        return line

    before, before_in_threads = sys.gettrace(), threading.gettrace()
    sys.settrace(enter)
    threading.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)
        threading.settrace(before_in_threads)
