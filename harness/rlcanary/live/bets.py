"""Evidence that accumulates over a run, with one error rate for the whole of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# A correct run has a finding by chance in at most one of this many runs, all statements together, however long they are.
RUNS = 100
# Parts of the largest stake that loses no more than there is.
STAKES = torch.tensor([0.8, 0.2, 0.03, 0.005], dtype=torch.float64)

# The logarithm of a wealth counts as no more than this.
LARGEST = 100.0


class Bets:
    """Bets against the statement that the mean of values is at most a bound.

    A bettor stakes a fixed part of his wealth on each value. As long as the mean of each value, given those before it, is at
    most the bound, his wealth is a supermartingale: it passes 1 / alpha times its start at any time with a probability of at
    most alpha (Ville). Each update starts a bettor with each of these stakes, update k with the share 1 / (k (k + 1)) of the
    capital, so that what was right for long is found soon after it breaks. Their wealth is added up.
    """

    def __init__(self, bound: float, statements: int = 1) -> None:
        """Start with nothing won, against a mean of at most `bound`.

        Args:
            bound: of the mean.
            statements: the number of statements about a run that share the error rate of one in RUNS.
        """
        self._bound, self._enough = bound, math.log(RUNS * statements)
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
        lowest_N = torch.as_tensor(lowest, dtype=torch.float64).expand(len(values))
        gains_N = values.double().maximum(lowest_N) - self._bound
        return bool(self.add(torch.log1p(STAKES.unsqueeze(1) / (self._bound - lowest_N) * gains_N).sum(dim=1)))

    def add(self, won: Tensor) -> Tensor:
        """Add what the stakes have won in an update, [..., 4] logarithms -> where the mean is above the bound, [...]."""
        self._updates += 1
        share = -math.log(self._updates * (self._updates + 1) * len(STAKES))
        self._log_wealth = torch.logaddexp(self._log_wealth, torch.tensor(share, dtype=torch.float64)) + won
        return self._log_wealth.logsumexp(-1) > self._enough


def evidence_of_rows(values_BT: Tensor, known_BT: Tensor) -> Tensor:
    """Bet on each row by itself that the mean of its values is at most 1 -> the mean wealth of the bettors, [1].

    Where the statement is true of all rows its own mean is at most 1; one row that is far above makes it large. A row's
    wealth is the mean of the bettors with each of the stakes.

    Args:
        values_BT: [B, T] of at least 0.
        known_BT: [B, T], the values to look at; each row has one.
    """
    won_BT = torch.log1p(STAKES.view(-1, 1, 1) * (values_BT.double() - 1)).masked_fill(~known_BT, 0)
    log_wealth = won_BT.sum(dim=2).flatten()
    return (log_wealth.logsumexp(0) - math.log(len(log_wealth))).clamp(max=LARGEST).exp().view(1)
