"""Tell a series that switches between two modes from one that steps.

A test that runs on either of two kernels, or with a cold or a warm cache, has two levels. Where it stays in a mode for
some runs, every switch looks like a step. The difference: a switching series goes back and forth at rates that stay the
same, while a step changes these rates (before it the new level is not held, after it the old one is not).
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlcanary.history.significance import CHANCE, Floats, chance_of_noise, deviations_at_cuts, normal_scores

SEPARATION = 4.0  # deviations of the values within a mode between two modes
LEAST_SHARE = 0.05  # of the runs in the rarer mode
LEAST_SWITCHES = 4  # fewer are steps: a level that came, went, and came again
SWITCH_COST = 1.0  # in squared deviations; a run belongs to the nearer mode unless that is nearly the same
FEW_CUTS = 2  # up to this many are preferred to modes that leave no less than SMALLER of the variance around the steps
SMALLER = 0.8
SIMILAR = 1.2  # many cuts between two levels are switches if the modes leave no more than this share
EXPECTED_CUTS = 0.3  # among all cuts of a series whose rates stay the same


@dataclass(frozen=True)
class Modes:
    """Two modes of a series: which runs are in the upper one [n], and the median of each."""

    upper: NDArray[np.bool_]
    low: float
    high: float

    def without(self, values: Floats) -> Floats:
        """Returns the values minus the median of their mode."""
        rest: Floats = values - np.where(self.upper, self.high, self.low)
        return rest

    def steps(self, values: Floats, cuts: list[int]) -> list[int]:
        """Returns the cuts that the switching does not explain: the rates change, or the values within the modes do."""
        bounds = [0, *cuts, len(values)]
        around_steps = sum(len(part) * float(part.var()) for part in np.split(values, cuts)) / len(values)
        rest = self.without(values)
        if float(rest.var()) > (SMALLER if len(cuts) <= FEW_CUTS else SIMILAR) * around_steps:
            return cuts
        within = deviations_at_cuts(normal_scores(rest), bounds)
        return [
            cut
            for first, cut, last, deviations in zip(bounds, bounds[1:], bounds[2:], within, strict=False)
            if len(values) * math.exp(-self._change_of_rates(first, cut, last) / 2) <= EXPECTED_CUTS
            or chance_of_noise(deviations, len(values)) <= CHANCE
        ]

    def _change_of_rates(self, first: int, cut: int, last: int) -> float:
        """Returns the likelihood-ratio statistic of two Markov chains against one, chi-squared with 2 degrees of freedom."""
        statistic = 0.0
        for mode in (False, True):
            rows = []
            for begin, end in ((first, cut), (cut, last)):
                follows = self.upper[begin + 1 : end][self.upper[begin : end - 1] == mode]
                rows.append([np.count_nonzero(follows), len(follows) - np.count_nonzero(follows)])
            counts = np.array(rows, dtype=np.float64)
            expected = counts.sum(1, keepdims=True) * counts.sum(0, keepdims=True) / max(counts.sum(), 1)
            seen = counts > 0
            statistic += 2 * float((counts[seen] * np.log(counts[seen] / expected[seen])).sum())
        return statistic


def find_modes(values: Floats) -> Modes | None:
    """Finds two modes between which the values [n] switch; None if they do not."""
    count = len(values)
    ordered = np.sort(values)
    sums = np.concatenate(([0.0], np.cumsum(ordered - ordered.mean())))
    least = math.ceil(LEAST_SHARE * count)
    below = np.arange(least, count - least + 1)
    if len(below) == 0:
        return None
    # The best cut of the sorted values in two, by squared deviations.
    split = int(below[np.argmax(sums[below] ** 2 / (below * (count - below)))])
    low, high = float(np.median(ordered[:split])), float(np.median(ordered[split:]))
    upper = values > (low + high) / 2
    for _ in range(3):
        if upper.all() or not upper.any():
            return None
        low, high = float(np.median(values[~upper])), float(np.median(values[upper]))
        deviation = 1.4826 * float(np.median(np.abs(values - np.where(upper, high, low))))
        if deviation == 0 or high - low < SEPARATION * deviation:
            return None
        upper = _most_likely_modes(values, low, high, deviation)
    share = float(upper.mean())
    if min(share, 1 - share) < LEAST_SHARE or np.count_nonzero(np.diff(upper)) < LEAST_SWITCHES:
        return None
    return Modes(upper, low, high)


def _most_likely_modes(values: Floats, low: float, high: float, deviation: float) -> NDArray[np.bool_]:
    """Assigns each run a mode so that squared deviations and SWITCH_COST for each switch are least (Viterbi)."""
    to_low = (((values - low) / deviation) ** 2 / 2).tolist()
    to_high = (((values - high) / deviation) ** 2 / 2).tolist()
    cost_low = cost_high = 0.0
    switches = []
    for in_low, in_high in zip(to_low, to_high, strict=True):
        falls, rises = cost_high + SWITCH_COST < cost_low, cost_low + SWITCH_COST < cost_high
        switches.append((falls, rises))
        cost_low, cost_high = (
            (cost_high + SWITCH_COST if falls else cost_low) + in_low,
            (cost_low + SWITCH_COST if rises else cost_high) + in_high,
        )
    upper = cost_high < cost_low
    backwards = []
    for falls, rises in reversed(switches):
        backwards.append(upper)
        if rises if upper else falls:
            upper = not upper
    return np.array(backwards[::-1], dtype=np.bool_)
