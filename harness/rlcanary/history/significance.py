"""Judge whether a cut of a series is a step or noise, without assuming what the noise looks like.

Everything here works on normal scores: each value is replaced by the normal quantile of its rank, so that skewed,
heavy-tailed and many-peaked noise all look alike. Under noise that does not depend on time any order of the values is as
likely as any other, which makes the difference of mean scores at a cut a permutation statistic: its variance is that of
the scores, whatever their distribution. Two things are added for noise that does depend on time: neighbours that
resemble each other make the variance `dependence` times as large, and the variance near the shorter side counts where
it is larger.
"""

import itertools
import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Places = NDArray[np.int64]

CHANCE = 0.01  # of a step among all cuts of a series of noise
MIN_SEGMENT = 3  # runs; a shorter segment is an outlier rather than a level
LONGER_SIDE = 3  # times the shorter side of a cut is compared with it, or NEIGHBOURHOOD runs; further runs say less
NEIGHBOURHOOD = 30  # runs
WELL_KNOWN = 10  # independent runs on each side; the variance around two levels then stands for that of the noise
LEAST_NEARBY = 8  # runs on each side of a short level whose variance counts


def normal_scores(values: Floats) -> Floats:
    """Returns the normal quantile of each value's rank [n]; equal values share the middle of their ranks.

    Tukey's lambda distribution with exponent 0.14 stands in for the normal one: it differs by less than 0.01 between
    the 1st and the 99th percentile, and a score need not be exact.
    """
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    shares = (np.cumsum(counts) - counts / 2)[places] / len(values)
    scores: Floats = 4.91 * (shares**0.14 - (1 - shares) ** 0.14)
    return scores


def dependence(residuals: Floats) -> float:
    """Estimates how much larger the variance of a mean is than it would be if neighbouring runs were independent.

    This is 1 + 2 × the sum of the autocorrelations. The sum ends where the sums of pairs of neighbouring lags are no
    longer positive, and these may not increase (the initial monotone sequence of Geyer, 1992). At least 1.
    """
    count = len(residuals)
    centred = residuals - residuals.mean()
    transform = np.fft.rfft(centred, 2 * count)
    covariances = np.fft.irfft(transform * transform.conj())[: max(count // 6, 3)]
    if covariances[0] <= 0:
        return 1.0
    correlations = covariances / covariances[0]
    pairs = np.minimum.accumulate(correlations[1:-1:2] + correlations[2::2])
    return max(1.0, 1 + 2 * float(pairs[pairs > 0].sum()))


def chance_of_noise(deviations: float, runs: int) -> float:
    """Returns the probability that the largest standardised difference among all cuts of `runs` runs of noise is this large.

    Siegmund's approximation for the maximum of a standardised Brownian bridge from MIN_SEGMENT to
    `runs - MIN_SEGMENT`. It is an upper bound for discrete runs.
    """
    if deviations < 2:
        return 1.0
    density = math.exp(-deviations * deviations / 2) / math.sqrt(2 * math.pi)
    span = 2 * math.log(max(runs / MIN_SEGMENT - 1, 1.01))
    return min(1.0, deviations * density * ((1 - deviations**-2) * span + 4 * deviations**-2))


def deviations_at_cuts(scores: Floats, bounds: list[int]) -> list[float]:
    """Returns the standardised difference of the mean scores on both sides of each inner bound.

    Args:
        scores: The series' normal scores, or other numbers of bounded size [n].
        bounds: 0, the cuts, n.
    """
    residuals = np.concatenate([scores[a:b] - scores[a:b].mean() for a, b in itertools.pairwise(bounds)])
    cuts = len(bounds) - 2
    # The levels that were taken away take some of the dependence with them.
    factor = dependence(residuals) * len(scores) / max(len(scores) - 2 * cuts, 1)
    found = []
    for first, cut, last in zip(bounds, bounds[1:], bounds[2:], strict=False):
        begin = max(first, cut - max(NEIGHBOURHOOD, LONGER_SIDE * (last - cut)))
        end = min(last, cut + max(NEIGHBOURHOOD, LONGER_SIDE * (cut - first)))
        left, right = scores[begin:cut], scores[cut:end]
        counts = 1 / len(left) + 1 / len(right)
        reach = max(min(len(left), len(right)), LEAST_NEARBY)
        low, high = (cut - reach, end + reach) if len(right) < len(left) else (begin - reach, cut + reach)
        uneven = max(
            float(residuals[max(low, 0) : high].var()) * counts,
            float(left.var()) / len(left) + float(right.var()) / len(right),
        )
        square = float(right.mean() - left.mean()) ** 2
        total = float(scores[begin:end].var())
        explained = square / (counts * total * (end - begin)) if total > 0 else 0.0
        even = explained * (end - begin)
        if min(len(left), len(right)) >= WELL_KNOWN * factor:
            even = math.inf if explained >= 1 else -(end - begin) * math.log1p(-explained)
        found.append(math.sqrt(min(even, square / uneven if uneven > 0 else math.inf) / factor))
    return found
