"""The model of two commits that each break a part of the runs, against the sum over all that it holds for possible."""

from itertools import combinations

import numpy as np
import pytest

from rlcanary.bisect.search.information import information
from rlcanary.bisect.search.two_steps import ALIKE_WEIGHT, BETWEEN, FLAKES, LEAST_STEP, two_steps

COUNT = 6
READINGS = {-1: [0.0, 0.0], 0: [0.0], 2: [1.0, 0.0, 1.0], 3: [0.0], 5: [1.0, 1.0]}
EVEN = 0.5


def all_worlds() -> list[tuple[float, int, int, tuple[float, float, float]]]:
    """The joint probability of the readings and each pair of steps and failure rates, with these."""
    rates = [
        (before, between, 1 - passes)
        for before in FLAKES
        for between in BETWEEN
        for passes in FLAKES
        if between - before > LEAST_STEP - 1e-6 and 1 - passes - between > LEAST_STEP - 1e-6
    ]
    weights = [ALIKE_WEIGHT if abs(before + after - 1) < 1e-9 else 1.0 for before, _, after in rates]
    pairs = list(combinations(range(COUNT), 2))
    worlds = []
    for weight, rate in zip(weights, rates, strict=True):
        for first, second in pairs:
            chance = weight / sum(weights) / len(pairs)
            for position, readings in READINGS.items():
                failing = rate[(position >= first) + (position >= second)]
                for reading in readings:
                    chance *= failing if reading else 1 - failing
            worlds.append((chance, first, second, rate))
    return worlds


def test_steps_and_rates_are_those_of_the_sum_over_all_worlds() -> None:
    worlds = all_worlds()
    total = sum(world[0] for world in worlds)
    found = two_steps(READINGS, COUNT, np.log(total), EVEN)
    assert found is not None
    assert found.chance == pytest.approx(0.5)
    for which in (1, 2):
        expected = [sum(world[0] for world in worlds if world[which] == index) / total for index in range(COUNT)]
        assert found.chance_2N[which - 1] == pytest.approx(expected)
    rates = [sum(world[0] * world[3][stretch] for world in worlds) / total for stretch in range(3)]
    assert found.failures_3 == pytest.approx(rates)


def test_chance_weighs_the_evidence_with_the_prior() -> None:
    log_evidence = float(np.log(sum(world[0] for world in all_worlds())))
    even = two_steps(READINGS, COUNT, log_evidence - np.log(4), EVEN)
    doubted = two_steps(READINGS, COUNT, log_evidence - np.log(4), 0.2)
    assert even is not None
    assert doubted is not None
    assert (even.chance, doubted.chance) == pytest.approx((0.8, 0.5))


def test_runs_that_contradict_each_other_nowhere_have_no_two_steps() -> None:
    assert two_steps({-1: [0.0], 2: [0.0, 1.0], 5: [1.0]}, COUNT, 0.0) is None
    assert two_steps({-1: [0.0, 1.0], 0: [0.0]}, 1, 0.0) is None


def test_information_of_two_steps_is_that_about_the_stretch_of_a_commit() -> None:
    found = two_steps(READINGS, COUNT, -1e6, EVEN)  # no other explanation is left
    assert found is not None
    chances_H2K = np.full((COUNT + 2, 2, 2), 0.5)
    information_C = information(np.zeros(COUNT + 3), chances_H2K, np.array([0.5, 0.5]), [], apart=found.apart())
    first, second = (np.concatenate([[0.0], np.cumsum(chance_N)]) for chance_N in found.chance_2N)
    for candidate in range(COUNT + 1):
        stretch = np.array([1 - first[candidate], first[candidate] - second[candidate], second[candidate]])
        failing = float(stretch @ found.failures_3)
        expected = bits(failing) - sum(
            share * bits(rate) for share, rate in zip(stretch, found.failures_3, strict=True)
        )
        assert information_C[candidate] == pytest.approx(max(0.0, expected), abs=1e-9)


def bits(chance: float) -> float:
    return float(-chance * np.log2(chance) - (1 - chance) * np.log2(1 - chance))
