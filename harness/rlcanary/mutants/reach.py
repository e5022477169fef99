"""Runs of the checks on the original code, with what of it each one runs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CodeType, FrameType
from typing import Any

from rlcanary.checks import Check, run_check
from rlcanary.contract.adapter import Adapter
from rlcanary.mutants.mutant import Place, Run, wrapped

# Functions by their identity, each with the offsets of its instructions that ran.
Offsets = dict[int, tuple[CodeType, set[int]]]


def runs_on_original(adapter: Adapter, spec: str, checks: Iterable[Check], packages: tuple[str, ...]) -> Iterator[Run]:
    """Run the checks on the original code, and yield those that pass or fail with what they run.

    A check that does not apply under the adapter's conventions runs nothing.

    Args:
        adapter: the original.
        spec: its name for `load_adapter`.
        checks: the checks to run.
        packages: the modules and packages whose instructions are recorded.
    """
    for check in checks:
        ran: dict[str, Offsets] = {}
        result = run_check(check, wrapped(adapter, partial(_traced, ran, packages)), spec)
        if result.status in ("pass", "fail") or (not result.missing and check.applies(adapter.conventions)):
            places = {name: frozenset(_places(offsets)) for name, offsets in ran.items()}
            yield Run(check, result.seconds, places, tuple(found.fingerprint for found in result.findings))


def places_of(code: CodeType) -> list[Place | None]:
    """Return the place of each code unit of a function, None where it has none.

    The instruction at the offset `f_lasti` is that of code unit `f_lasti // 2`.
    """
    return [
        None if None in position else (code.co_filename, position[0], position[2], position[1], position[3])  # type: ignore[misc]
        for position in code.co_positions()
    ]


def is_within(module: str, packages: Iterable[str]) -> bool:
    """Tell whether a module is one of these, or in one of these packages."""
    return any(module == package or module.startswith(f"{package}.") for package in packages)


@contextmanager
def _traced(found: dict[str, Offsets], packages: tuple[str, ...], capability: str) -> Iterator[None]:
    offsets = found.setdefault(capability, {})

    def enter(frame: FrameType, _event: str, _argument: Any) -> Any:
        if not is_within(frame.f_globals.get("__name__", ""), packages):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        _, ran = offsets.setdefault(id(frame.f_code), (frame.f_code, set()))

        def run(frame: FrameType, _event: str, _argument: Any) -> Any:
            ran.add(frame.f_lasti)
            return run

        return run

    before, before_in_threads = sys.gettrace(), threading.gettrace()
    sys.settrace(enter)
    threading.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)
        threading.settrace(before_in_threads)


def _places(offsets: Offsets) -> Iterator[Place]:
    for code, ran in offsets.values():
        places = places_of(code)
        yield from (place for offset in ran if (place := places[offset // 2]) is not None)
