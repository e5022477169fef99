"""The share of the suite that ran, and the capability that would let most of the rest run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Coverage:
    """The share of the suite that ran.

    Attributes:
        ran: the number of checks that called the code.
        checks: the number of checks.
        not_checked: the areas of which no check ran.
        provide: the capabilities that are missing for most of the others; empty if none is missing.
        would_run: the number of checks that need no other capabilities than these.
        adapter_errors: the number of checks that the adapter itself kept from running to their end.
    """

    ran: int
    checks: int
    not_checked: tuple[str, ...]
    provide: tuple[str, ...]
    would_run: int
    adapter_errors: int = 0

    def __str__(self) -> str:
        told = f"{self.ran} of {self.checks} checks ran"
        if self.adapter_errors:
            told += f", {self.adapter_errors} met an adapter error"
        if self.not_checked:
            told += f"; not checked: {', '.join(self.not_checked)}"
        if self.provide:
            names = " and ".join(f"`{name}`" for name in self.provide)
            told += f"; provide {names} to run {self.would_run} more"
        return told


def coverage(ids: Iterable[str], missing: Mapping[str, frozenset[str]], misfits: Collection[str] = ()) -> Coverage:
    """Count the checks that ran.

    Args:
        ids: the checks of the suite, in its order.
        missing: the checks that did not run, each with the capabilities that it lacks; none if it did not apply.
        misfits: the checks that met an error of the adapter itself.
    """
    ids = list(ids)
    areas = dict.fromkeys(name.partition(".")[0] for name in ids)
    checked = {name.partition(".")[0] for name in ids if name not in missing and name not in misfits}
    lacking = [missing[name] for name in ids if missing.get(name)]
    # The fewest capabilities, and of those the ones that most checks wait for.
    choices = sorted(set(lacking), key=lambda names: (len(names), -_enabled(names, lacking), sorted(names)))
    best = choices[0] if choices else frozenset()
    return Coverage(
        ran=len(ids) - len(missing) - len(misfits),
        checks=len(ids),
        not_checked=tuple(area for area in areas if area not in checked),
        provide=tuple(sorted(best)),
        would_run=_enabled(best, lacking),
        adapter_errors=len(misfits),
    )


def _enabled(names: frozenset[str], lacking: list[frozenset[str]]) -> int:
    return sum(each <= names for each in lacking)
