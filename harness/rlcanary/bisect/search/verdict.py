"""The result of a search."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


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

    @property
    def culprit(self) -> str | None:
        return self.suspects[0] if len(self.suspects) == 1 else None


def likeliest(suspects: Sequence[str], posterior: Mapping[str, float], count: int) -> list[str]:
    """Select the `count` suspects of the highest probability, in the given order."""
    ranked = sorted(suspects, key=lambda sha: -posterior.get(sha, 0.0))[:count]
    return [sha for sha in suspects if sha in ranked]
