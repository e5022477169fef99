"""Which commit to test next, and what the tests so far say."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Protocol

from rlcanary.bisect.outcomes import Outcome


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


class Search(Protocol):
    """A search over a line of commits. Only good, bad and untestable outcomes are recorded: the rest is no evidence."""

    def next_commit(self) -> str | None:
        """The commit to test next; None when there is nothing left to learn."""
        ...

    def record(self, commit: str, outcome: Outcome) -> None: ...

    def result(self) -> Verdict: ...

    def tests_left(self) -> int:
        """About how many more tests the search takes."""
        ...


class Halving:
    """Plain halving: every outcome is believed, so n commits take at most ceil(log2(n)) tests.

    Untestable commits are taken to lie side by side, as they do when a build was broken for a while: both edges of their
    stretch are found by halving, tests inside it confirm until no gap is wider than half of it, and the commits between
    are not tried one by one. What remains is a range of suspects, never a guess.
    """

    def __init__(self, commits: Sequence[str]) -> None:
        """`commits`: oldest first, the last one known bad, the parent of the first known good."""
        self._commits = tuple(commits)
        self._position = {commit: index for index, commit in enumerate(commits)}
        self._good = -1
        self._bad = len(commits) - 1
        self._untestable: set[int] = set()

    def record(self, commit: str, outcome: Outcome) -> None:
        """Raises Contradiction for a good commit after a bad one, KeyError for a commit outside the range."""
        index = self._position[commit]
        if outcome is Outcome.GOOD:
            if index >= self._bad:
                raise Contradiction(
                    f"{commit[:10]} is good, but {self._commits[self._bad][:10]} at or before it is bad"
                )
            self._good = max(self._good, index)
        elif outcome is Outcome.BAD:
            if index <= self._good:
                raise Contradiction(
                    f"{commit[:10]} is bad, but {self._commits[self._good][:10]} at or after it is good"
                )
            self._bad = min(self._bad, index)
        elif outcome is Outcome.UNTESTABLE:
            self._untestable.add(index)
        else:
            raise ValueError(f"{outcome} is no evidence about a commit")

    def next_commit(self) -> str | None:
        index = self._next_index()
        return None if index is None else self._commits[index]

    def result(self) -> Verdict:
        return Verdict(self._commits[self._good + 1 : self._bad + 1])

    def tests_left(self) -> int:
        return (self._bad - self._good - 1).bit_length()

    def _next_index(self) -> int | None:
        good, bad = self._good, self._bad
        skipped = sorted(index for index in self._untestable if good < index < bad)
        if not skipped:
            return (good + bad) // 2 if bad - good > 1 else None
        first, last = skipped[0], skipped[-1]
        if first - good > 1 or bad - last > 1:
            before, after = (good + first) // 2, (last + bad) // 2
            return before if first - good >= bad - last else after
        before, after = max(pairwise(skipped), key=lambda pair: pair[1] - pair[0], default=(first, last))
        wide = after - before > 1 and 2 * (after - before) > last - first
        return (before + after) // 2 if wide else None
