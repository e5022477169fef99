"""Where a series changed its level, and where it only looks so. The full table against other detectors is a benchmark."""

import numpy as np
import pytest

from rlcanary.history.changepoints import Floats, SquaredDeviations, change_points, find_levels, optimal_cuts

RUNS = 150
STEP_AT = 100
SERIES = 200


def _noise(kind: str, random: np.random.Generator) -> Floats:
    match kind:
        case "gaussian":
            return random.standard_normal(RUNS)
        case "heavy tails":
            return random.standard_t(3, RUNS) / np.sqrt(3)
        case "neighbours alike":
            shocks = random.standard_normal(RUNS + 50) * np.sqrt(1 - 0.5**2)
            noise = np.zeros(RUNS + 50)
            for run in range(1, RUNS + 50):
                noise[run] = 0.5 * noise[run - 1] + shocks[run]
            return noise[50:]
        case "outliers":
            hit = random.random(RUNS) < 0.03
            return random.standard_normal(RUNS) + hit * 8 * random.choice([-1, 1], RUNS)
        case "lognormal":
            return np.exp(random.standard_normal(RUNS)) / 2.16
        case "second mode":
            return (random.standard_normal(RUNS) + 7 * (random.random(RUNS) < 0.1)) / 2.33
        case "uneven":
            return random.standard_normal(RUNS) * np.where(np.arange(RUNS) // 25 % 2 == 0, 0.34, 1.37)
        case "two modes":
            return 0.25 * random.standard_normal(RUNS) + random.choice([-1, 1], RUNS)
        case "sticky modes":
            return 0.3 * random.standard_normal(RUNS) + np.cumprod(np.where(random.random(RUNS) < 0.1, -1, 1))
    raise AssertionError(kind)


NOISES = ["gaussian", "heavy tails", "neighbours alike", "outliers", "lognormal", "second mode", "uneven", "two modes"]


@pytest.mark.parametrize("kind", [*NOISES, "sticky modes"])
def test_noise_without_a_step_raises_few_false_alarms(kind: str) -> None:
    random = np.random.default_rng(0)
    alarms = [bool(change_points(100 * (1 + 0.02 * _noise(kind, random)))) for _ in range(SERIES)]
    assert np.mean(alarms) <= 0.05  # 0.03 are promised, of many more series


@pytest.mark.parametrize("kind", NOISES)
def test_step_of_five_percent_under_two_percent_noise_is_found(kind: str) -> None:
    random = np.random.default_rng(0)
    found = 0
    for _ in range(100):
        series = 100 * (1 + 0.02 * _noise(kind, random))
        series[STEP_AT:] += 5
        found += any(abs(change.index - STEP_AT) <= 5 for change in change_points(series))
    assert found / 100 >= 0.9  # 0.95 are promised, of many more series


def test_line_is_a_drift_and_not_a_staircase() -> None:
    random = np.random.default_rng(0)
    for _ in range(20):
        noise = 2 * random.standard_normal(RUNS)
        levels = find_levels(100 + noise + 10 * np.arange(RUNS) / RUNS)
        assert levels.steps == []
        assert levels.slope == pytest.approx(10 / RUNS, rel=0.4)
        assert find_levels(100 + noise + 10 * (np.arange(RUNS) >= 75)).slope is None


@pytest.mark.parametrize("growth", [1000.0, 0.1, -1.0])
def test_counter_that_grows_by_the_same_amount_in_each_run_is_a_drift(growth: float) -> None:
    levels = find_levels(growth * np.arange(60.0))
    assert levels.slope == pytest.approx(growth)
    assert levels.steps == []


def test_change_that_was_mended_is_two_steps_and_a_third_time_is_switching() -> None:
    random = np.random.default_rng(0)
    runs = np.arange(RUNS)
    noise = 100 + 2 * random.standard_normal(RUNS)
    mended = noise + 10 * ((runs >= 60) & (runs < 90))
    assert [change.index for change in change_points(mended)] == [60, 90]
    assert change_points(noise + 10 * (runs // 12 % 2)) == []


def test_rate_of_a_flaky_test_is_not_a_step() -> None:
    random = np.random.default_rng(0)
    alarms = [bool(change_points((random.random(RUNS) < 0.2).astype(float))) for _ in range(SERIES)]
    assert np.mean(alarms) <= 0.08


@pytest.mark.parametrize(
    ("series", "steps"),
    [
        ([1.0] * 20 + [2.0] * 20, [20]),
        ([1.0] * 5 + [1.5] * 30 + [0.2] * 5, [5, 35]),
        ([0.3] * 37 + [0.9] * 3, [37]),
        ([0.3] * 38 + [0.9] * 2, []),
        ([0.3] * 20 + [0.9] + [0.3] * 20, []),
        ([0.3] * 40, []),
        ([0.77, 0.774, 0.774, *[0.771] * 4, 0.133, *[0.134] * 4], [7]),
        ([1.0, 2.0], []),
        ([], []),
    ],
    ids=[
        "one step",
        "two steps",
        "three runs after",
        "two runs after",
        "one outlier",
        "flat",
        "flat but for rare small moves",
        "two runs",
        "empty",
    ],
)
def test_deterministic_metric_steps_where_three_runs_agree(series: list[float], steps: list[int]) -> None:
    assert [change.index for change in change_points(np.array(series))] == steps


def test_step_is_measured_in_share_and_noise() -> None:
    random = np.random.default_rng(0)
    series = 2.0 + 0.01 * random.standard_normal(80)
    series[40:] -= 1.0
    (change,) = change_points(series)
    assert change.index == 40
    assert change.relative_step == pytest.approx(-0.5, abs=0.01)
    assert change.noise == pytest.approx(0.01, rel=0.3)
    assert change.noise_units == pytest.approx(-1.0 / change.noise, rel=0.01)


def test_partition_is_the_best_of_all_partitions() -> None:
    random = np.random.default_rng(3)
    for _ in range(20):
        values = random.standard_normal(12) + np.repeat(random.standard_normal(4), 3)
        costs = [_cost(values, cuts, penalty=1.0) for cuts in _partitions(0, 12)]
        assert _cost(values, optimal_cuts(SquaredDeviations(values), 1.0, np.arange(13)), penalty=1.0) == pytest.approx(
            min(costs)
        )


def _cost(values: Floats, cuts: list[int], penalty: float) -> float:
    return sum(float(((segment - segment.mean()) ** 2).sum()) for segment in np.split(values, cuts)) + penalty * len(
        cuts
    )


def _partitions(begin: int, end: int) -> list[list[int]]:
    """Every way to cut [begin, end) into segments of at least three."""
    return [[], *([cut, *rest] for cut in range(begin + 3, end - 2) for rest in _partitions(cut, end))]


def test_series_with_nan_is_refused() -> None:
    with pytest.raises(ValueError, match="non-finite"):
        change_points(np.array([1.0, np.nan, 2.0]))


def test_step_in_ten_thousand_runs_is_placed_as_exactly_as_in_few() -> None:
    random = np.random.default_rng(0)
    series = 1.0 + 0.01 * random.standard_normal(10_000)
    series[3_337:] += 0.1
    series[9_995:] += 0.1
    assert [change.index for change in change_points(series)] == [3_337, 9_995]


@pytest.mark.parametrize("kind", ["gaussian", "heavy tails", "neighbours alike", "outliers"])
def test_range_of_a_step_holds_its_place(kind: str) -> None:
    random = np.random.default_rng(1)
    held = []
    for _ in range(SERIES):
        series = 100 * (1 + 0.02 * _noise(kind, random))
        series[STEP_AT:] *= 1.05
        changes = [change for change in change_points(series) if abs(change.index - STEP_AT) <= 25]
        if len(changes) == 1:
            held.append(changes[0].earliest <= STEP_AT <= changes[0].latest)
    assert len(held) >= 0.9 * SERIES
    assert np.mean(held) >= 0.95
