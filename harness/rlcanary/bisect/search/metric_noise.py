"""A noisy metric: one level before the culprit, a worse one from it on, and the same Gaussian noise around both.

Levels, step and noise are unknown. The level before is integrated out under a flat prior. The noise, and the step in
units of the noise, are summed over on a grid. So the search can find a step of one or two standard deviations, which no
threshold separates from chance.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from rlcanary.bisect.search.likelihood import Array, Prediction

STEPS = tuple(0.6 * 1.35**k for k in range(14))
"""Sizes of the step in units of the noise, from 0.6 to about 30."""
USUAL_STEP, USUAL_SPREAD = 1.8, 0.8
"""The median step size in units of the noise, and the standard deviation of its logarithm.

Smaller steps go unnoticed, and larger ones need no search by value.
"""
PRECISIONS = tuple(0.2 * 1.16**k for k in range(36))
"""Values of 1 / noise, from 0.2 to about 36, in units of 1 / the standard deviation of all readings."""
KINDS = 12
"""The number of intervals into which the range of the next reading is cut, to compute its information."""
NEGLIGIBLE = 1e-4
COARSE = 20
"""The approximate number of groups of neighbouring commits on which a relapse is judged."""
OUTLIER = 4.0
"""The largest distance from the median, in standard deviations.

Values beyond it are clipped: one bad machine must not look like a step.
"""
_NORMAL_X = np.linspace(-6, 6, 1201)
_NORMAL_CDF = np.array([0.5 * (1 + math.erf(x / math.sqrt(2))) for x in _NORMAL_X])


class Levels:
    """The likelihood of a metric's values. `worse` is +1 if the culprit raises the metric, -1 if it lowers it."""

    believes = False
    reads_outcomes = False
    end_runs = 3
    refusal_runs = 3
    end_share = 0.6

    def __init__(self, worse: int) -> None:
        self._worse = worse
        step_GG, precision_GG = np.meshgrid(STEPS, PRECISIONS, indexing="ij")
        self._step_G = step_GG.ravel()
        self._precision_G = precision_GG.ravel()
        weight_G = np.exp(-(np.log(self._step_G / USUAL_STEP) ** 2) / (2 * USUAL_SPREAD**2))
        self._log_prior_G = np.log(weight_G * len(PRECISIONS) / weight_G.sum())

    def predict(self, readings: Sequence[Sequence[float]], ends: tuple[bool, bool] = (False, False)) -> Prediction:
        data = _Data(readings, self._worse)
        log_weight_SG = data.log_likelihood(self._step_G, self._precision_G) + self._log_prior_G
        largest_S = log_weight_SG.max(axis=1)
        weight_SG = np.exp(log_weight_SG - largest_S[:, None])
        evidence_S = weight_SG.sum(axis=1)
        weight_SG /= evidence_S[:, None]
        kept_G = weight_SG.max(axis=0) > NEGLIGIBLE
        weight_SG, step_G, precision_G = weight_SG[:, kept_G], self._step_G[kept_G], self._precision_G[kept_G]
        # Standardised: in units of the readings' standard deviation, relative to their mean.
        spread_G = np.sqrt(1 + 1 / max(data.count, 1)) / precision_G
        good_SG = -step_G / precision_G * data.bad_share_S[:, None]
        bad_SG = good_SG + step_G / precision_G
        level_SGZ = np.stack([good_SG, bad_SG], axis=2)
        share_G = weight_SG.mean(axis=0)
        spread = float(share_G @ spread_G / share_G.sum())
        edges_K = np.linspace(level_SGZ[..., 0].min() - spread, level_SGZ[..., 1].max() + spread, KINDS - 1)
        below_SZK = np.zeros((len(evidence_S), 2, KINDS + 1))
        below_SZK[..., -1] = 1.0
        below_SGZK = _normal_cdf((edges_K - level_SGZ[..., None]) / spread_G[:, None, None])
        below_SZK[..., 1:-1] = np.einsum("sg,sgzk->szk", weight_SG, below_SGZK) / weight_SG.sum(axis=1)[:, None, None]
        log_evidence_S = largest_S + np.log(evidence_S)
        return Prediction(log_evidence_S, np.diff(below_SZK, axis=2), *self._predict_alike(data, edges_K))

    def _predict_alike(self, data: "_Data", edges_K: Array) -> tuple[float, Array]:
        """Compute the log evidence and the chances of the next reading if all commits have one level."""
        precision_P = np.array(PRECISIONS)
        log_weight_P = data.log_likelihood(np.zeros_like(precision_P), precision_P)[0]
        log_evidence = float(np.logaddexp.reduce(log_weight_P))
        spread_P = np.sqrt(1 + 1 / max(data.count, 1)) / precision_P
        below_K = np.exp(log_weight_P - log_evidence) @ _normal_cdf(edges_K / spread_P[:, None])
        return log_evidence, np.diff(np.concatenate([[0.0], below_K, [1.0]]))

    def log_odds_relapse(self, readings: Sequence[Sequence[float]], gaps: Sequence[int]) -> float:
        """Compute the log odds of a relapse on a coarser grid, with neighbouring commits pooled, to save time."""
        if len(readings) < 3:
            return -math.inf
        pooled = math.ceil(len(readings) / COARSE)
        starts = range(0, len(readings), pooled)
        blocks = [[value for of_commit in readings[start : start + pooled] for value in of_commit] for start in starts]
        places_S = np.add.reduceat(np.array(gaps, dtype=float)[: len(readings)], starts)
        with np.errstate(divide="ignore"):
            log_places_S = np.log(np.append(places_S, gaps[-1]))
        data = _Data(blocks, self._worse)
        coarse = np.zeros((len(STEPS), len(PRECISIONS)), dtype=bool)
        coarse[::2, ::2] = True
        step_G, precision_G, log_prior_G = (
            axis_G[coarse.ravel()] for axis_G in (self._step_G, self._precision_G, self._log_prior_G)
        )

        def log_evidence(places_X: Sequence[NDArray[np.int64]]) -> float:
            """Sum the evidence over rows of change positions: the first for the worse, the second back, and so on."""
            log_ways_X = sum((log_places_S[places] for places in places_X), np.zeros(len(places_X[0])))
            log_weight_XG = data.log_likelihood(step_G, precision_G, places_X) + log_prior_G
            return float(np.logaddexp.reduce(np.logaddexp.reduce(log_weight_XG, axis=1) + log_ways_X))

        once = np.arange(len(log_places_S))
        thrice = np.array(list(combinations(once, 3))).T
        count = sum(gaps)
        ways = math.log(math.comb(count, 3)) - math.log(count) if count > 3 else math.inf
        return log_evidence(list(thrice)) - log_evidence([once]) - ways

    def badness(self, values: Sequence[float]) -> float:
        return self._worse * float(np.mean(values))

    def estimate(self, good: Sequence[float], bad: Sequence[float]) -> Mapping[str, float]:
        """Estimate the levels `before` and `after`, and the standard deviation `noise` around them."""
        before = float(np.mean(good)) if good else math.nan
        after = float(np.mean(bad)) if bad else math.nan
        squares = sum((value - before) ** 2 for value in good) + sum((value - after) ** 2 for value in bad)
        degrees = len(good) + len(bad) - 2
        noise = math.sqrt(squares / degrees) if degrees > 0 else math.nan
        return {"before": before, "after": after, "noise": noise}


def _normal_cdf(x: Array) -> Array:
    below: Array = np.interp(x, _NORMAL_X, _NORMAL_CDF)
    return below


class _Data:
    """The readings, standardised to mean 0 and standard deviation 1, with the sign that makes worse higher."""

    def __init__(self, readings: Sequence[Sequence[float]], worse: int) -> None:
        values = np.array([value for of_commit in readings for value in of_commit], dtype=float) * worse
        values = _without_outliers(values)
        self.count = len(values)
        mean = values.mean() if self.count else 0.0
        deviation = values.std() if self.count else 0.0
        self._varies = bool(deviation > 1e-12 * np.abs(values).max(initial=0.0))
        scale = deviation if self._varies else 1.0
        count_D = np.array([len(of_commit) for of_commit in readings], dtype=float)
        owner = np.repeat(np.arange(len(readings)), count_D.astype(int))
        sum_D = np.bincount(owner, weights=values - mean, minlength=len(readings))
        zero = np.zeros(1)
        self._bad_count_S = count_D.sum() - np.concatenate([zero, np.cumsum(count_D)])
        self.bad_share_S = self._bad_count_S / max(self.count, 1)
        self._bad_sum_S = -np.concatenate([zero, np.cumsum(sum_D)]) / scale

    def log_likelihood(
        self, step_G: Array, precision_G: Array, changes_X: Sequence[NDArray[np.int64]] | None = None
    ) -> Array:
        """Compute the log likelihood of each culprit position and each grid point.

        With `changes_X`, each row lists positions where the level goes up and down in turn.
        """
        count_X, sum_X = self._bad_count_S, self._bad_sum_S
        if changes_X is not None:
            signs = [(-1) ** number for number in range(len(changes_X))]
            count_X = np.sum([sign * count_X[places] for sign, places in zip(signs, changes_X, strict=True)], axis=0)
            sum_X = np.sum([sign * sum_X[places] for sign, places in zip(signs, changes_X, strict=True)], axis=0)
        spread_X = count_X * (1 - count_X / max(self.count, 1))
        squares = float(self.count) if self._varies else 0.0
        level = (self.count - 1) * np.log(precision_G) - squares * precision_G**2 / 2
        jump = np.outer(sum_X, step_G * precision_G) - np.outer(spread_X, step_G**2) / 2
        result: Array = level + jump if self.count else np.zeros_like(jump)
        return result


def _without_outliers(values: Array) -> Array:
    """Clip values to OUTLIER standard deviations from the median, estimated from the median absolute deviation."""
    if not len(values):
        return values
    median = float(np.median(values))
    deviation = 1.4826 * float(np.median(np.abs(values - median)))
    return np.clip(values, median - OUTLIER * deviation, median + OUTLIER * deviation) if deviation > 0 else values
