"""The file in which a command may leave its outcome, as its last act, if the exit code does not say enough."""

import json
import os
from pathlib import Path

from rlcanary.jobs.outcomes import Outcome, Reading
from rlcanary.system.files import write_whole

VERDICT_VARIABLE = "RLCANARY_BISECT_VERDICT"
"""The variable with the file's path. The file holds `{"outcome": "good|bad|untestable|infra|abort", "reason": "…"}`."""


def write_verdict(reading: Reading) -> None:
    """Write the verdict file. Without a bisect, do nothing."""
    place = os.environ.get(VERDICT_VARIABLE)
    if place:
        write_verdict_file(Path(place), reading)


def write_verdict_file(file: Path, reading: Reading) -> None:
    write_whole(file, json.dumps({"outcome": reading.outcome, "reason": reading.reason}) + "\n")


def read_verdict_file(file: Path) -> Reading | None:
    """Read a verdict file.

    Returns:
        None if there is no file. A file that is not understood aborts the search, because its outcome must not be
        guessed.
    """
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        outcome = Outcome(document["outcome"])
        if outcome is Outcome.MEASURED:
            raise ValueError("a metric's value is read elsewhere")
        return Reading(outcome, str(document["reason"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Reading(Outcome.ABORT, f"the verdict in {file} cannot be read: {error!r}")
