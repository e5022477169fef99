"""Bets refute a mean above the bound, and a true one in hardly any run, however often it is looked at."""

import pytest
import torch
from torch import Tensor

from rlcanary.live.bets import RUNS, Bets

UPDATES, TOKENS = 100, 100


def values(kind: str, mean: float, source: torch.Generator) -> Tensor:
    """Values of at least 0 with this mean."""
    uniform = torch.rand(TOKENS, generator=source, dtype=torch.float64)
    match kind:
        case "constant":
            return torch.full((TOKENS,), mean, dtype=torch.float64)
        case "exponential":
            return -mean * uniform.log()
        case "rare":  # a large value once in fifty
            return 50 * mean * (uniform < 0.02)
    raise AssertionError(kind)


def refuted(kind: str, mean: float, seed: int, updates: int = UPDATES) -> int | None:
    """The update in which a mean of at most 1 is refuted."""
    source, bets = torch.Generator().manual_seed(seed), Bets(1.0)
    return next((update for update in range(updates) if bets.refuted_by(values(kind, mean, source), 0.0)), None)


@pytest.mark.parametrize("kind", ["constant", "exponential", "rare"])
def test_a_mean_at_the_bound_is_refuted_in_hardly_any_run(kind: str) -> None:
    runs = 1 if kind == "constant" else 150
    assert sum(refuted(kind, 1.0, seed) is not None for seed in range(runs)) <= 2 + 2 * runs // RUNS


@pytest.mark.parametrize(
    ("kind", "mean", "within"), [("exponential", 1.5, 5), ("exponential", 1.15, 80), ("rare", 2.0, 150)]
)
def test_a_mean_above_the_bound_is_refuted_soon(kind: str, mean: float, within: int) -> None:
    assert all(refuted(kind, mean, seed, within) is not None for seed in range(10))


def test_a_mean_that_rises_late_is_refuted_soon_after() -> None:
    source, bets = torch.Generator().manual_seed(0), Bets(1.0)
    assert not any(bets.refuted_by(values("exponential", 0.5, source), 0.0) for _ in range(1000))
    assert any(bets.refuted_by(values("exponential", 1.5, source), 0.0) for _ in range(8))
