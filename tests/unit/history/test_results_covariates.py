"""Whether the day of the week, the machine and the environment are taken out of a metric, and nothing else is."""

import numpy as np
import pytest

from rlcanary.history.covariates import adjust
from rlcanary.history.history import Run, Series
from rlcanary.history.trends import Trend

RUNS = 150


def trend_of(values: np.ndarray, hosts: list[str], environments: list[str] | None = None) -> Trend:
    environments = environments or ["one"] * RUNS
    runs = [
        Run(f"{i}.json", f"run{i}", i * 86400.0, f"{i:040x}", False, 0, environments[i], hosts[i]) for i in range(RUNS)
    ]
    return Trend(Series("test_a", "m", values.tolist(), runs, {}))


def test_step_behind_a_weekly_cycle_is_found() -> None:
    random = np.random.default_rng(0)
    runs = np.arange(RUNS)
    for _ in range(10):
        flat = 100 + 2 * random.standard_normal(RUNS) + 10 * (runs % 7 < 2)
        assert trend_of(flat, ["a"] * RUNS).steps == {}
        trend = trend_of(flat + 5 * (runs >= 100), ["a"] * RUNS)
        assert [abs(step - 100) <= 5 for step in trend.steps] == [True]
        assert trend.effects["day of the week"]["Thu"] == pytest.approx(50 / 7, abs=2.5)


def test_slower_machine_among_others_is_no_step_and_hides_none() -> None:
    random = np.random.default_rng(1)
    slow = random.random(RUNS) < 0.4
    hosts = ["slow" if is_slow else "fast" for is_slow in slow]
    values = 100 + 2 * random.standard_normal(RUNS) + 15 * slow
    assert trend_of(values, hosts).steps == {}
    trend = trend_of(values + 5 * (np.arange(RUNS) >= 100), hosts)
    assert [abs(step - 100) <= 5 for step in trend.steps] == [True]
    assert trend.effects["host"]["slow"] - trend.effects["host"]["fast"] == pytest.approx(15, abs=2)


def test_environment_that_came_and_stayed_is_a_step() -> None:
    random = np.random.default_rng(2)
    values = 100 + 2 * random.standard_normal(RUNS) + 10 * (np.arange(RUNS) >= 100)
    trend = trend_of(values, ["a"] * RUNS, ["old"] * 100 + ["new"] * 50)
    assert trend.effects == {}
    assert [abs(step - 100) <= 2 for step in trend.steps] == [True]


def test_label_without_an_effect_changes_nothing() -> None:
    random = np.random.default_rng(3)
    adjusted = 0
    for _ in range(100):
        values = np.exp(random.standard_normal(RUNS))
        left, effects = adjust(values, random.integers(0, 3, RUNS).tolist())
        adjusted += bool(effects)
        assert effects or (left == values).all()
    assert adjusted <= 2
