"""What one run of the command says about a commit."""

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    GOOD = "good"
    BAD = "bad"
    UNTESTABLE = "untestable"
    """This commit cannot answer the question: step around it."""
    INFRA = "infra"
    """The machine failed, not the commit: run it again, it is no evidence."""
    ABORT = "abort"
    """The search was interrupted while the command ran: no evidence."""


@dataclass(frozen=True)
class Ending:
    """How a process ended. `code` is its exit code, or minus the signal that killed it."""

    code: int
    seconds: float
    timed_out: bool = False
    why: str = ""
    """What stood in the way, where there was no process to run."""


@dataclass(frozen=True)
class Reading:
    outcome: Outcome
    reason: str


UNTESTABLE_CODES = {
    125: "asked to skip this commit",
    126: "the command is not executable here",
    127: "command not found",
}
PYTEST_UNTESTABLE_CODES = {
    4: "pytest could not find what to run",
    5: "pytest collected no test",
}
RLCANARY_UNTESTABLE_CODES = {
    2: "rlcanary did not understand the command here, or the adapter does not import",
    3: "rlcanary itself broke",
}
INFRA_SIGNALS = (signal.SIGKILL, signal.SIGTERM)


def read_ending(ending: Ending, *, runs_pytest: bool, runs_rlcanary: bool = False) -> Reading:
    """The outcome of a finished run, by the tables above; every other exit code and signal is bad.

    A shell reports a child that died of signal N as exit code 128 + N: both are read the same.
    """
    if ending.timed_out:
        return Reading(Outcome.INFRA, f"timed out after {ending.seconds:.0f} s")
    number = -ending.code if ending.code < 0 else ending.code - 128
    if number in INFRA_SIGNALS:
        return Reading(Outcome.INFRA, f"killed by {signal.Signals(number).name}")
    if ending.code < 0:
        return Reading(Outcome.BAD, f"died of {signal.Signals(number).name}")
    if ending.code == 0:
        return Reading(Outcome.GOOD, "exit 0")
    tables = [UNTESTABLE_CODES]
    tables += [PYTEST_UNTESTABLE_CODES] if runs_pytest else []
    tables += [RLCANARY_UNTESTABLE_CODES] if runs_rlcanary else []
    for table in tables:
        if ending.code in table:
            return Reading(Outcome.UNTESTABLE, f"exit {ending.code}: {ending.why or table[ending.code]}")
    return Reading(Outcome.BAD, f"exit {ending.code}")


def mentions_pytest(texts: Iterable[str]) -> bool:
    """Whether any argument, or the text of a script that the command runs, names pytest."""
    return any(re.search(r"\b(pytest|py\.test)\b", text) for text in texts)


def mentions_rlcanary(texts: Iterable[str]) -> bool:
    """Whether the command line, or the text of a script that it runs, calls one of rlcanary's own verdicts."""
    return any(re.search(r"\brlcanary\s+(check|check-metrics|regress|bugs)\b", text) for text in texts)
