"""What one run of the command says about a commit."""

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
    """The metric has a value on this commit; what it says is for the search to weigh."""
    UNTESTABLE = "untestable"
    """This commit cannot answer the question: step around it."""
    INFRA = "infra"
    """The machine failed, not the commit: run it again, it is no evidence."""
    ABORT = "abort"
    """The search cannot go on, or was interrupted while the command ran: no evidence."""


EVIDENCE = (Outcome.GOOD, Outcome.BAD, Outcome.MEASURED, Outcome.UNTESTABLE)


@dataclass(frozen=True)
class Reading:
    outcome: Outcome
    reason: str


TIMEOUT = "timeout"
TIMEOUT_CODE = 124  # of coreutils' timeout
CODES = {
    0: (Outcome.GOOD, ""),
    125: (Outcome.UNTESTABLE, "asked to skip this commit"),
    126: (Outcome.UNTESTABLE, "the command is not executable here"),
    127: (Outcome.UNTESTABLE, "command not found"),
}
RUNNERS: Mapping[str, Mapping[int, tuple[Outcome, str]]] = {
    "pytest": {
        2: (Outcome.BAD, "pytest was interrupted, or a test module does not import"),
        3: (Outcome.UNTESTABLE, "pytest itself failed"),
        4: (Outcome.UNTESTABLE, "pytest could not find what to run"),
        5: (Outcome.UNTESTABLE, "pytest collected no test"),
    },
    "rlcanary": {
        2: (Outcome.UNTESTABLE, "rlcanary did not understand the command here, or the adapter does not import"),
        3: (Outcome.UNTESTABLE, "rlcanary itself broke"),
    },
}
"""Exit codes with a meaning of their own where the command runs this program."""
SIGNALS = {signal.SIGKILL: Outcome.INFRA, signal.SIGTERM: Outcome.INFRA}
"""A process that dies of any other signal says that its commit is bad."""
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
"""Of a job in any other final state (COMPLETED, FAILED) the exit code counts.

REJECTED is our word for a refused submission.
"""
SLURM_STATE = re.compile(r"\bJobState=([A-Z_]+)")
"""As `scontrol show job` prints it."""


@dataclass(frozen=True)
class Pattern:
    """Text in the output of a run that failed, which says more than its exit code."""

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
"""What a broken machine prints; it says nothing about the commit."""


@dataclass(frozen=True)
class OutcomeTable:
    """The tables above, with the user's own entries before them."""

    own: Mapping[str, Outcome] = field(default_factory=dict)
    """By exit code ("2"), one of pytest's ("pytest 2"), signal ("SIGSEGV"), Slurm state ("NODE_FAIL") or "timeout"."""
    patterns: Sequence[Pattern] = ()

    def read(self, ending: Ending, runners: Iterable[str] = (), output: str = "") -> Reading:
        """The outcome of a finished run. `output` is what it printed, `runners` are the keys of RUNNERS that it runs.

        A shell reports a child that died of signal N as exit code 128 + N: both are read the same.
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
        """The same table with another outcome for a run that takes too long."""
        return self if word is None else replace(self, own={**self.own, TIMEOUT: Outcome(word)})

    def _read_slurm_state(self, output: str) -> Reading | None:
        """The last job's, where the command printed it and it says more than the exit code does."""
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
    """Which of RUNNERS the command runs: by an argument, or by the text of a script that it runs."""
    pytest = any(re.search(r"\b(pytest|py\.test)\b", text) for text in (*command, *texts))
    verdicts = r"\brlcanary\s+(check|check-metrics|regress|bugs|launch)\b"
    rlcanary = any(re.search(verdicts, text) for text in (" ".join(command), *texts))
    return ("pytest",) * pytest + ("rlcanary",) * rlcanary
