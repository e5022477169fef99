"""A mutant, a check's run on the original code, and an adapter whose capabilities run inside a context."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from rlcanary.checks import Check
from rlcanary.checks.tally import Fingerprint
from rlcanary.contract.adapter import CAPABILITIES, Adapter

Place = tuple[str, int, int, int, int]
"""A piece of source: its file, the first line and column, and the last line and the column behind it."""

Around = Callable[[str], AbstractContextManager[None]]
"""Opens the context in which the named capability runs."""


@dataclass(frozen=True)
class Run:
    """A check's run on the original code.

    Attributes:
        check: the check.
        seconds: the time it took.
        ran: the places of the instructions of the code under mutation that ran, by the capability that the check called.
        known: the findings on the original. A mutant is killed by another one.
    """

    check: Check
    seconds: float
    ran: Mapping[str, frozenset[Place]]
    known: tuple[Fingerprint, ...] = ()


class Mutant(Protocol):
    """The code behind an adapter with one mistake."""

    @property
    def id(self) -> str:
        """The place and the mistake: stable while the mutated code stays as it is."""

    @property
    def where(self) -> str:
        """The mutated place, `module:name`, such as `rlcanary.reference.objective.kl:_estimate`."""

    @property
    def diff(self) -> str:
        """The mistake as lines that start with - and +."""

    def planted_in(self, adapter: Adapter) -> Adapter:
        """Return the adapter with the mistake."""

    def reached_by(self, run: Run) -> frozenset[str]:
        """Return the capabilities through which a check runs the mutated place; none if it does not."""


def wrapped(adapter: Adapter, around: Around) -> Adapter:
    """Return a copy of an adapter each of whose capabilities runs inside `around(name)`.

    What a check computes itself, with the oracle say, runs outside.
    """
    kind = type(adapter)

    def method(name: str) -> Any:
        def run(self: Adapter, *arguments: Any, **keywords: Any) -> Any:
            with around(name):
                return getattr(kind, name)(self, *arguments, **keywords)

        return run

    names = (name for name in CAPABILITIES if getattr(kind, name) is not getattr(Adapter, name))
    return overridden(adapter, {name: method(name) for name in (*names, "new_state", "new_engine")})


def overridden(adapter: Adapter, methods: Mapping[str, Callable[..., Any]]) -> Adapter:
    """Return a copy of an adapter with these methods in place of its own."""
    kind = type(adapter)
    copy: Adapter = object.__new__(type(kind.__name__, (kind,), dict(methods)))
    vars(copy).update(vars(adapter))
    return copy
