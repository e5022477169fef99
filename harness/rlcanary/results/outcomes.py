"""One outcome for each test, from the reports of its phases."""

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


class OutcomeLog:
    """Combines the phases of each test as they arrive; under xdist those of several tests interleave."""

    def __init__(self) -> None:
        self._unfinished: dict[str, tuple[str, float]] = {}

    def add(self, phase: Phase) -> Outcome | None:
        """The test's outcome once its last phase is in, else None."""
        so_far, spent_s = self._unfinished.pop(phase.nodeid, ("passed", 0.0))
        outcome, duration_s = _combined(so_far, phase), spent_s + phase.duration_s
        if phase.when in ("setup", "call"):
            self._unfinished[phase.nodeid] = (outcome, duration_s)
            return None
        return Outcome(phase.nodeid, outcome, duration_s)


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
