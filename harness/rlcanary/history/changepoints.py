"""Find the change points of a noisy series: the places where its level changed.

Exact optimal partitioning (Jackson et al., 2005): among all ways to cut the series into segments of constant level,
the one with the least sum of squared deviations from the segments' means, plus a penalty for each cut. Two
corrections make it hold on metrics of real runs:

- single outliers are pulled in first (winsorised against a running median), because a squared cost would buy a
  segment for each of them;
- the penalty of 3 log n noise variances is counted in long-run variances, (1 + phi) / (1 - phi) times as large,
  because noise in which neighbouring runs resemble each other (AR(1) with coefficient phi) wanders and looks like
  steps.

The search is exact for series of up to EXACT_RUNS. In longer ones the newest runs are still searched one by one, and
older steps are found on a grid first and then placed exactly, so that 10,000 runs take milliseconds too.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Places = NDArray[np.int64]

PENALTY = 3.0  # times log n, in long-run noise variances
MIN_SEGMENT = 3  # runs; a shorter segment is an outlier rather than a level
MIN_RUNS = 2 * MIN_SEGMENT
MEDIAN_WINDOW = 7  # runs
CLIP_SIGMAS = 2.5
# A larger difference of neighbouring runs is a step or an outlier and says little about the noise.
DIFFERENCE_SIGMAS = 4.0
MOST_STEPS = 0.1  # of the runs; a series that moves no more often than this and is flat in between has no noise
LEAST_NOISE = 1e-5  # of the series' range; keeps rounding from making steps of the flat parts of a series without noise
MAX_PHI = 0.9
EXACT_RUNS = 1000
# A step lies where the cost exceeds the least by no more than this, in long-run noise variances; this holds its true place
# at least 97 % of the time.
PLACE_TOLERANCE = 9.0
MAD_TO_SIGMA = 1.4826  # of a normal distribution


@dataclass(frozen=True)
class ChangePoint:
    """A step between two levels: `index` is the first point of the new level.

    Levels are means of the winsorised segments. Under noise the place is known to within `earliest` and `latest`,
    the first points of the new level that are nearly as likely.
    """

    index: int
    earliest: int
    latest: int
    before: float
    after: float
    noise: float  # standard deviation of the noise from run to run, in the metric's units

    @property
    def step(self) -> float:
        return self.after - self.before

    @property
    def relative_step(self) -> float | None:
        """Returns the step as a share of the level before it; None if that level is 0 or close to it."""
        return ratio(self.step, abs(self.before))

    @property
    def noise_units(self) -> float | None:
        """Returns the signed step in standard deviations of the noise; None for a series without noise."""
        return ratio(self.step, self.noise)


def ratio(part: float, whole: float) -> float | None:
    """Divides; returns None for a result that is not finite."""
    share = part / whole if whole else math.inf
    return share if math.isfinite(share) else None


def change_points(values: Floats) -> list[ChangePoint]:
    """Returns the steps of a series of finite values [n], in order; none for fewer than MIN_RUNS values.

    Raises:
        ValueError: if a value is not finite.
    """
    if not np.isfinite(values).all():
        raise ValueError("a series with non-finite values has no levels; leave these out first")
    if len(values) < MIN_RUNS or np.ptp(values) == 0:
        return []
    # Squares of very large and very small numbers are not finite or 0. A power of 2 changes no digit.
    exponent = math.frexp(float(np.abs(values).max()))[1]
    values = np.ldexp(values, -exponent)
    clipped = winsorised(values)
    noise, phi = noise_and_correlation(clipped)
    variance = max(noise, LEAST_NOISE * float(np.ptp(values))) ** 2 * (1 + phi) / (1 - phi)
    squares = SquaredDeviations(clipped)
    cuts = cuts_of_any_length(squares, PENALTY * math.log(len(values)) * variance)
    bounds = [0, *cuts, len(values)]
    changes = []
    for begin, cut, end in zip(bounds, bounds[1:], bounds[2:], strict=False):
        excess = squares.of_two(begin, end)
        likely = begin + 1 + np.flatnonzero(excess <= excess.min() + PLACE_TOLERANCE * variance)
        levels = float(clipped[begin:cut].mean()), float(clipped[cut:end].mean())
        before, after, in_units = (math.ldexp(number, exponent) for number in (*levels, noise))
        changes.append(ChangePoint(cut, min(cut, int(likely[0])), max(cut, int(likely[-1])), before, after, in_units))
    return changes


def noise_of(values: Floats) -> float:
    """Estimates the standard deviation of the noise from run to run of finite values [n]; 0.0 for a flat series."""
    if len(values) < 2 or np.ptp(values) == 0:
        return 0.0
    return noise_and_correlation(winsorised(values))[0]


def winsorised(values: Floats) -> Floats:
    """Winsorises a series [n].

    Every value is pulled to within CLIP_SIGMAS robust deviations of the running median around it.
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
    """Tells if the series is flat except for a few moves, as the metric of a deterministic test is."""
    return bool(np.count_nonzero(np.diff(values)) <= max(2, MOST_STEPS * len(values)))


def noise_and_correlation(values: Floats) -> tuple[float, float]:
    """Estimates the standard deviation of the noise and the correlation phi of neighbouring runs.

    Both come from differences, in which a step is a single outlier.
    """
    if moves_in_steps(values):
        return 0.0, 0.0
    differences = np.diff(values)
    sizes = np.abs(differences)
    # A metric that repeats its commonest value moves seldom, and by what its moves are typically.
    reach = DIFFERENCE_SIGMAS * MAD_TO_SIGMA * float(np.median(sizes) or np.median(sizes[sizes > 0]))
    differences = np.clip(differences, -reach, reach) / reach
    variance = float(np.mean(differences**2))
    # For AR(1) noise, neighbouring differences correlate with -(1 - phi) / 2, and their variance is 2 (1 - phi) times
    # the noise's.
    correlation = float(np.mean(differences[1:] * differences[:-1])) / variance
    phi = min(max(1 + 2 * correlation, 0.0), MAX_PHI)
    return reach * math.sqrt(variance / (2 * (1 - phi))), phi


class SquaredDeviations:
    """Running sums that give the sum of squared deviations from the mean for any segment of a series."""

    def __init__(self, values: Floats) -> None:
        centred = values - values.mean()
        self.count = len(values)
        self._sums = np.concatenate(([0.0], np.cumsum(centred)))
        self._squares = np.concatenate(([0.0], np.cumsum(centred**2)))

    def of(self, begins: Places | int, ends: Places | int) -> Floats:
        """Returns the squared deviations of the segment [begin, end), which must not be empty."""
        sums = self._sums[ends] - self._sums[begins]
        deviations: Floats = self._squares[ends] - self._squares[begins] - sums**2 / (ends - begins)
        return deviations

    def of_two(self, begin: int, end: int) -> Floats:
        """Returns those of [begin, end) cut in two, for each place of the cut from begin + 1 to end - 1."""
        cuts = np.arange(begin + 1, end)
        return self.of(begin, cuts) + self.of(cuts, end)


def cuts_of_any_length(squares: SquaredDeviations, penalty: float) -> list[int]:
    """Finds the optimal cuts of a series of any length.

    Up to EXACT_RUNS values this is `optimal_cuts` at all places. A longer series is cut at the newest places and on a
    grid before them, then again at the newest places and around the cuts found on the grid.
    """
    count = squares.count
    if count <= EXACT_RUNS:
        return optimal_cuts(squares, penalty, np.arange(count + 1))
    pitch = 2 * math.ceil(count / EXACT_RUNS)
    newest = np.arange(count - EXACT_RUNS // 2, count + 1)
    coarse = optimal_cuts(squares, penalty, np.concatenate((np.arange(0, newest[0], pitch), newest)))
    around = (np.arange(max(cut - pitch, 0), min(cut + pitch, count) + 1) for cut in coarse)
    return optimal_cuts(squares, penalty, np.unique(np.concatenate(([0], *around, newest))))


def optimal_cuts(squares: SquaredDeviations, penalty: float, places: Places) -> list[int]:
    """Finds the cuts that minimise the segments' squared deviations plus `penalty` for each cut, exactly.

    Takes time in the square of the number of places.
    """
    best = np.full(len(places), np.inf)  # best[k]: least cost of all before places[k], one penalty for each segment
    best[0] = 0.0
    last_cut = np.zeros(len(places), dtype=np.int64)
    begin_counts = np.searchsorted(places, places - MIN_SEGMENT, side="right")
    for k in range(1, len(places)):
        count = int(begin_counts[k])
        if count:
            costs = best[:count] + penalty + squares.of(places[:count], places[k])
            last_cut[k] = int(np.argmin(costs))
            best[k] = costs[last_cut[k]]
    cuts = []
    k = int(last_cut[-1])
    while k > 0:
        cuts.append(int(places[k]))
        k = int(last_cut[k])
    return cuts[::-1]
