"""Losses other than the policy's in pieces, as micro-batches and data-parallel ranks take them."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from rlcanary.contract.batch import LossOutput
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.records.credit import ValueBatch
from rlcanary.contract.records.other_losses import DistillationBatch, OtherBatch, PreferenceBatch, SupervisedBatch
from rlcanary.reference.objective.aggregation import counted_sequences
from rlcanary.reference.objective.critic import value_loss
from rlcanary.reference.objective.distillation import distillation_loss
from rlcanary.reference.objective.losses import split
from rlcanary.reference.objective.preference import preference_loss
from rlcanary.reference.objective.supervised import supervised_loss


def other_loss(batch: OtherBatch, conventions: Conventions) -> LossOutput:
    """The loss that is trained on this kind of batch: supervised, distillation, preference or a critic's."""
    match batch:
        case SupervisedBatch():
            return supervised_loss(batch, conventions)
        case DistillationBatch():
            return distillation_loss(batch, conventions)
        case PreferenceBatch():
            return preference_loss(batch, conventions)
        case ValueBatch():
            return value_loss(batch, conventions)


def accumulated_other_loss(batch: OtherBatch, n_micro: int, conventions: Conventions) -> LossOutput:
    """The same update in micro-batches: value and gradient are those of `other_loss` on the whole batch.

    Args:
        batch: the whole update.
        n_micro: number of pieces, of equally many rows but for one, and of any token counts.
        conventions: as for the loss of this kind of batch.

    Returns:
        The sum of the pieces' losses, whose backward pass runs all of theirs, and the metrics of the whole.

    Raises:
        ValueError: fewer than one piece, or more pieces than rows.
    """
    losses = [other_loss(piece, conventions).loss for piece in other_pieces(batch, n_micro, conventions)]
    with torch.no_grad():
        metrics = other_loss(batch, conventions).metrics
    return LossOutput(torch.stack(losses).sum(), metrics)


def other_pieces(batch: OtherBatch, n_pieces: int, conventions: Conventions) -> list[Any]:
    """Cut the rows in order and as evenly as possible; each piece is told the counts of the whole update.

    A critic's groups stay whole where its aggregation needs them.

    Raises:
        ValueError: fewer than one piece, or more pieces than rows (groups).
    """
    if isinstance(batch, ValueBatch):
        return split(batch, n_pieces, conventions.replace(aggregation=conventions.value_aggregation))
    rows = len(batch.chosen_mask if isinstance(batch, PreferenceBatch) else batch.mask)
    if not 1 <= n_pieces <= rows:
        raise ValueError(f"cannot cut {rows} rows into {n_pieces} pieces")
    counts: dict[str, Any] = _counts(batch, conventions)
    whole = replace(batch, **counts)
    bounds = [piece * rows // n_pieces for piece in range(n_pieces + 1)]
    return [whole.rows(torch.arange(start, end)) for start, end in pairwise(bounds)]


def _counts(batch: SupervisedBatch | DistillationBatch | PreferenceBatch, conventions: Conventions) -> dict[str, float]:
    """The counts of the whole update, as its pieces are told them."""
    if isinstance(batch, PreferenceBatch):
        counts = {"global_pairs": float(len(batch.chosen_mask)), "global_tokens": float(batch.chosen_mask.sum())}
    elif isinstance(batch, SupervisedBatch):
        # Nothing predicts the first token of a row.
        trained_BT = batch.mask.bool()[:, 1:]
        rows = counted_sequences(trained_BT, conventions.supervised_aggregation)
        counts = {"global_tokens": float(trained_BT.sum()), "global_sequences": rows}
    else:
        rows = counted_sequences(batch.mask.bool(), conventions.distillation_aggregation)
        counts = {"global_tokens": float(batch.mask.sum()), "global_sequences": rows}
    return {name: count for name, count in counts.items() if getattr(batch, name) is None}
