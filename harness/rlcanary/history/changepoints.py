"""Find the levels of a noisy series: the places where it stepped, and whether it drifts.

1. Candidates: exact optimal partitioning (Jackson et al., 2005) of the normal scores of the values: among all ways to cut
   the series into segments of constant level, the one with the least sum of squared deviations plus a penalty for each
   cut. There are few: a step is rarer than one in RUNS_PER_STEP runs, and what moves more often is noise.
2. Judgement: the cut that noise explains best is taken away, and the others are placed anew, until noise explains none
   (significance.py, modes.py).
3. A line: where one slope explains more than the steps do, the series drifts, and steps are those around the line.

The first is exact for series of up to EXACT_RUNS. In longer ones the newest runs are still searched one by one, and
older steps are found on a grid first and then placed exactly, so that 10,000 runs take milliseconds too.
"""

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np

from rlcanary.history.modes import find_modes
from rlcanary.history.significance import (
    CHANCE,
    MIN_SEGMENT,
    Floats,
    Places,
    chance_of_noise,
    dependence,
    deviations_at_cuts,
    normal_scores,
)

PENALTY = 1.75  # times log n, in long-run noise variances; low, because candidates are judged
EXACT_PENALTY = 3.0  # for series without noise, whose cuts are not judged
RUNS_PER_STEP = 25
LINE_PENALTY = 3.0  # times log n, in squared deviations: a slope costs as much as a step
MIN_RUNS = 2 * MIN_SEGMENT
MEDIAN_WINDOW = 7  # runs
CLIP_SIGMAS = 2.5
# A larger difference of neighbouring runs is a step or an outlier and says little about the noise.
DIFFERENCE_SIGMAS = 4.0
MOST_STEPS = 0.1  # of the runs; a series that moves no more often than this and is flat in between has no noise
LEAST_NOISE = 1e-5  # of the series' range; keeps rounding from making steps of the flat parts of a series without noise
MAX_PHI = 0.9
CANDIDATE_PHI = 0.5  # a larger estimate may come from the steps themselves
EXACT_RUNS = 300
PLACING_SIGMAS = 4.0  # a larger deviation does not move the place of a step
CLEAR_SIGMAS = 10.0  # a step of this size needs no judgement if nothing else moves by half of it
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
    chance: float  # probability that noise alone makes the largest of all cuts as clear as this one; 0 without noise

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


@dataclass(frozen=True)
class Levels:
    """The steps of a series in order, and its drift: the change from run to run along a line, None without one."""

    steps: list[ChangePoint]
    slope: float | None = None


def change_points(values: Floats) -> list[ChangePoint]:
    """Returns the steps of a series of finite values [n], in order; none for fewer than MIN_RUNS values."""
    return find_levels(values).steps


def find_levels(values: Floats) -> Levels:
    """Finds the steps and the drift of a series of finite values [n].

    Raises:
        ValueError: if a value is not finite.
    """
    if not np.isfinite(values).all():
        raise ValueError("a series with non-finite values has no levels; leave these out first")
    if len(values) < MIN_RUNS or np.ptp(values) == 0:
        return Levels([])
    # Squares of very large and very small numbers are not finite or 0. A power of 2 changes no digit.
    exponent = math.frexp(float(np.abs(values).max()))[1]
    flat = _Partition(np.ldexp(values, -exponent))
    line = flat.with_line()
    best = line or flat
    steps = [
        replace(
            step,
            before=math.ldexp(step.before, exponent),
            after=math.ldexp(step.after, exponent),
            noise=math.ldexp(step.noise, exponent),
        )
        for step in best.steps()
    ]
    return Levels(steps, None if line is None else math.ldexp(line.slope, exponent))


class _Partition:
    """The best partition of a series around a line of a given slope, with its judged cuts."""

    def __init__(self, values: Floats, slope: float = 0.0) -> None:
        self.slope = slope
        self._given = values
        self._line = slope * np.arange(len(values))
        self._values = values - self._line
        self._clipped = winsorised(self._values)
        self._scores = normal_scores(self._values)
        self._noise, _ = noise_and_correlation(self._clipped)
        self._exact = moves_in_steps(self._clipped)
        if self._exact:
            least = (LEAST_NOISE * float(np.ptp(values))) ** 2
            penalty = EXACT_PENALTY * math.log(len(values)) * least
            self.cuts = cuts_of_any_length(SquaredDeviations(self._clipped), penalty)
        else:
            self.cuts = self._clear_moves() or self._judged(_candidates(self._scores))

    def with_line(self) -> "_Partition | None":
        """Returns the partition around the line that explains more than steps alone do, None if no line does."""
        runs = len(self._values)
        penalty = LINE_PENALTY * math.log(runs)
        if self._exact or runs < 2 * RUNS_PER_STEP:
            return None
        times = np.arange(runs, dtype=np.float64) - (runs - 1) / 2
        slope = float((times * self._clipped).sum() / (times**2).sum())
        if not self.cuts and self._gain_of(times, slope) < penalty:
            return None
        line = _Partition(self._given, slope)
        if line.cuts:  # they have tilted the line
            line = _Partition(self._given, slope + line._slope_within())
        # What fits badly leaves residuals that depend on each other, which say nothing about the noise.
        closer = line if line._squares() < self._squares() else self
        if line._squares() == 0:
            return line  # a counter that grows by the same amount in each run
        runs_alone = runs / dependence(closer._residuals())
        gain = runs_alone * math.log(self._squares() / line._squares())
        return line if gain + penalty * (len(self.cuts) - len(line.cuts)) > penalty else None

    def steps(self) -> list[ChangePoint]:
        """Returns the cuts with their levels, chances and the range of their places."""
        bounds = self._bounds
        if not self.cuts:
            return []
        residuals = self._clipped - self._levels()
        variance = max(float(residuals.var()), (LEAST_NOISE * float(np.ptp(self._values))) ** 2) * dependence(residuals)
        chances = [0.0] * len(self.cuts)
        if not (self._exact or self._is_clear(self.cuts)):
            chances = [chance_of_noise(size, bounds[-1]) for size in deviations_at_cuts(self._scores, bounds)]
        squares, found = SquaredDeviations(self._clipped), []
        for begin, cut, end, chance in zip(bounds, bounds[1:], bounds[2:], chances, strict=False):
            excess = squares.of_two(begin, end)
            likely = begin + 1 + np.flatnonzero(excess <= excess.min() + PLACE_TOLERANCE * variance)
            before, after = (
                float(part.mean() + self._line[cut]) for part in np.split(self._clipped[begin:end], [cut - begin])
            )
            earliest, latest = min(cut, int(likely[0])), max(cut, int(likely[-1]))
            found.append(ChangePoint(cut, earliest, latest, before, after, self._noise, chance))
        return found

    @property
    def _bounds(self) -> list[int]:
        return [0, *self.cuts, len(self._values)]

    def _judged(self, cuts: list[int]) -> list[int]:
        """Takes cuts away, the least clear one first, until noise and switching modes explain none."""
        cuts = self._clear_of_noise(cuts)
        modes = find_modes(self._values) if cuts and not self._is_clear(cuts) else None
        while modes is not None and cuts:
            kept = modes.steps(self._values, cuts)
            if kept == cuts:
                break
            cuts = self._clear_of_noise(kept)
        return cuts

    def _clear_of_noise(self, cuts: list[int]) -> list[int]:
        while cuts and not self._is_clear(cuts):
            for _ in range(2):  # a cut that moves changes the levels by which its neighbours are placed
                bounds = [0, *cuts, len(self._values)]
                places = zip(bounds, bounds[1:], bounds[2:], strict=False)
                cuts = sorted({self._placed(begin, cut, end) for begin, cut, end in places})
            sizes = deviations_at_cuts(self._scores, [0, *cuts, len(self._values)])
            least = int(np.argmin(sizes))
            if chance_of_noise(sizes[least], len(self._values)) <= CHANCE:
                break
            cuts = cuts[:least] + cuts[least + 1 :]
        return cuts

    def _clear_moves(self) -> list[int]:
        """Returns the largest moves if the series is nearly flat but for them, as a metric with little noise is."""
        moves = np.abs(np.diff(self._values))
        cuts = (1 + np.flatnonzero(moves > moves.max() / 2)).tolist()
        few = len(cuts) <= max(1, len(self._values) // RUNS_PER_STEP)
        lasting = min(np.diff([0, *cuts, len(self._values)])) >= MIN_SEGMENT
        return cuts if few and lasting and self._is_clear(cuts) else []

    def _is_clear(self, cuts: list[int]) -> bool:
        """Tells if the cuts are large, and the series is nearly flat but for them."""
        bounds = [0, *cuts, len(self._values)]
        parts = [self._values[begin:end] for begin, end in itertools.pairwise(bounds)]
        least = float(np.abs(np.diff([part.mean() for part in parts])).min())
        deviation = math.sqrt(sum(float(((part - part.mean()) ** 2).sum()) for part in parts) / len(self._values))
        moves = 1 + np.flatnonzero(np.abs(np.diff(self._values)) > least / 2)
        return least > CLEAR_SIGMAS * deviation and moves.tolist() == cuts

    def _placed(self, begin: int, cut: int, end: int) -> int:
        """Places a cut anew between its neighbours, by squared deviations from both levels."""
        values = self._values[begin:end]
        reach = (PLACING_SIGMAS * self._noise) ** 2
        before, after = np.median(self._values[begin:cut]), np.median(self._values[cut:end])
        costs = np.cumsum(np.minimum((values - before) ** 2, reach) - np.minimum((values - after) ** 2, reach))
        places = costs[MIN_SEGMENT - 1 : len(values) - MIN_SEGMENT]
        return begin + MIN_SEGMENT + int(np.argmin(places)) if len(places) else cut

    def _levels(self) -> Floats:
        bounds = self._bounds
        means = [float(self._clipped[begin:end].mean()) for begin, end in itertools.pairwise(bounds)]
        levels: Floats = np.repeat(means, np.diff(bounds))
        return levels

    def _residuals(self) -> Floats:
        residuals: Floats = self._clipped - self._levels()
        return residuals

    def _squares(self) -> float:
        return float((self._residuals() ** 2).sum())

    def _slope_within(self) -> float:
        """Returns the slope within the levels, one for all of them."""
        times = self._times_within()
        return float((times * self._residuals()).sum() / (times**2).sum())

    def _gain_of(self, times: Floats, slope: float) -> float:
        """Returns how much likelier a slope makes the series around its levels: twice the logarithm."""
        residuals = self._residuals() - slope * times
        left = float((residuals**2).sum())
        return len(residuals) / dependence(residuals) * math.log(self._squares() / left) if left > 0 else math.inf

    def _times_within(self) -> Floats:
        bounds = self._bounds
        times = [np.arange(end - begin) - (end - begin - 1) / 2 for begin, end in itertools.pairwise(bounds)]
        return np.concatenate(times)


def _candidates(scores: Floats) -> list[int]:
    """Finds the cuts that may be steps: a low penalty, raised until they are few."""
    noise, phi = noise_and_correlation(scores)
    phi = min(phi, CANDIDATE_PHI)
    squares = SquaredDeviations(scores)
    penalty = PENALTY * math.log(len(scores)) * noise**2 * (1 + phi) / (1 - phi)
    for _ in range(6):
        cuts = cuts_of_any_length(squares, penalty)
        if len(cuts) <= max(1, len(scores) // RUNS_PER_STEP):
            return cuts
        penalty *= 2
    return []


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
    """Tells if the series is flat except for few moves or lasting ones, as the metric of a deterministic test is."""
    moves = 1 + np.flatnonzero(np.diff(values))
    few = len(moves) <= max(2, MOST_STEPS * len(values))
    return bool(few or np.diff([0, *moves, len(values)]).min() >= MIN_SEGMENT)


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
    if all(cut >= newest[0] for cut in coarse):
        return coarse
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
