"""A finding of the audit: what is wrong with an update, by how much, and since when."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

log = logging.getLogger("rlcanary.live")

OnFinding = Literal["log", "warn", "stop"]


class Stopped(Exception):
    """The audit found something, and was asked to stop the run for it. The update was taken."""


@dataclass
class Finding:
    """One thing that is wrong, told once for a run however often it is seen.

    Attributes:
        invariant: the module that judged, such as "gradient", and the kind of mistake, such as "scale".
        message: a sentence with the size of the mistake and, where one explains it, its cause.
        size: how far off it is, 0 being right; the unit is the invariant's own.
        since: the number of the first update in which it was seen.
        updates: the number of audited updates in which it was seen.
    """

    invariant: str
    message: str
    size: float
    since: int = 0
    updates: int = 1

    def __str__(self) -> str:
        seen = f"seen in {self.updates} audited updates, first in update {self.since}"
        return f"{self.invariant}: {self.message} ({seen if self.updates > 1 else f'update {self.since}'})"


def without_consequences(found: list[Finding], known: Sequence[Finding] = ()) -> list[Finding]:
    """Leave out the logged loss where the gradient is wrong, or is known to be: it is that of the same wrong loss."""
    if not any(finding.invariant.startswith("gradient.") for finding in (*found, *known)):
        return found
    return [finding for finding in found if finding.invariant not in ("logged.loss", "logged.policy_loss")]


class Findings(list[Finding]):
    """The findings of a run, each kind once with the size and the message of its worst update."""

    def add(self, found: Finding) -> bool:
        """Add a finding of an update -> True if its kind is new."""
        for known in self:
            if known.invariant == found.invariant:
                known.updates += 1
                if found.size > known.size:
                    known.size, known.message = found.size, found.message
                return False
        self.append(found)
        return True


def warn(told: str) -> None:
    """Warn at the line of the run that called the audit."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("rlcanary.live"):
        level, frame = level + 1, frame.f_back
    warnings.warn(f"rlcanary: {told}", stacklevel=level)


def warn_only(told: str) -> None:
    """Warn of the audit itself, also where the run makes errors of warnings: that is no reason to end it."""
    try:
        warn(told)
    except Warning:
        log.warning("rlcanary: %s", told)
