"""One outcome for each test, from the reports of its phases."""

from dataclasses import dataclass
from typing import NamedTuple


class Phase(NamedTuple):
    """What pytest reports of a test's set-up, call or tear-down ("setup", "call", "teardown").

    xdist reports a crashed worker's test as "???".
    """

    nodeid: str
    when: str
    outcome: str  # "passed", "failed" or "skipped"
    xfail: bool
    duration_s: float


class Outcome(NamedTuple):
    nodeid: str
    outcome: str  # "passed", "failed", "error" (in set-up or tear-down), "skipped", "xfailed" or "xpassed"
    duration_s: float


@dataclass
class _Unfinished:
    outcome: str = "passed"
    duration_s: float = 0.0


class OutcomeLog:
    """Combines the phases of each test as they arrive; under xdist those of several tests interleave."""

    def __init__(self) -> None:
        self._unfinished: dict[str, _Unfinished] = {}

    def add(self, phase: Phase) -> Outcome | None:
        """The test's outcome once its last phase is in, else None."""
        test = self._unfinished.setdefault(phase.nodeid, _Unfinished())
        test.duration_s += phase.duration_s
        test.outcome = _combined(test.outcome, phase)
        if phase.when in ("setup", "call"):
            return None
        del self._unfinished[phase.nodeid]
        return Outcome(phase.nodeid, test.outcome, test.duration_s)


def _combined(so_far: str, phase: Phase) -> str:
    if so_far in ("failed", "error"):
        return so_far
    if phase.outcome == "failed":
        return "error" if phase.when in ("setup", "teardown") else "failed"
    if phase.outcome == "skipped":
        return "xfailed" if phase.xfail else "skipped"
    if phase.xfail and phase.when == "call":
        return "xpassed"
    return so_far
