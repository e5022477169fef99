"""Where a noisy series changed its level.

Exact optimal partitioning (Jackson et al., 2005): among all ways to cut the series into segments of constant level,
the one with the least sum of squared deviations from the segments' means, plus a penalty for each cut. Two
corrections make it hold on metrics of real runs:

- single outliers are pulled in first (winsorised against a running median), because a squared cost would buy a
  segment for each of them;
- the penalty of 3 log n noise variances is counted in long-run variances, (1 + phi) / (1 - phi) times as large,
  because noise in which neighbouring runs resemble each other (AR(1) with coefficient phi) wanders and looks like
  steps.
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

PENALTY = 3.0  # times log n, in long-run noise variances
MIN_SEGMENT = 3  # runs; a shorter segment is an outlier rather than a level
MIN_RUNS = 2 * MIN_SEGMENT
MEDIAN_WINDOW = 7  # runs
CLIP_SIGMAS = 2.5
DIFFERENCE_SIGMAS = (
    4.0  # a larger difference of neighbouring runs is a step or an outlier and says little about the noise
)
MOST_STEPS = 0.1  # of the runs; a series that moves no more often than this and is flat in between has no noise
LEAST_NOISE = 1e-5  # of the series' range; keeps rounding from making steps of the flat parts of a series without noise
MAX_PHI = 0.9
MAD_TO_SIGMA = 1.4826  # of a normal distribution


@dataclass(frozen=True)
class ChangePoint:
    """A step between two levels: `index` is the first point of the new one.

    Levels are means of the winsorised segments.
    """

    index: int
    before: float
    after: float
    noise: float  # standard deviation of the noise from run to run, in the metric's units

    @property
    def step(self) -> float:
        return self.after - self.before

    @property
    def relative_step(self) -> float | None:
        """The step as a share of the level before it; None if that level is 0."""
        return self.step / abs(self.before) if self.before else None

    @property
    def noise_units(self) -> float | None:
        """The step in standard deviations of the noise, with its sign; None for a series without noise."""
        return self.step / self.noise if self.noise else None


def change_points(values: Floats) -> list[ChangePoint]:
    """The steps of a series of finite values [n], in order; none for fewer than MIN_RUNS values.

    Raises ValueError if a value is not finite.
    """
    if not np.isfinite(values).all():
        raise ValueError("a series with non-finite values has no levels; leave these out first")
    if len(values) < MIN_RUNS or np.ptp(values) == 0:
        return []
    clipped = winsorised(values)
    noise, phi = noise_and_correlation(clipped)
    variance = max(noise, LEAST_NOISE * float(np.ptp(values))) ** 2
    penalty = PENALTY * math.log(len(values)) * variance * (1 + phi) / (1 - phi)
    bounds = [0, *optimal_cuts(clipped, penalty), len(values)]
    levels = [float(clipped[begin:end].mean()) for begin, end in itertools.pairwise(bounds)]
    return [
        ChangePoint(cut, before, after, noise)
        for cut, before, after in zip(bounds[1:-1], levels, levels[1:], strict=False)
    ]


def winsorised(values: Floats) -> Floats:
    """The series [n] with every value pulled to within CLIP_SIGMAS robust deviations of the running median around
    it.
    """
    half = MEDIAN_WINDOW // 2
    padded = np.pad(values, half, mode="reflect")
    medians = np.median(np.lib.stride_tricks.sliding_window_view(padded, MEDIAN_WINDOW), axis=1)
    deviations = values - medians
    reach = CLIP_SIGMAS * MAD_TO_SIGMA * float(np.median(np.abs(deviations)))
    if reach == 0 and not moves_in_steps(values):
        return values  # a count or a pass rate that repeats its commonest value: the median would hide the noise
    clipped: Floats = medians + np.clip(deviations, -reach, reach)
    return clipped


def moves_in_steps(values: Floats) -> bool:
    """Whether the series is flat but for a few moves, as the metric of a deterministic test is."""
    return bool(np.count_nonzero(np.diff(values)) <= max(2, MOST_STEPS * len(values)))


def noise_and_correlation(values: Floats) -> tuple[float, float]:
    """Standard deviation of the noise and correlation phi of neighbouring runs, from differences, in which a step
    is a single outlier.
    """
    if moves_in_steps(values):
        return 0.0, 0.0
    differences = np.diff(values)
    reach = DIFFERENCE_SIGMAS * MAD_TO_SIGMA * float(np.median(np.abs(differences)))
    differences = np.clip(differences, -reach, reach) if reach > 0 else differences
    variance = float(np.mean(differences**2))
    # For AR(1) noise, neighbouring differences correlate with -(1 - phi) / 2, and their variance is 2 (1 - phi) times
    # the noise's.
    correlation = float(np.mean(differences[1:] * differences[:-1])) / variance
    phi = min(max(1 + 2 * correlation, 0.0), MAX_PHI)
    return math.sqrt(variance / (2 * (1 - phi))), phi


def optimal_cuts(values: Floats, penalty: float) -> list[int]:
    """The cuts that minimise the segments' squared deviations plus `penalty` for each cut, exactly, in O(n^2)."""
    count = len(values)
    centred = values - values.mean()
    sums = np.concatenate(([0.0], np.cumsum(centred)))
    squares = np.concatenate(([0.0], np.cumsum(centred**2)))
    best = np.full(count + 1, np.inf)  # best[end]: least cost of the first `end` values, one penalty for each segment
    best[0] = 0.0
    last_cut = np.zeros(count + 1, dtype=np.int64)
    for end in range(MIN_SEGMENT, count + 1):
        begins = np.arange(0, end - MIN_SEGMENT + 1)
        costs = (
            best[begins] + penalty + squares[end] - squares[begins] - (sums[end] - sums[begins]) ** 2 / (end - begins)
        )
        last_cut[end] = int(np.argmin(costs))
        best[end] = costs[last_cut[end]]
    cuts = []
    end = int(last_cut[count])
    while end > 0:
        cuts.append(end)
        end = int(last_cut[end])
    return cuts[::-1]
