"""Combine the reports of a test's phases into one outcome."""

Outcome = tuple[str, float]
"""The outcome of a test, and its duration in seconds."""

NOTHING_YET: Outcome = ("passed", 0.0)


class OutcomeLog:
    """Combines the phases of each test as they arrive; under xdist, phases of several tests interleave."""

    def __init__(self) -> None:
        self._unfinished: dict[str, Outcome] = {}
        self._tried_again: set[str] = set()

    def add(self, nodeid: str, when: str, outcome: str, xfail: bool, duration_s: float) -> Outcome | None:
        """Returns the test's outcome and its duration in seconds once its last phase is in, else None.

        The outcome is "passed", "failed", "error" (in set-up or tear-down), "skipped", "xfailed", "xpassed" or "retried":
        it passed after an attempt that failed.

        Args:
            nodeid: node id of the test.
            when: "setup", "call" or "teardown"; xdist reports a crashed worker's test as "???".
            outcome: "passed", "failed" or "skipped"; "rerun" of pytest-rerunfailures for an attempt that does not count.
            xfail: True if the test is expected to fail.
            duration_s: duration of the phase.
        """
        so_far, spent_s = self._unfinished.pop(nodeid, NOTHING_YET)
        if outcome == "rerun":
            self._tried_again.add(nodeid)
            if when not in ("setup", "call"):  # it crashed, and has no outcome before it has run again
                return None
        if outcome != "passed" or xfail:
            so_far = _combined(so_far, when, outcome, xfail)
        if when in ("setup", "call"):
            self._unfinished[nodeid] = (so_far, spent_s + duration_s)
            return None
        if so_far == "passed" and nodeid in self._tried_again:
            so_far = "retried"
        return so_far, spent_s + duration_s


def _combined(so_far: str, when: str, outcome: str, xfail: bool) -> str:
    if so_far in ("failed", "error"):
        return so_far
    if outcome == "failed":
        return "error" if when in ("setup", "teardown") else "failed"
    if outcome == "skipped":
        return "xfailed" if xfail else "skipped"
    if xfail and when == "call" and so_far != "xfailed":  # a subtest failed as expected
        return "xpassed"
    return so_far
