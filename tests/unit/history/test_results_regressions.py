"""What counts as worse, and between which runs it became so."""

import numpy as np
import pytest

from rlcanary.history.directions import Direction
from rlcanary.history.history import Run, Series
from rlcanary.history.regressions import Regression, Status, find_regression

LOWER, HIGHER, STABLE, IGNORE = Direction


def regression(
    values: list[float | None], direction: Direction | None = LOWER, newest: int = 30, least_change: float = 0.001
) -> Regression | None:
    runs = [Run(f"{i}.json", f"run{i}", i * 86400.0, f"{i:040x}", False, 0, None) for i in range(len(values))]
    return find_regression(Series("test_a::test_b", "m", values, runs, {}), direction, newest, least_change)


def between(found: Regression | None) -> tuple[str, str]:
    assert found is not None
    return found.last_good.run.run_id, found.first_bad.run.run_id


@pytest.mark.parametrize(
    ("direction", "after", "status"),
    [
        (LOWER, 1.2, Status.WORSE),
        (LOWER, 0.8, None),
        (HIGHER, 0.8, Status.WORSE),
        (HIGHER, 1.2, None),
        (STABLE, 0.8, Status.WORSE),
        (STABLE, 1.2, Status.WORSE),
        (None, 0.8, Status.MOVED),
        (None, 1.2, Status.MOVED),
        (IGNORE, 1.2, None),
    ],
)
def test_step_is_worse_by_the_direction(direction: Direction | None, after: float, status: Status | None) -> None:
    found = regression([1.0] * 20 + [after] * 5, direction)
    assert (found and found.status) == status
    if found:
        assert between(found) == ("run19", "run20")
        assert (found.before, found.after) == (1.0, after)
        assert found.relative == pytest.approx(after - 1)
        assert found.noise_units is None


def test_size_is_in_noise_units_and_the_range_holds_the_step() -> None:
    random = np.random.default_rng(0)
    values = 100 + 2 * random.standard_normal(150)
    values[130:] += 6
    found = regression(values.tolist())
    assert found is not None
    assert found.status is Status.WORSE
    assert found.noise_units == pytest.approx(3, abs=1)
    assert int(found.last_good.run.run_id[3:]) < 130 <= int(found.first_bad.run.run_id[3:])


def test_old_step_is_the_new_normal() -> None:
    assert regression([1.0] * 20 + [1.2] * 40, newest=30) is None
    assert regression([1.0] * 20 + [1.2] * 40, newest=40) is not None


def test_step_that_was_undone_is_not_reported() -> None:
    assert regression([1.0] * 20 + [2.0] * 5 + [1.0] * 5) is None
    assert regression([1.0] * 20 + [2.0] * 5 + [1.1] * 5) is None
    assert regression([1.0] * 20 + [2.0] * 5 + [1.9] * 5) is not None


def test_of_two_steps_the_larger_one_is_placed_and_both_are_counted() -> None:
    found = regression([1.0] * 20 + [1.1] * 5 + [1.5] * 5)
    assert between(found) == ("run24", "run25")
    assert found is not None
    assert (found.before, found.after) == (1.0, 1.5)


def test_change_below_the_least_is_passed_over() -> None:
    values: list[float | None] = [1.0] * 20 + [1.0005] * 5
    assert regression(values) is None
    assert regression(values, least_change=0.0001) is not None


@pytest.mark.parametrize(("noise", "count"), [(0.01, 1), (0.0, 1), (0.0, 2)])
def test_newest_runs_out_of_line_are_to_be_confirmed(noise: float, count: int) -> None:
    random = np.random.default_rng(0)
    values = (1.0 + noise * random.standard_normal(40)).tolist()
    found = regression([*values, *[1.3] * count])
    assert found is not None
    assert found.status is Status.UNCONFIRMED
    assert between(found) == ("run39", "run40")
    assert regression([*values, *[0.7] * count]) is None
    assert regression([*values, *[1.3] * count], direction=None) is None


def test_ordinary_noise_is_nothing() -> None:
    random = np.random.default_rng(0)
    alarms = [regression((1 + 0.02 * random.standard_normal(60)).tolist(), STABLE) is not None for _ in range(100)]
    assert np.mean(alarms) <= 0.05


@pytest.mark.parametrize("direction", [LOWER, HIGHER, STABLE, None])
def test_number_that_became_nan_is_worse(direction: Direction | None) -> None:
    found = regression([1.0, 1.1, None, 1.0, 1.2, None], direction)
    assert found is not None
    assert found.status is Status.WORSE
    assert found.after is None
    assert between(found) == ("run4", "run5")


@pytest.mark.parametrize("values", [[], [None, None], [1.0], [1.0, 2.0, 3.0], [1.0] * 30], ids=len)
def test_too_little_to_go_by_is_nothing(values: list[float | None]) -> None:
    assert regression(values) is None
