"""What a launched script says: only what its job wrote last counts, never a log."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlcanary.jobs.outcomes import Outcome, OutcomeTable, Reading
from rlcanary.jobs.waiting import JobEnd
from rlcanary.system.ending import Ending

CHECKS_VARIABLE = "RLCANARY_METRIC_CHECKS"
"""Names the file to which `rlcanary check-metrics` appends a line for each of its runs."""

EXIT_CODES = {Outcome.GOOD: 0, Outcome.BAD: 1, Outcome.UNTESTABLE: 125, Outcome.INFRA: 137, Outcome.ABORT: 2}
"""Of `rlcanary launch`. 137 reads as killed: `rlcanary bisect` runs such a commit again, `git bisect run` stops."""


@dataclass(frozen=True)
class Judged:
    """One call of `rlcanary check-metrics` in the script."""

    passed: bool


def read_checks(file: Path) -> list[Judged]:
    """The calls in their order; none where the file is missing. Raises ValueError for a file that is cut or foreign."""
    if not file.exists():
        return []
    text = file.read_text(encoding="utf-8")
    if text and not text.endswith("\n"):
        raise ValueError(f"{file.name} is cut short")
    judged: list[Judged] = []
    for line in text.splitlines():
        passed = json.loads(line).get("passed")
        if not isinstance(passed, bool):
            raise ValueError(f"{file.name} holds {line[:60]!r}")
        judged.append(Judged(passed))
    return judged


def read_verdict(end: JobEnd, checks: Path) -> Reading:
    """Good only where the script exits 0 and its metric checks passed, bad only where they failed.

    A script that dies before its metrics are judged is untestable: what broke is not what is asked.
    """
    if end.result is None:
        return OutcomeTable().read(Ending(0, 0.0, state=end.state, why=end.broken or "no result file"))
    reading = OutcomeTable().read(Ending(end.result.exit_code, end.result.seconds))
    if reading.outcome in (Outcome.INFRA, Outcome.UNTESTABLE):
        return reading
    try:
        judged = read_checks(checks)
    except (ValueError, AttributeError) as error:
        return Reading(Outcome.INFRA, f"the record of the metric checks cannot be read: {error}")
    if not judged:
        return Reading(Outcome.UNTESTABLE, f"{reading.reason}: the metrics were not judged")
    passed = all(call.passed for call in judged)
    if end.result.exit_code == 0 and passed:
        return Reading(Outcome.GOOD, "the metric checks pass")
    if not passed:
        return Reading(Outcome.BAD, "a metric check fails")
    return Reading(Outcome.UNTESTABLE, f"{reading.reason}: the metric checks pass, and the script fails after them")


def combine(readings: Sequence[Reading]) -> Reading:
    """Of several scripts: bad where one is bad, good only where all are."""
    for outcome in (Outcome.ABORT, Outcome.BAD, Outcome.INFRA, Outcome.UNTESTABLE):
        for reading in readings:
            if reading.outcome is outcome:
                return reading
    return readings[0]
