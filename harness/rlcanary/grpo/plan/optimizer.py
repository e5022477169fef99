"""The settings of a run's optimizer."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW and its learning rate.

    Attributes:
        learning_rate: learning rate after the warm-up.
        warmup_updates: updates over which it rises from near zero.
        weight_decay: weight decay of AdamW.
        betas: betas of AdamW.
    """

    learning_rate: float = 1e-3
    warmup_updates: int = 0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate is {self.learning_rate}, it has to be above 0 and finite")
        if self.warmup_updates < 0 or not 0 <= self.weight_decay < math.inf:
            raise ValueError(
                f"warmup_updates is {self.warmup_updates} and weight_decay {self.weight_decay}, they have to be 0 or more, "
                "and finite"
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas are {list(self.betas)}, they have to be in [0, 1)")
