"""The critic of PPO: a model of its own, trained beside the policy towards the returns of its step.

Shapes: B rows (completions), S sequence positions, T completion positions, H features.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rlcanary.contract.batch import CollatedBatch, LossOutput
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.records.credit import ValueBatch
from rlcanary.grpo.plan.optimizer import OptimizerSettings
from rlcanary.grpo.plan.schedule import Schedule
from rlcanary.grpo.training.trainer import (
    LearnerState,
    UpdateBatch,
    descend,
    narrowed,
    new_state,
    pieces,
    read_frozen,
    trimmed,
)
from rlcanary.reference import value_loss, values
from rlcanary.reference.step import forward_mode

# Of float32 returns, which are sums over the tokens of a row.
ROUNDING = 1e-5


class ValueModel(torch.nn.Module):
    """A copy of a policy's body with a linear head in float32 that gives each position a value, zero at the start."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.body = copy.deepcopy(policy.base_model)
        self.head = torch.nn.Linear(policy.get_output_embeddings().in_features, 1, device=policy.device)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def forward(self, **inputs: Tensor) -> Any:
        hidden_BSH = self.body(**inputs).last_hidden_state
        return SimpleNamespace(logits=self.head(hidden_BSH.float()))


def new_critic(policy: Any, settings: OptimizerSettings) -> LearnerState:
    """Create the critic of a policy without adapters. All of it is trained."""
    return new_state(ValueModel(policy).eval(), settings)


def frozen_values(model: Any, batch: CollatedBatch, schedule: Schedule) -> Tensor:
    """Compute the [B, T] value before each completion token, without gradient and without dropout."""
    return read_frozen(model, batch, schedule, partial(values, model))


def update_critic(
    critic: Any, batch: CollatedBatch, given: UpdateBatch, conventions: Conventions, schedule: Schedule
) -> dict[str, float]:
    """Take one update of the critic.

    Args:
        critic: its state.
        batch: the rows of the update.
        given: their returns, and their values before the first update of the step.
        conventions: the value_* fields, training_dropout and max_grad_norm are used.
        schedule: rows and widths of a forward pass.

    Returns:
        `value_loss` and its metrics, the `explained_variance` of the returns by the values before the step (NaN where all
        returns are equal), `critic_lr` and `critic_grad_norm`.

    Raises:
        FloatingPointError: the gradient is NaN or infinite.
    """
    assert given.returns is not None
    assert given.old_values is not None
    missing_BT = torch.full_like(given.returns, torch.nan)
    judged = ValueBatch(missing_BT, given.returns, given.mask, given.old_values, given.group_ids)
    output = accumulate_value_gradients(critic, batch, judged, conventions, schedule)
    moved = {f"critic_{name}": value for name, value in descend(critic, conventions).items()}
    explained = _explained(given.returns[given.mask].double(), given.old_values[given.mask].double())
    return {"value_loss": float(output.loss), **output.metrics, "explained_variance": explained, **moved}


def _explained(returns_N: Tensor, values_N: Tensor) -> float:
    """Compute the share of the returns' variance that the values explain; NaN of returns equal but for rounding, or none."""
    if not len(returns_N) or returns_N.max() - returns_N.min() <= ROUNDING * returns_N.abs().max():
        return math.nan
    return 1 - float((returns_N - values_N).var(correction=0) / returns_N.var(correction=0))


def accumulate_value_gradients(
    critic: Any, batch: CollatedBatch, given: ValueBatch, conventions: Conventions, schedule: Schedule
) -> LossOutput:
    """Run the critic's forward and backward passes of an update, as `accumulate_gradients` runs those of the policy."""
    critic.optimizer.zero_grad()
    critic.model.zero_grad()
    by_value = conventions.replace(aggregation=conventions.value_aggregation)
    values_BT = given.values.detach().clone()
    losses = []
    for rows, piece in pieces(given, schedule.micro_batches_per_update, by_value):
        micro = trimmed(batch, rows, schedule)
        width = micro.completion_ids.shape[1]
        with forward_mode(critic.model, training=conventions.training_dropout):
            values_bt = values(critic.model, micro)
        loss = value_loss(replace(narrowed(piece, width), values=values_bt), conventions).loss
        loss.backward()
        critic.masters.collect_gradients()
        losses.append(loss.detach())
        values_BT[rows, :width] = values_bt.detach().to(values_BT.dtype)
    metrics = value_loss(replace(given, values=values_BT), conventions).metrics
    return LossOutput(torch.stack(losses).sum(), metrics)
