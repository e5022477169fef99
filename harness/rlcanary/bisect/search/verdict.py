"""The result of a search."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from rlcanary.bisect.search.likelihood import BAD, GOOD


class Contradiction(Exception):
    """An outcome that contradicts an earlier one, assuming that one commit broke the command."""


class Refusal(StrEnum):
    """A reason why a search from these ends would find nothing."""

    GOOD_FAILS = "good-fails"
    BAD_PASSES = "bad-passes"
    GOOD_UNTESTABLE = "good-untestable"
    BAD_UNTESTABLE = "bad-untestable"
    ALIKE = "alike"
    """GOOD and BAD look like the same commit after many runs."""


@dataclass(frozen=True)
class Step:
    """One of two commits that each break a part of the runs."""

    suspects: tuple[str, ...]
    """The candidates for it, oldest first."""
    probability: float
    """The probability that one of them breaks the command."""
    failure_rate: float
    """The share of the runs that fail from this commit on."""


@dataclass(frozen=True)
class Verdict:
    suspects: tuple[str, ...]
    """The candidates for the first bad commit, oldest first."""
    probability: float = 1.0
    """The probability that one of the suspects is the first bad commit."""
    posterior: Mapping[str, float] = field(default_factory=dict)
    """The probability of every commit to be the first bad one, oldest first. Empty if the search has none."""
    estimates: Mapping[str, float] = field(default_factory=dict)
    """Estimated parameters of the command, by name.

    Pass/fail: the rates `false_fail` and `false_pass`. Metric: the levels `before` and `after`, and the standard
    deviation `noise`.
    """
    relapse: tuple[str, str] | None = None
    """A bad commit and a later good one, if the history breaks more than once. The culprit is then one of several."""

    steps: tuple[Step, ...] = ()
    """The two steps, older first, if two commits are likelier to break the command than one. Empty otherwise."""

    @property
    def culprit(self) -> str | None:
        return self.suspects[0] if len(self.suspects) == 1 and not self.steps else None


def check_contradiction(
    readings: Mapping[int, Sequence[float]], position_of: Mapping[str, int], position: int, reading: float
) -> None:
    """Compare a reading at `position` with the `readings` at all positions.

    Raises:
        Contradiction: A commit is good, but one at or before it is bad.
    """
    for other, known in readings.items():
        if reading == GOOD and BAD in known and other <= position:
            good, bad = position, other
        elif reading == BAD and GOOD in known and position <= other:
            good, bad = other, position
        else:
            continue
        if good != bad and {good, bad} & {-1, max(position_of.values())}:
            continue  # An end whose runs contradict its name is refused elsewhere.
        names = {index: sha[:10] for sha, index in position_of.items() if index in (good, bad)}
        raise Contradiction(f"{names[good]} is good, but {names[bad]} at or before it is bad")


def likeliest(suspects: Sequence[str], posterior: Mapping[str, float], count: int) -> list[str]:
    """Select the `count` suspects of the highest probability, in the given order."""
    ranked = sorted(suspects, key=lambda sha: -posterior.get(sha, 0.0))[:count]
    return [sha for sha in suspects if sha in ranked]
