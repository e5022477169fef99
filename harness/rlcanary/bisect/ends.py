"""Whether GOOD and BAD bear out their names: run as often as the noise asks."""

import math
from collections.abc import Collection, Sequence

from rlcanary.bisect.likelihood import BAD, GOOD, Likelihood
from rlcanary.bisect.search import Refusal

ODDS = 50.0
"""GOOD and BAD count as different at these odds, against one law for both."""
ALIKE_ODDS = 0.01
MOST_RUNS = 80
"""On both ends together; where they are not told apart by then they never will be."""


class Ends:
    """The readings of both ends. `trusted`: the ends (GOOD, BAD) that need no run."""

    def __init__(self, likelihood: Likelihood, trusted: Collection[float] = ()) -> None:
        self._likelihood = likelihood
        self._asked = [end for end in (GOOD, BAD) if end not in trusted]
        self._readings: dict[float, list[float]] = {GOOD: [], BAD: []}
        self._untestable: float | None = None

    def record(self, end: float, reading: float) -> None:
        self._readings[end].append(reading)

    def record_untestable(self, end: float) -> None:
        if end in self._asked and not self._readings[end]:
            self._untestable = end

    def next_end(self, running: Sequence[float] = ()) -> float | None:
        """The end to run next, while those in `running` run; None when there are runs enough, or these decide."""
        if self.is_settled or self.refusal is not None:
            return None
        runs = {end: len(self._readings[end]) + running.count(end) for end in self._asked}
        for end in self._asked:
            if self._is_always_wrong(end) and runs[end] < self._likelihood.refusal_runs:
                return end
        behind = min(self._asked, key=lambda end: runs[end])
        if runs[behind] >= self._likelihood.end_runs and running:
            return None
        return behind

    @property
    def refusal(self) -> Refusal | None:
        """Why the search cannot start from these ends."""
        if self._untestable is not None:
            return Refusal.GOOD_UNTESTABLE if self._untestable == GOOD else Refusal.BAD_UNTESTABLE
        for end in self._asked:
            if len(self._readings[end]) >= self._likelihood.refusal_runs and self._is_always_wrong(end):
                return Refusal.GOOD_FAILS if end == GOOD else Refusal.BAD_PASSES
        if len(self._asked) == 2 and self._has_enough_runs:
            total = sum(len(readings) for readings in self._readings.values())
            if self._odds < ALIKE_ODDS or (self._odds < ODDS and total >= MOST_RUNS):
                return Refusal.ALIKE
        return None

    @property
    def is_settled(self) -> bool:
        """Whether both ends are what they are called."""
        if not self._has_enough_runs or any(self._is_always_wrong(end) for end in self._asked):
            return False
        return len(self._asked) < 2 or self._likelihood.end_runs == 1 or self._odds >= ODDS

    @property
    def runs_left(self) -> int:
        """How many runs the ends take at least."""
        return sum(max(0, self._likelihood.end_runs - len(self._readings[end])) for end in self._asked)

    @property
    def _odds(self) -> float:
        return math.exp(min(self._likelihood.log_odds_apart(self._readings[GOOD], self._readings[BAD]), 50.0))

    @property
    def _has_enough_runs(self) -> bool:
        return all(len(self._readings[end]) >= self._likelihood.end_runs for end in self._asked)

    def _is_always_wrong(self, end: float) -> bool:
        if not self._likelihood.reads_outcomes:
            return False
        readings = self._readings[end]
        return bool(readings) and all(reading == BAD + GOOD - end for reading in readings)
