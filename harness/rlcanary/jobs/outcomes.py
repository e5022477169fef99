"""Map the end of a run to an outcome: good, bad, untestable, infrastructure failure, abort."""

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from rlcanary.system.ending import Ending


class Outcome(StrEnum):
    GOOD = "good"
    BAD = "bad"
    MEASURED = "measured"
    """The metric has a value on this commit. The search weighs it."""
    UNTESTABLE = "untestable"
    """The commit cannot be tested. The search tries others."""
    INFRA = "infra"
    """The machine failed, not the commit. The run is no evidence and is repeated."""
    ABORT = "abort"
    """The search cannot go on, or was interrupted during the run. The run is no evidence."""


EVIDENCE = (Outcome.GOOD, Outcome.BAD, Outcome.MEASURED, Outcome.UNTESTABLE)


@dataclass(frozen=True)
class Reading:
    outcome: Outcome
    reason: str


TIMEOUT = "timeout"
TIMEOUT_CODE = 124  # Exit code of coreutils' timeout.
CODES = {
    0: (Outcome.GOOD, ""),
    125: (Outcome.UNTESTABLE, "the command asked to skip this commit"),
    126: (Outcome.UNTESTABLE, "the command is not executable here"),
    127: (Outcome.UNTESTABLE, "command not found"),
}
RUNNERS: Mapping[str, Mapping[int, tuple[Outcome, str]]] = {
    "pytest": {
        2: (Outcome.BAD, "pytest was interrupted, or a test module does not import"),
        3: (Outcome.UNTESTABLE, "pytest itself failed"),
        4: (Outcome.UNTESTABLE, "pytest did not find the test"),
        5: (Outcome.UNTESTABLE, "pytest collected no test"),
    },
    "rlcanary": {
        2: (Outcome.UNTESTABLE, "rlcanary did not understand the command here, or the adapter does not import"),
        3: (Outcome.UNTESTABLE, "rlcanary itself failed"),
    },
}
"""Exit codes with a special meaning if the command runs this program."""
SIGNALS = {signal.SIGKILL: Outcome.INFRA, signal.SIGTERM: Outcome.INFRA}
"""Signals that a machine failure causes. Any other fatal signal makes the commit bad."""
SLURM_STATES = {
    "BOOT_FAIL": Outcome.INFRA,
    "CANCELLED": Outcome.INFRA,
    "DEADLINE": Outcome.INFRA,
    "NODE_FAIL": Outcome.INFRA,
    "OUT_OF_MEMORY": Outcome.INFRA,
    "PREEMPTED": Outcome.INFRA,
    "REJECTED": Outcome.ABORT,
    "REQUEUED": Outcome.INFRA,
    "REVOKED": Outcome.INFRA,
    "TIMEOUT": Outcome.INFRA,
}
"""Outcomes of final job states. In any other state (COMPLETED, FAILED) the exit code counts.

REJECTED is rlcanary's own word for a refused submission.
"""
SLURM_STATE = re.compile(r"\bJobState=([A-Z_]+)")
"""Matches the state in the output of `scontrol show job`."""


@dataclass(frozen=True)
class Pattern:
    """Text in the output of a failed run that overrides its exit code."""

    expression: re.Pattern[str]
    outcome: Outcome


PATTERNS = tuple(
    Pattern(re.compile(expression), Outcome.INFRA)
    for expression in (
        r"No space left on device",
        r"uncorrectable ECC error",
        r"GPU has fallen off the bus",
        r"slurmstepd: error: .* DUE TO (PREEMPTION|NODE FAILURE|TIME LIMIT)",
    )
)
"""Output of broken machines. It is no evidence about the commit."""


@dataclass(frozen=True)
class OutcomeTable:
    """The tables of this module, with the user's entries in front."""

    own: Mapping[str, Outcome] = field(default_factory=dict)
    """Outcomes by exit code ("2"), pytest code ("pytest 2"), signal ("SIGSEGV"), Slurm state or "timeout"."""
    patterns: Sequence[Pattern] = ()

    def read(self, ending: Ending, runners: Iterable[str] = (), output: str = "") -> Reading:
        """Return the outcome of a finished run.

        A shell reports a child killed by signal N as exit code 128 + N. Both are read the same.

        Args:
            ending: The end of the process or job.
            runners: The keys of RUNNERS that the command runs.
            output: The text that the run printed.
        """
        if ending.state:
            outcome = self.own.get(ending.state, SLURM_STATES.get(ending.state, Outcome.INFRA))
            return Reading(outcome, f"job {ending.state}: {ending.why}" if ending.why else f"job {ending.state}")
        if ending.timed_out:
            return self._read_timeout(f"timed out after {ending.seconds:.3g} s")
        if (state := self._read_slurm_state(output)) is not None:
            return state
        own = [self.own.get(f"{runner} {ending.code}") for runner in runners] + [self.own.get(str(ending.code))]
        chosen = next((outcome for outcome in own if outcome is not None), None)
        name = f"exit {ending.code}"
        if ending.code == 0:
            return Reading(chosen or Outcome.GOOD, name)
        if (printed := _search(self.patterns, output)) is not None:
            return printed
        if chosen is not None:
            return Reading(chosen, name)
        if ending.code == TIMEOUT_CODE:
            return self._read_timeout(f"{name}: timed out")
        if (printed := _search(PATTERNS, output)) is not None:
            return printed
        if (died := self._read_signal(ending.code)) is not None:
            return died
        tables = [CODES, *(RUNNERS[runner] for runner in runners)]
        known = [table[ending.code] for table in tables if ending.code in table]
        outcome, why = known[0] if known else (Outcome.BAD, "")
        why = ending.why or why
        return Reading(outcome, f"{name}: {why}" if why else name)

    def timing_out_as(self, word: str | None) -> "OutcomeTable":
        """Return the same table with another outcome for a timeout."""
        return self if word is None else replace(self, own={**self.own, TIMEOUT: Outcome(word)})

    def _read_slurm_state(self, output: str) -> Reading | None:
        """Return the last Slurm state in the output, if it says more than the exit code."""
        states: list[str] = SLURM_STATE.findall(output)
        outcome = self.own.get(states[-1], SLURM_STATES.get(states[-1])) if states else None
        return None if outcome is None else Reading(outcome, f"Slurm: {states[-1]}")

    def _read_timeout(self, reason: str) -> Reading:
        return Reading(self.own.get(TIMEOUT, Outcome.INFRA), reason)

    def _read_signal(self, code: int) -> Reading | None:
        number = -code if code < 0 else code - 128
        if number not in signal.valid_signals():
            return None
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = f"signal {number}"  # Real-time signals have no names.
        known = name in self.own or number in SIGNALS
        if code >= 0 and not known:
            return None  # An exit code above 128 need not be a signal.
        outcome = self.own.get(name, next((o for s, o in SIGNALS.items() if s == number), Outcome.BAD))
        return Reading(outcome, f"killed by {name}" if outcome is Outcome.INFRA else f"died of {name}")


def _search(patterns: Iterable[Pattern], output: str) -> Reading | None:
    for pattern in patterns:
        if (found := pattern.expression.search(output)) is not None:
            return Reading(pattern.outcome, f"printed {found[0].strip()[:60]!r}")
    return None


def find_runners(command: Sequence[str], texts: Sequence[str]) -> tuple[str, ...]:
    """List the RUNNERS in the command's arguments, or in the text of a script that it runs."""
    pytest = any(re.search(r"\b(pytest|py\.test)\b", text) for text in (*command, *texts))
    verdicts = r"\brlcanary\s+(check|check-metrics|regress|replay|bugs|mutants|launch)\b"
    rlcanary = any(re.search(verdicts, text) for text in (" ".join(command), *texts))
    return ("pytest",) * pytest + ("rlcanary",) * rlcanary
