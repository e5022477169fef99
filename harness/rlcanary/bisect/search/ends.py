"""The runs of GOOD and BAD before the search. Each end runs first, and again while its runs contradict its name."""

from collections.abc import Collection, Sequence

import numpy as np

from rlcanary.bisect.search.likelihood import BAD, GOOD, Array, Likelihood
from rlcanary.bisect.search.verdict import Refusal

MOSTLY = 0.8
OUTSIDE = 0.02
"""The prior probability that GOOD is already bad, and likewise that BAD is not bad."""
ALIKE = 0.1
"""The prior probability that all commits are alike: the command fails now and then on any commit.

It is 0 if an end is trusted, because that end then differs from the other. A trusted end leaves `OUTSIDE` for the
chance that the other end is wrong.
"""
REFUSALS = {GOOD: Refusal.GOOD_FAILS, BAD: Refusal.BAD_PASSES}
REFUSALS_UNTESTABLE = {GOOD: Refusal.GOOD_UNTESTABLE, BAD: Refusal.BAD_UNTESTABLE}


class Ends:
    """The readings of both ends. The ends in `trusted` need no run."""

    def __init__(self, likelihood: Likelihood, trusted: Collection[float] = ()) -> None:
        self._likelihood = likelihood
        self.asked = tuple(end for end in (GOOD, BAD) if end not in trusted)
        self._readings: dict[float, list[float]] = {GOOD: [], BAD: []}
        self._untestable: float | None = None

    def log_prior(self, count: int, *, may_be_good: bool) -> tuple[Array, float]:
        """Compute the log prior of each culprit position among `count` commits, and of no culprit at all.

        The first position means that GOOD is already bad, the last that BAD is not bad. For a metric, a culprit outside
        the range looks the same as none, even with a trusted end. If nobody called BAD bad (`may_be_good`), that it is
        not bad is as likely as each commit.
        """
        reads_outcomes = self._likelihood.reads_outcomes
        shares = {GOOD: OUTSIDE, BAD: 1 / (count + 1) if may_be_good else OUTSIDE}
        outside = {end: share * (end in self.asked and reads_outcomes) for end, share in shares.items()}
        is_possible = not self._likelihood.believes and (len(self.asked) == 2 or not reads_outcomes)
        alike = ALIKE * is_possible
        inside = (1 - sum(outside.values()) - alike) / count
        with np.errstate(divide="ignore"):
            return np.log([outside[GOOD], *[inside] * count, outside[BAD]]), float(np.log(alike))

    def record(self, end: float, reading: float) -> None:
        self._readings[end].append(reading)

    def record_untestable(self, end: float) -> None:
        if end in self.asked and not self._readings[end]:
            self._untestable = end

    def next_end(self, running: Sequence[float] = ()) -> float | None:
        """Return the end to run next, given those in `running`. None if both have enough runs."""
        for end in self.asked:
            runs = len(self._readings[end]) + running.count(end)
            wanted = self._likelihood.refusal_runs if self._is_always_wrong(end) else self._likelihood.end_runs
            if runs < wanted:
                return end
        return None

    @property
    def runs_left(self) -> int:
        return sum(max(0, self._likelihood.end_runs - len(self._readings[end])) for end in self.asked)

    @property
    def refusal(self) -> Refusal | None:
        """The reason why the search cannot start, judged from the ends' own runs."""
        if self._untestable is not None:
            return REFUSALS_UNTESTABLE[self._untestable]
        for end in self.asked:
            if len(self._readings[end]) >= self._likelihood.refusal_runs and self._is_always_wrong(end):
                return REFUSALS[end]
        return None

    @property
    def mostly_wrong(self) -> Refusal | None:
        """The refusal for an end that is nearly always wrong, or None."""
        if self._likelihood.reads_outcomes:
            for end in self.asked:
                readings = self._readings[end]
                if len(readings) - readings.count(end) > MOSTLY * len(readings):
                    return REFUSALS[end]
        return None

    def _is_always_wrong(self, end: float) -> bool:
        readings = self._readings[end]
        opposite = BAD + GOOD - end
        return self._likelihood.reads_outcomes and bool(readings) and all(reading == opposite for reading in readings)
