"""Two commits that each break a part of the runs: a first, after which some fail, and a later one, after which most do.

Such a command is compared with one that a single commit breaks, whatever its flake rates. Shapes: N commits, C = N + 1
candidates to run (GOOD is the first), D commits that were run, S = D + 1 places between them, R points of the grid of
failure rates, 3 stretches (before the first step, between the steps, from the second on), K = 2 kinds of reading.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from rlcanary.bisect.search.information import Apart, entropy
from rlcanary.bisect.search.likelihood import Array

PRIOR = 0.03
"""The prior probability that two commits break the command."""
FLAKES = (0.0005, 0.03, 0.1, 0.2, 0.3)
"""Flake rates before the first step and after the second."""
BETWEEN = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
"""Failure rates between the steps."""
LEAST_STEP = 0.2
ALIKE_WEIGHT = 3.0
"""The prior weight of a command that flakes as often before the first step as after the second, relative to the others."""


@dataclass(frozen=True)
class TwoSteps:
    chance: float
    """The probability of two steps, against one or none."""
    chance_2N: Array
    """The probability of each commit to be the first step, and to be the second, if there are two."""
    failures_3: Array
    """The expected failure rate of each stretch."""

    def apart(self) -> Apart:
        """Return what a run of each candidate may read, for the expected information of runs."""
        past_2C = np.pad(self.chance_2N.cumsum(axis=1), ((0, 0), (1, 0)))
        stretch_C3 = np.stack([1 - past_2C[0], past_2C[0] - past_2C[1], past_2C[1]], axis=1)
        chances_3K = np.stack([1 - self.failures_3, self.failures_3], axis=1)
        return Apart(self.chance, stretch_C3 @ chances_3K, stretch_C3 @ entropy(chances_3K))


def two_steps(
    readings: Mapping[int, Sequence[float]], count: int, log_evidence: float, prior: float = PRIOR
) -> TwoSteps | None:
    """Compute where the steps are among `count` commits. GOOD has position -1.

    None if no two runs contradict each other, or there are no two commits.

    Args:
        readings: The readings of each position that was run.
        count: The number of commits.
        log_evidence: The log probability of all readings if there are no two steps.
        prior: The prior probability of two steps.
    """
    tested = sorted(readings)
    share_D = [sum(readings[index]) / len(readings[index]) for index in tested]
    if count < 2 or share_D == sorted(share_D):
        return None
    bad_D1 = np.array([[sum(readings[index])] for index in tested])
    good_D1 = np.array([[len(readings[index])] for index in tested]) - bad_D1
    zero_1R = np.zeros((1, len(_RATE_R3)))
    before_SR, between_SR, after_SR = (
        np.concatenate([zero_1R, np.cumsum(bad_D1 * np.log(rate_R) + good_D1 * np.log1p(-rate_R), axis=0)])
        for rate_R in _RATE_R3.T
    )
    place_N = np.searchsorted(tested, np.arange(count))
    gap_S1 = np.bincount(place_N, minlength=len(tested) + 1)[:, None]
    with np.errstate(divide="ignore"):
        log_gap_S1, log_pairs_S1 = np.log(gap_S1), np.log(gap_S1 * (gap_S1 - 1) / 2)
    first_SR, second_SR = before_SR - between_SR, between_SR + after_SR[-1] - after_SR
    log_weight_R = _LOG_PRIOR_R - np.log(count * (count - 1) / 2)
    # The two steps lie in different places, or both in one.
    earlier_SR = _sum_before(first_SR + log_gap_S1)
    later_SR = _sum_before((second_SR + log_gap_S1)[::-1])[::-1]
    apart_2SR = np.stack([first_SR + log_gap_S1 + later_SR, second_SR + log_gap_S1 + earlier_SR]) + log_weight_R
    both_SR = first_SR + second_SR + log_pairs_S1 + log_weight_R
    log_evidence_two = float(np.logaddexp.reduce(np.logaddexp(apart_2SR[1], both_SR), axis=None))
    log_odds = log_evidence_two - log_evidence + np.log(prior / (1 - prior))
    chance_apart_2SR, chance_both_SR = np.exp(apart_2SR - log_evidence_two), np.exp(both_SR - log_evidence_two)
    # In one place, the first step comes before the second: each pair of its commits is as likely.
    gap_N = gap_S1[place_N, 0]
    rank_N = np.arange(count) - np.searchsorted(place_N, place_N)
    ahead_2N = np.stack([gap_N - 1 - rank_N, rank_N]) / np.maximum(gap_N * (gap_N - 1) / 2, 1)
    both_2N = chance_both_SR.sum(axis=1)[place_N] * ahead_2N
    chance_2N = chance_apart_2SR.sum(axis=2)[:, place_N] / gap_N + both_2N
    failures_3 = (chance_apart_2SR[1] + chance_both_SR).sum(axis=0) @ _RATE_R3
    return TwoSteps(float(np.exp(-np.logaddexp(0.0, -log_odds))), chance_2N, failures_3)


def _sum_before(log_SR: Array) -> Array:
    """Sum the exponentials of all earlier rows, as logarithms."""
    nothing_1R = np.full((1, log_SR.shape[1]), -np.inf)
    result: Array = np.concatenate([nothing_1R, np.logaddexp.accumulate(log_SR, axis=0)[:-1]])
    return result


def _grid() -> tuple[Array, Array]:
    grid_R3 = np.array(
        [
            (before, between, passes)
            for before, between, passes in product(FLAKES, BETWEEN, FLAKES)
            if before + LEAST_STEP <= between + 1e-9 and between + LEAST_STEP <= 1 - passes + 1e-9
        ]
    )
    weight_R = np.where(grid_R3[:, 0] == grid_R3[:, 2], ALIKE_WEIGHT, 1.0)
    grid_R3[:, 2] = 1 - grid_R3[:, 2]
    return grid_R3, np.log(weight_R / weight_R.sum())


_RATE_R3, _LOG_PRIOR_R = _grid()
