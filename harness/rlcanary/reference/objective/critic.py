"""The critic: its values before each token, and its loss.

Definitions: PPO (arXiv 1707.06347, eq. 9, the squared error), and the clipped error as in OpenAI's baselines, TRL and verl.
Shapes: B rows (completions), S sequence positions, T completion positions.
"""

from typing import Any

import torch
from torch import Tensor

from rlcanary.contract.batch import CollatedBatch, LossOutput
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.records.credit import ValueBatch
from rlcanary.reference.masks import masked
from rlcanary.reference.objective.aggregation import aggregate


def values(model: Any, batch: CollatedBatch) -> Tensor:
    """Read the value of the state that each completion token was drawn from, one position before the token's own.

    Args:
        model: called with input_ids, attention_mask and position_ids, returns an object with `logits` [B, S, 1].
        batch: the completions, which start at position 1 or later.

    Returns:
        [B, T] in the model's dtype, differentiable, zero outside `batch.completion_mask`.
    """
    values_BS = model(
        input_ids=batch.input_ids, attention_mask=batch.attention_mask.long(), position_ids=batch.position_ids
    ).logits.squeeze(-1)
    offsets_T = torch.arange(batch.completion_mask.shape[1], device=values_BS.device)
    before_BT = (batch.completion_starts.unsqueeze(1) - 1 + offsets_T).clamp(max=values_BS.shape[1] - 1)
    found_BT: Tensor = values_BS.gather(1, before_BT)
    return found_BT.masked_fill(~batch.completion_mask, 0)


def value_loss(batch: ValueBatch, conventions: Conventions) -> LossOutput:
    """Compute the critic's loss: the squared error to the returns, of which clipping keeps the larger.

    Args:
        batch: values [B, T] carry the gradient; everything else is taken as constant.
        conventions: the value_* fields and aggregation_constant are used.

    Returns:
        A scalar loss, zero without a trained token, and with clipping the `value_clip_fraction`: the share of trained tokens
        whose clipped error is the larger, which have no gradient. It is NaN without a trained token.

    Raises:
        ValueError: shapes differ, a number at a trained token is NaN, or the conventions ask for old values or group ids
            that the batch does not have.
    """
    mask_BT, metrics = batch.mask.bool(), {}
    values_BT = masked(batch.values, mask_BT, "values")
    returns_BT = masked(batch.returns.detach(), mask_BT, "returns")
    error_BT = (values_BT - returns_BT).square()
    if conventions.value_clip is not None:
        if batch.old_values is None:
            raise ValueError("value_clip needs the batch to have old_values")
        old_BT = masked(batch.old_values.detach(), mask_BT, "old_values")
        held_BT = values_BT.clamp(old_BT - conventions.value_clip, old_BT + conventions.value_clip)
        held_error_BT = (held_BT - returns_BT).square()
        metrics["value_clip_fraction"] = float((held_error_BT > error_BT)[mask_BT].double().mean())
        error_BT = torch.maximum(error_BT, held_error_BT)
    aggregation = conventions.replace(aggregation=conventions.value_aggregation)
    return LossOutput(conventions.value_coef * aggregate(error_BT, batch, aggregation), metrics)
