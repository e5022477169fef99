"""Find metrics that became worse in the newest runs, and the commits between which they did."""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from rlcanary.history.changepoints import MIN_RUNS, noise_of, ratio
from rlcanary.history.directions import Direction
from rlcanary.history.history import Point, Series
from rlcanary.history.trends import Trend

HISTORY_RUNS = 1000  # older runs say nothing about the newest ones
LEFT_OF_STEP = 0.5  # a step of which less is left has been undone
OUTLYING_SIGMAS = 5.0


class Status(StrEnum):
    WORSE = "worse"
    """The metric stepped and stayed, or its newest value is not finite."""
    UNCONFIRMED = "to confirm"
    """Only the newest one or two runs are outliers on the worse side; a further run will confirm or clear them."""
    MOVED = "moved"
    """The metric stepped, and its better direction is unknown."""


@dataclass(frozen=True)
class Regression:
    """A metric that is worse now than before.

    The change lies between the runs `last_good` and `first_bad`. `before` and `after` are levels (None: not finite),
    `noise` is the standard deviation from run to run, in the metric's units.
    """

    series: Series
    direction: Direction | None
    status: Status
    before: float
    after: float | None
    noise: float
    last_good: Point
    first_bad: Point

    @property
    def relative(self) -> float | None:
        """Returns the change as a share of the level before; None if that is 0 or either level is not finite."""
        return None if self.after is None else ratio(self.after - self.before, abs(self.before))

    @property
    def noise_units(self) -> float | None:
        """Returns the change in standard deviations of the noise; None for a metric without noise."""
        return None if self.after is None else ratio(self.after - self.before, self.noise)


def too_short(series: Series) -> bool:
    """Tells if there are too few runs to tell a level from an outlier."""
    return sum(value is not None for value in series.values) < MIN_RUNS


def find_regression(series: Series, direction: Direction | None, newest: int, least_change: float) -> Regression | None:
    """Finds a lasting regression, of a share of at least `least_change`, in the newest `newest` runs of a metric.

    With `direction` None, any lasting move is reported as MOVED.
    """
    if direction is Direction.IGNORE:
        return None
    series = series.newest(HISTORY_RUNS)
    return (
        _not_finite(series, direction)
        or _lasting(series, direction, newest, least_change)
        or _outlying(series, direction, least_change)
    )


def is_worse(change: float, direction: Direction | None) -> bool:
    match direction:
        case Direction.LOWER:
            return change > 0
        case Direction.HIGHER:
            return change < 0
        case Direction.IGNORE:
            return False
    return change != 0


def _not_finite(series: Series, direction: Direction | None) -> Regression | None:
    """Finds a newest value that is not finite after one that was."""
    measured = [index for index, value in enumerate(series.values) if value is not None]
    if not measured or measured[-1] == len(series.values) - 1:
        return None
    last = measured[-1]
    before = series.values[last]
    assert before is not None
    return Regression(series, direction, Status.WORSE, before, None, 0.0, series.point(last), series.point(last + 1))


def _lasting(series: Series, direction: Direction | None, newest: int, least_change: float) -> Regression | None:
    steps = [step for index, step in Trend(series).steps.items() if index >= len(series.values) - newest]
    worse = [step for step in steps if is_worse(step.step, direction)]
    if not worse:
        return None
    largest = max(worse, key=lambda step: abs(step.step))
    before, after = steps[0].before, steps[-1].after
    change = after - before
    if not is_worse(change, direction) or abs(change) < max(
        LEFT_OF_STEP * abs(largest.step), least_change * abs(before)
    ):
        return None
    return Regression(
        series,
        direction,
        Status.MOVED if direction is None else Status.WORSE,
        before,
        after,
        largest.noise,
        series.point(largest.earliest - 1),
        series.point(largest.latest),
    )


def _outlying(series: Series, direction: Direction | None, least_change: float) -> Regression | None:
    """Finds outliers on the worse side among the newest one or two runs, which are too few for a level."""
    if direction is None or too_short(series):
        return None
    measured = [index for index, value in enumerate(series.values) if value is not None]
    values = np.array([series.values[index] for index in measured], dtype=np.float64)
    steps = Trend(series).steps
    begin = measured.index(max(steps)) if steps else 0
    for count in (2, 1):
        level = float(np.median(values[begin:-count]))
        noise = noise_of(values[:-count])
        changes = values[-count:] - level
        if all(
            is_worse(float(change), direction) and abs(change) > max(OUTLYING_SIGMAS * noise, least_change * abs(level))
            for change in changes
        ):
            after = float(np.mean(values[-count:]))
            return Regression(
                series,
                direction,
                Status.UNCONFIRMED,
                level,
                after,
                noise,
                series.point(measured[-count - 1]),
                series.point(measured[-count]),
            )
    return None
