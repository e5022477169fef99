"""The records of a run's start: how its state is built, and how items become batches and updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

RateShape = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class LoraSettings:
    """Low-rank adapters: a linear layer W becomes W + alpha / rank × B A, in which B starts at zero and W is frozen.

    Attributes:
        rank: the rows of A and columns of B.
        alpha: the numerator of the scale.
        targets: the last part of the names of the layers that get adapters, such as `q_proj`.
    """

    rank: int
    alpha: float
    targets: Sequence[str]


@dataclass(frozen=True)
class RunSettings:
    """The settings that a run is built from. The default is AdamW on all parameters at a constant learning rate.

    Attributes:
        learning_rate: the rate of all parameters behind the warm-up, the peak of the schedule.
        warmup_updates: steps of the schedule in which the rate rises linearly from zero, or nearly so, to its peak.
        rate_shape: the course of the rate behind the warm-up: constant, linear, or half a period of a cosine.
        total_updates: steps of the schedule of the whole run, the warm-up included: there a falling rate arrives at its
            end.
        final_share: that end, as a share of the peak.
        weight_decay: AdamW's decoupled decay, of the parameters that `Conventions.decayed` names; an update takes the
            share rate × weight_decay off each weight.
        betas: AdamW's.
        eps: AdamW's.
        frozen: a parameter whose name contains one of these is not trained.
        lora: adapters, which are trained alone; None trains the parameters themselves.
        gradient_checkpointing: activations are computed again in the backward pass.
    """

    learning_rate: float = 1e-3
    warmup_updates: int = 0
    rate_shape: RateShape = "constant"
    total_updates: int = 100
    final_share: float = 0.0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    frozen: Sequence[str] = ()
    lora: LoraSettings | None = None
    gradient_checkpointing: bool = False


@dataclass(frozen=True)
class PlanSettings:
    """The settings that decide the batches of a run. `Conventions` have the passes and mini-batches of each.

    Attributes:
        n_items: items of the dataset.
        prompts_per_batch: items of one rollout batch, over all ranks.
        epochs: times that the run goes through its dataset.
        ranks: data-parallel ranks, among which a batch is divided.
        drop_last: what is left of an epoch behind its last whole batch is dropped; else it is a batch of its own, which
            items of this epoch may fill up.
        max_batches: the run ends after so many rollout batches, if its epochs have more; None goes to their end.
    """

    n_items: int
    prompts_per_batch: int
    epochs: int = 1
    ranks: int = 1
    drop_last: bool = True
    max_batches: int | None = None


@dataclass(frozen=True)
class RunPlan:
    """The batches and updates of a run.

    Attributes:
        batches: by rank, the indices of the items of each rollout batch of the run, in order.
        updates: optimizer updates of the run.
        schedule_updates: steps for which its learning-rate schedule is built, `RunSettings.total_updates`.
    """

    batches: Sequence[Sequence[Sequence[int]]]
    updates: int
    schedule_updates: int
