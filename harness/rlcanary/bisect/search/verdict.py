"""What a search comes to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Contradiction(Exception):
    """An outcome that cannot be true together with the earlier ones, if one commit broke the command."""


class Refusal(StrEnum):
    """Why a search from these ends would find nothing."""

    GOOD_FAILS = "good-fails"
    BAD_PASSES = "bad-passes"
    GOOD_UNTESTABLE = "good-untestable"
    BAD_UNTESTABLE = "bad-untestable"
    ALIKE = "alike"
    """Many runs of GOOD and BAD look as if both were the same commit."""


@dataclass(frozen=True)
class Verdict:
    suspects: tuple[str, ...]
    """The commits, oldest first, of which one is the first bad one."""
    probability: float = 1.0
    """That one of them is."""
    posterior: Mapping[str, float] = field(default_factory=dict)
    """The probability of every commit, oldest first, to be the first bad one. Empty where the search has none."""
    estimates: Mapping[str, float] = field(default_factory=dict)
    """What was learned about the command, by name: its rates `false_fail` and `false_pass`, or of a metric the level
    `before`, the level `after` and the `noise`, a standard deviation."""
    relapse: tuple[str, str] | None = None
    """A commit that is bad and a later one that is good, where the runs say that the history breaks more than once: the
    culprit is then one of several."""

    @property
    def culprit(self) -> str | None:
        return self.suspects[0] if len(self.suspects) == 1 else None


def likeliest(suspects: Sequence[str], posterior: Mapping[str, float], count: int) -> list[str]:
    """So many suspects of the highest probability, in the order in which they are given."""
    ranked = sorted(suspects, key=lambda sha: -posterior.get(sha, 0.0))[:count]
    return [sha for sha in suspects if sha in ranked]
