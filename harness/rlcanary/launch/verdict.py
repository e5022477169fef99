"""Judge a launched script by its metric checks and exit code, never by a log."""

import json
from collections.abc import Sequence
from pathlib import Path

from rlcanary.jobs.outcomes import Outcome, OutcomeTable, Reading
from rlcanary.jobs.waiting import JobEnd
from rlcanary.system.ending import Ending

CHECKS_VARIABLE = "RLCANARY_METRIC_CHECKS"
"""The variable with the path of the file to which each `rlcanary check-metrics` appends a line."""

EXIT_CODES = {Outcome.GOOD: 0, Outcome.BAD: 1, Outcome.UNTESTABLE: 125, Outcome.INFRA: 137, Outcome.ABORT: 2}
"""Exit codes of `rlcanary launch`. `rlcanary bisect` reruns a commit after 137, and `git bisect run` stops."""


def read_checks(file: Path) -> list[bool]:
    """Read whether each `rlcanary check-metrics` passed, in order. An absent file means none.

    Raises:
        ValueError: The file is cut short, or is not a list of check results.
    """
    if not file.exists():
        return []
    text = file.read_text(encoding="utf-8")
    if text and not text.endswith("\n"):
        raise ValueError(f"{file.name} is cut short")
    judged: list[bool] = []
    for line in text.splitlines():
        passed = json.loads(line).get("passed")
        if not isinstance(passed, bool):
            raise ValueError(f"{file.name} holds {line[:60]!r}")
        judged.append(passed)
    return judged


def read_verdict(end: JobEnd, checks: Path) -> Reading:
    """Judge a run: good if the script exits 0 and its metric checks passed, bad if a check failed.

    A script that dies before its metrics are judged is untestable, because it failed for another reason.
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
    passed = all(judged)
    if end.result.exit_code == 0 and passed:
        return Reading(Outcome.GOOD, "the metric checks pass")
    if not passed:
        return Reading(Outcome.BAD, "a metric check fails")
    return Reading(Outcome.UNTESTABLE, f"{reading.reason}: the metric checks pass, but the script fails after them")


def combine(readings: Sequence[Reading]) -> Reading:
    """Combine the outcomes of several scripts: bad if one is bad, good only if all are."""
    for outcome in (Outcome.ABORT, Outcome.BAD, Outcome.INFRA, Outcome.UNTESTABLE):
        for reading in readings:
            if reading.outcome is outcome:
                return reading
    return readings[0]
