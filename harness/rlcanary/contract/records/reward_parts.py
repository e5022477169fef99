"""The record of the parts that a reward is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlcanary.contract.batch import Batch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class RewardParts(Batch):
    """The reward of each completion by each reward function: the task's, those that shape, and penalties.

    Attributes:
        values: [B, K] what the K functions gave, in the order of `weights`; NaN where a function gave nothing.
        weights: the weight of each function; that of a penalty may be negative.
        names: the name of each function, such as "task", "format" and "length".
    """

    values: Tensor
    weights: Sequence[float]
    names: Sequence[str] = field(default_factory=list)
