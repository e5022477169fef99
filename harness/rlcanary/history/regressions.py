"""Find metrics that became worse, the commits between which they did, and what is known about it."""

from bisect import bisect_left
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from rlcanary.history.changepoints import MIN_RUNS, ChangePoint, noise_of, ratio
from rlcanary.history.directions import Direction
from rlcanary.history.history import Point, Series
from rlcanary.history.index import Run
from rlcanary.history.ledger import Alarm, Ledger
from rlcanary.history.significance import deviations_at_cuts, normal_scores
from rlcanary.history.trends import Trend

HISTORY_RUNS = 1000  # older runs say nothing about the newest ones
LEFT_OF_STEP = 0.5  # a step of which less is left has been undone
OUTLYING_SIGMAS = 5.0
# Of all metrics of a project together, noise announces one in a day with at most twice this probability: once by how
# clear a change is at first sight, and once by runs that came after it was seen.
CHANCE_PER_DAY = 0.01
CONFIRMING_RUNS = 5
CONFIRMING_DEVIATIONS = 2.6  # noise off its level by as much in one of 200 cases
CONFIRMING_RUNS_OF_DRIFT = 10


class Kind(StrEnum):
    STEP = "step"
    DRIFT = "drift"
    NOT_FINITE = "not finite"
    OUTLIERS = "outliers"
    """Only the newest one or two runs are off, which are too few for a level."""


class Status(StrEnum):
    NEW = "new"
    """It is worse, and this became certain with the newest run."""
    UNCONFIRMED = "to confirm"
    """It looks worse; further runs will confirm or clear it."""
    MOVED = "moved"
    """It changed, and its better direction is unknown."""
    KNOWN = "known"
    """It is worse, which was announced at an earlier run."""
    ACKNOWLEDGED = "acknowledged"
    """It is worse, and somebody has said so."""


@dataclass(frozen=True)
class Regression:
    """A metric that is worse now than before.

    The change lies between the runs `last_good` and `first_bad`. `before` and `after` are levels (None: not finite),
    `noise` is the standard deviation from run to run, in the metric's units, `runs_since` counts the runs since the change
    (0 for a drift, which goes on). `chance` is the probability that noise looks as clear as this.
    """

    trend: Trend
    direction: Direction | None
    kind: Kind
    before: float
    after: float | None
    noise: float
    last_good: Point
    first_bad: Point
    runs_since: int
    chance: float
    status: Status = Status.UNCONFIRMED
    note: str = ""

    @property
    def series(self) -> Series:
        return self.trend.series

    @property
    def rises(self) -> bool:
        return self.after is not None and self.after > self.before

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


def is_worse(change: float, direction: Direction | None) -> bool:
    match direction:
        case Direction.LOWER:
            return change > 0
        case Direction.HIGHER:
            return change < 0
        case Direction.IGNORE:
            return False
    return change != 0


def find_regressions(series: Series, direction: Direction | None, least_change: float) -> list[Regression]:
    """Finds what is worse now than before, by a share of at least `least_change`, in the newest HISTORY_RUNS of a metric.

    With `direction` None, any lasting move counts.
    """
    if direction is Direction.IGNORE:
        return []
    trend = Trend(series.newest(HISTORY_RUNS))
    not_finite = _not_finite(trend, direction)
    if not_finite is not None:
        return [not_finite]
    found = [_lasting(trend, step, direction, least_change) for step in trend.steps.values()]
    found.append(_drift(trend, direction, least_change))
    lasting = [regression for regression in found if regression is not None]
    return lasting or [
        regression for regression in [_outlying(trend, direction, least_change)] if regression is not None
    ]


def judge(
    found: Iterable[Regression], ledger: Ledger, looked_at: Collection[str], metrics: int, newest_run: Run, recent: int
) -> list[Regression]:
    """Compares what was found with the ledger of alarms, brings it up to date, and says what is new.

    Args:
        found: What was found in the metrics that were looked at.
        ledger: The alarms.
        looked_at: The names of these metrics.
        metrics: The number of metrics of the project.
        newest_run: The newest run of the history.
        recent: In a metric that is looked at for the first time, a change counts as new within this many runs.
    """
    judged = []
    now = newest_run.run_id, newest_run.started_s
    matched = []
    for regression in found:
        if regression.direction is None:
            if regression.runs_since <= recent:
                judged.append(replace(regression, status=Status.MOVED))
            continue
        if regression.kind is Kind.OUTLIERS:
            judged.append(regression)
            continue
        change = (
            *(regression.series.name, regression.kind.value, regression.rises),
            *(regression.last_good.run.started_s, regression.first_bad.run.started_s),
        )
        known = ledger.find(*change)
        alarm = known or ledger.add(*change)
        if not alarm.is_open:
            ledger.note_event(alarm, "back", *now)
        if "seen" not in alarm.events:  # new, or the disk was full when it was
            ledger.note_event(alarm, "seen", *now)
        if known is None and regression.series.name not in ledger.watched and regression.runs_since > recent:
            ledger.note_event(alarm, "known", *now)
            ledger.note_event(alarm, "acknowledged", *now, note="older than the first look at this metric")
        certain = regression.chance <= CHANCE_PER_DAY / metrics
        if "known" not in alarm.events and (certain or _is_confirmed(regression, alarm.events["seen"][1])):
            ledger.note_event(alarm, "known", *now)
        matched.append(alarm)
        judged.append(replace(regression, status=_status(alarm, newest_run), note=alarm.note))
    for alarm in ledger.open_alarms():
        if alarm.metric in looked_at and alarm not in matched:
            ledger.note_event(alarm, "over", *now)
    ledger.watch(looked_at)
    return judged


def _status(alarm: Alarm, newest_run: Run) -> Status:
    if "acknowledged" in alarm.events:
        return Status.ACKNOWLEDGED
    if "known" not in alarm.events:
        return Status.UNCONFIRMED
    return Status.NEW if alarm.events["known"][0] == newest_run.run_id else Status.KNOWN


def _is_confirmed(regression: Regression, seen_s: float) -> bool:
    """Tells if the runs that came after a change was seen lie off the level before it, on the side of the change."""
    trend = regression.trend
    starts = [trend.series.runs[index].started_s for index in trend.measured]
    later = sum(start > seen_s for start in starts)
    if regression.kind is Kind.DRIFT:
        return later >= CONFIRMING_RUNS_OF_DRIFT
    if later < CONFIRMING_RUNS:
        return False
    good = bisect_left(starts, regression.last_good.run.started_s)
    begin = max((place for index in trend.steps if (place := bisect_left(trend.measured, index)) <= good), default=0)
    old, new = trend.values[begin : good + 1], trend.values[-later:]
    if len(old) < 2 or (new.mean() > old.mean()) != regression.rises:
        return False
    scores = normal_scores(np.concatenate((old, new)))
    return deviations_at_cuts(scores, [0, len(old), len(scores)])[0] >= CONFIRMING_DEVIATIONS


def _not_finite(trend: Trend, direction: Direction | None) -> Regression | None:
    """Finds a newest value that is not finite after one that was."""
    series, measured = trend.series, trend.measured
    if not measured or measured[-1] == len(series.values) - 1:
        return None
    last = measured[-1]
    before = series.values[last]
    assert before is not None
    runs = len(series.values) - last - 1
    # There is nothing that noise could explain, and no direction in which this is better.
    direction = direction or Direction.STABLE
    points = series.point(last), series.point(last + 1)
    return Regression(trend, direction, Kind.NOT_FINITE, before, None, 0.0, *points, runs, 0.0)


def _lasting(trend: Trend, step: ChangePoint, direction: Direction | None, least_change: float) -> Regression | None:
    """Returns a step for the worse that has not been undone by half at any time since."""
    if not is_worse(step.step, direction) or abs(step.step) < least_change * abs(step.before):
        return None
    levels = [later.after for index, later in trend.steps.items() if index >= step.index]
    for level in levels:
        left = level - step.before
        if left * step.step <= 0 or abs(left) < max(LEFT_OF_STEP * abs(step.step), least_change * abs(step.before)):
            return None
    after = levels[-1]
    series = trend.series
    points = series.point(step.earliest - 1), series.point(step.latest)
    runs = len(series.values) - step.index
    return Regression(trend, direction, Kind.STEP, step.before, after, step.noise, *points, runs, step.chance)


def _drift(trend: Trend, direction: Direction | None, least_change: float) -> Regression | None:
    """Returns the drift of a metric from its first run to its newest one."""
    if trend.slope is None or not is_worse(trend.slope, direction):
        return None
    change = trend.slope * (len(trend.values) - 1)
    level = float(np.median(trend.values - trend.slope * np.arange(len(trend.values))))
    if abs(change) < least_change * abs(level):
        return None
    first, last = trend.series.point(trend.measured[0]), trend.series.point(trend.measured[-1])
    noise = noise_of(trend.values)
    return Regression(trend, direction, Kind.DRIFT, level, level + change, noise, first, last, 0, 1.0)


def _outlying(trend: Trend, direction: Direction | None, least_change: float) -> Regression | None:
    """Finds outliers on the worse side among the newest one or two runs, which are too few for a level."""
    series, measured, values = trend.series, trend.measured, trend.values
    if direction is None or too_short(series):
        return None
    begin = bisect_left(measured, max(trend.steps)) if trend.steps else 0
    for count in (2, 1):
        level = float(np.median(values[begin:-count]))
        noise = noise_of(values[:-count])
        changes = values[-count:] - level
        if all(
            is_worse(float(change), direction) and abs(change) > max(OUTLYING_SIGMAS * noise, least_change * abs(level))
            for change in changes
        ):
            after = float(np.mean(values[-count:]))
            points = series.point(measured[-count - 1]), series.point(measured[-count])
            return Regression(trend, direction, Kind.OUTLIERS, level, after, noise, *points, count, 1.0)
    return None
