"""The settings of a run's optimizer."""

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
        if not self.learning_rate > 0 or self.warmup_updates < 0 or self.weight_decay < 0:
            raise ValueError(
                f"learning_rate is {self.learning_rate} (above 0), warmup_updates {self.warmup_updates} and weight_decay "
                f"{self.weight_decay} (at least 0)"
            )
