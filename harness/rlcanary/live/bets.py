"""Evidence that accumulates over a run, with one error rate for the whole of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# A statement that is true is found false in one of this many runs, however long they are.
RUNS = 400
# Parts of the largest stake that loses no more than there is.
STAKES = torch.tensor([0.8, 0.2, 0.03, 0.005], dtype=torch.float64)


class Bets:
    """Bets against the statement that the mean of values is at most a bound.

    A bettor stakes a fixed part of his wealth on each value. As long as the mean of each value, given those before it, is at
    most the bound, his wealth is a supermartingale: it passes 1 / alpha times its start at any time with a probability of at
    most alpha (Ville). Each update starts a bettor with each of these stakes, update k with the share 1 / (k (k + 1)) of the
    capital, so that what was right for long is found soon after it breaks. Their wealth is added up.
    """

    def __init__(self, bound: float) -> None:
        """Start with nothing won, against a mean of at most `bound`."""
        self._bound = bound
        self._updates = 0
        self._log_wealth = torch.full_like(STAKES, -math.inf)

    def state_dict(self) -> dict[str, Any]:
        """Return what was won so far, in plain values."""
        return {"updates": self._updates, "log_wealth": [each if each > -math.inf else None for each in self._won()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what was won before."""
        won = [-math.inf if each is None else each for each in state["log_wealth"]]
        self._updates, self._log_wealth = state["updates"], torch.tensor(won, dtype=torch.float64)

    def _won(self) -> list[float]:
        won: list[float] = self._log_wealth.tolist()
        return won

    def refuted_by(self, values: Tensor, lowest: Tensor | float) -> bool:
        """Add the values of an update -> True if the mean is above the bound.

        Args:
            values: [N].
            lowest: what each can be at least, as it was known before the value; [N], or one for all. Values below count as
                this one, which has to be rare enough for the mean to stay.
        """
        self._updates += 1
        share = -math.log(self._updates * (self._updates + 1) * len(STAKES))
        lowest_N = torch.as_tensor(lowest, dtype=torch.float64).expand(len(values))
        gains_N = values.double().maximum(lowest_N) - self._bound
        won = torch.log1p(STAKES.unsqueeze(1) / (self._bound - lowest_N) * gains_N).sum(dim=1)
        self._log_wealth = torch.logaddexp(self._log_wealth, torch.full_like(won, share)) + won
        return float(self._log_wealth.logsumexp(0)) > math.log(RUNS)
