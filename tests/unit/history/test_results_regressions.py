"""What counts as worse, between which runs it became so, and when it is new, known, to be confirmed, or over."""

import numpy as np
import pytest

from rlcanary.history.directions import Direction
from rlcanary.history.history import Run, Series
from rlcanary.history.ledger import Ledger
from rlcanary.history.regressions import Kind, Regression, Status, find_regressions, judge

LOWER, HIGHER, STABLE, IGNORE = Direction
NAME = "test_a::test_b.m"


def series_of(values: list[float | None]) -> Series:
    """A series with a run each day."""
    runs = [Run(f"{i}.json", f"run{i}", i * 86400.0, f"{i:040x}", False, 0, None) for i in range(len(values))]
    return Series("test_a::test_b", "m", values, runs, {})


def look(
    ledger: Ledger, values: list[float | None], direction: Direction | None = LOWER, metrics: int = 1
) -> list[Status]:
    """The statuses that a daily look at this history finds."""
    series = series_of(values)
    found = find_regressions(series, direction, 0.001)
    judged = judge(found, ledger, {NAME}, metrics, series.runs[-1], recent=30)
    return [regression.status for regression in judged]


def regressions(
    values: list[float | None], direction: Direction | None = LOWER, least_change: float = 0.001
) -> list[Regression]:
    return find_regressions(series_of(values), direction, least_change)


def regression(values: list[float | None], direction: Direction | None = LOWER) -> Regression:
    (found,) = regressions(values, direction)
    return found


def between(found: Regression) -> tuple[str, str]:
    return found.last_good.run.run_id, found.first_bad.run.run_id


@pytest.mark.parametrize(
    ("direction", "after", "status"),
    [
        (LOWER, 1.2, Status.NEW),
        (LOWER, 0.8, None),
        (HIGHER, 0.8, Status.NEW),
        (HIGHER, 1.2, None),
        (STABLE, 0.8, Status.NEW),
        (STABLE, 1.2, Status.NEW),
        (None, 0.8, Status.MOVED),
        (None, 1.2, Status.MOVED),
        (IGNORE, 1.2, None),
    ],
)
def test_step_is_worse_by_the_direction(direction: Direction | None, after: float, status: Status | None) -> None:
    values: list[float | None] = [1.0] * 20 + [after] * 5
    assert look(Ledger(), values, direction) == ([] if status is None else [status])
    for found in regressions(values, direction):
        assert between(found) == ("run19", "run20")
        assert (found.before, found.after) == (1.0, after)
        assert found.relative == pytest.approx(after - 1)
        assert found.noise_units is None


def test_size_is_in_noise_units_and_the_range_holds_the_step() -> None:
    random = np.random.default_rng(0)
    values = 100 + 2 * random.standard_normal(150)
    values[130:] += 6
    found = regression(values.tolist())
    assert found.noise_units == pytest.approx(3, abs=1)
    assert int(found.last_good.run.run_id[3:]) < 130 <= int(found.first_bad.run.run_id[3:])


def test_old_step_is_acknowledged_at_the_first_look() -> None:
    assert look(Ledger(), [1.0] * 20 + [1.2] * 40) == [Status.ACKNOWLEDGED]


def test_step_that_was_undone_is_not_reported() -> None:
    assert regressions([1.0] * 20 + [2.0] * 5 + [1.0] * 5) == []
    assert regressions([1.0] * 20 + [2.0] * 5 + [1.1] * 5) == []
    assert len(regressions([1.0] * 20 + [2.0] * 5 + [1.9] * 5)) == 1


def test_two_steps_are_two_regressions_with_the_level_of_now() -> None:
    found = regressions([1.0] * 20 + [1.1] * 5 + [1.5] * 5)
    assert [between(step) for step in found] == [("run19", "run20"), ("run24", "run25")]
    assert [(step.before, step.after) for step in found] == [(1.0, 1.5), (1.1, 1.5)]


def test_change_below_the_least_is_passed_over() -> None:
    values: list[float | None] = [1.0] * 20 + [1.0005] * 5
    assert regressions(values) == []
    assert len(regressions(values, least_change=0.0001)) == 1


@pytest.mark.parametrize(("noise", "count"), [(0.01, 1), (0.0, 1), (0.0, 2)])
def test_newest_runs_out_of_line_are_to_be_confirmed(noise: float, count: int) -> None:
    random = np.random.default_rng(0)
    values = (1.0 + noise * random.standard_normal(40)).tolist()
    assert look(Ledger(), [*values, *[1.3] * count]) == [Status.UNCONFIRMED]
    assert between(regression([*values, *[1.3] * count])) == ("run39", "run40")
    assert regressions([*values, *[0.7] * count]) == []
    assert regressions([*values, *[1.3] * count], direction=None) == []


@pytest.mark.parametrize("direction", [LOWER, HIGHER, STABLE, None])
def test_number_that_became_nan_is_new_and_then_known(direction: Direction | None) -> None:
    ledger = Ledger()
    values = [1.0, 1.1, None, 1.0, 1.2, None]
    assert look(ledger, values, direction) == [Status.NEW]
    assert look(ledger, [*values, None], direction) == [Status.KNOWN]
    assert look(ledger, [*values, None, 1.0], direction) == []
    found = regression(values, direction)
    assert found.after is None
    assert between(found) == ("run4", "run5")


@pytest.mark.parametrize("values", [[], [None, None], [1.0], [1.0, 2.0, 3.0], [1.0] * 30], ids=len)
def test_too_little_to_go_by_is_nothing(values: list[float | None]) -> None:
    assert regressions(values) == []


def test_step_is_announced_once_until_it_is_mended() -> None:
    ledger = Ledger()
    values: list[float | None] = [1.0] * 20
    assert look(ledger, values) == []
    assert look(ledger, [*values, 1.2, 1.2, 1.2]) == [Status.NEW]
    assert look(ledger, [*values, 1.2, 1.2, 1.2]) == [Status.NEW]  # another look at the same runs
    assert look(ledger, [*values, *[1.2] * 4]) == [Status.KNOWN]
    assert look(ledger, [*values, *[1.2] * 80]) == [Status.KNOWN]
    mended = [*values, *[1.2] * 80, *[1.0] * 5]
    assert look(ledger, mended) == []
    assert look(ledger, [*mended, *[1.2] * 5]) == [Status.NEW]


def test_alarm_lasts_when_runs_around_it_are_removed() -> None:
    ledger = Ledger()
    values: list[float | None] = [1.0] * 20 + [1.2] * 5
    assert look(ledger, values) == [Status.NEW]
    series = series_of([*values, 1.2])
    kept = [index for index in range(26) if index not in (18, 20, 21)]
    thinned = Series(series.key, "m", [series.values[i] for i in kept], [series.runs[i] for i in kept], {})
    found = find_regressions(thinned, LOWER, 0.001)
    assert [step.status for step in judge(found, ledger, {NAME}, 1, series.runs[-1], 30)] == [Status.KNOWN]


def test_drift_is_called_a_drift_and_confirmed_by_later_runs() -> None:
    random = np.random.default_rng(2)
    values = (100 + 0.1 * np.arange(170) + 2 * random.standard_normal(170)).tolist()
    found = regression(values)
    assert found.kind is Kind.DRIFT
    assert found.trend.slope == pytest.approx(0.1, rel=0.3)
    assert regressions(values, HIGHER) == []
    ledger = Ledger()
    assert look(ledger, values[:150]) == [Status.UNCONFIRMED]
    assert look(ledger, values[:155]) == [Status.UNCONFIRMED]
    assert look(ledger, values[:160]) == [Status.NEW]
    assert look(ledger, values) == [Status.KNOWN]


def test_slow_step_is_announced_once_by_daily_looks() -> None:
    """A step of three quarters of the noise, in a project of 200 metrics."""
    announced = []
    for seed in range(4):
        random = np.random.default_rng(1000 + seed)
        values = 100 + 2 * random.standard_normal(280)
        values[120:] += 1.5
        ledger = Ledger()
        statuses = [look(ledger, values[:day].tolist(), metrics=200) for day in range(100, 280, 3)]
        news = sum(status is Status.NEW for day in statuses for status in day)
        announced.append(news)
        if news:
            assert Status.UNCONFIRMED in [status for day in statuses for status in day]
    assert sum(count == 1 for count in announced) >= 3
    assert max(announced) <= 1


def test_more_metrics_need_clearer_steps() -> None:
    random = np.random.default_rng(7)
    values = 100 + 2 * random.standard_normal(60)
    values[50:] += 4
    chance = regression(values.tolist()).chance
    assert 0 < chance < 0.01
    few, many = int(0.005 / chance), int(0.02 / chance) + 1
    assert look(Ledger(), values.tolist(), metrics=max(few, 1)) == [Status.NEW]
    assert look(Ledger(), values.tolist(), metrics=many) == [Status.UNCONFIRMED]


def test_alarm_whose_events_a_full_disk_has_lost_is_seen_now() -> None:
    ledger, values = Ledger(), [1.0] * 40 + [1.3] * 5
    found = regression(values)
    starts = found.last_good.run.started_s, found.first_bad.run.started_s
    alarm = ledger.add(found.series.name, found.kind.value, found.rises, *starts)
    assert look(ledger, values) == [Status.NEW]
    assert set(alarm.events) >= {"seen", "known"}
