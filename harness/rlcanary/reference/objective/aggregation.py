"""The reduction of token values to one number, of a whole update or as the share of a part.

Definitions: GRPO (arXiv 2402.03300, eq. 3), DAPO (2503.14476, eq. 8), Dr. GRPO (2503.20783).
Shapes: B rows (completions), T completion positions.
"""

import torch
from torch import Tensor

from rlcanary.contract.batch import PolicyBatch
from rlcanary.contract.conventions import Conventions, TokenAggregation
from rlcanary.contract.declining import NotProvided
from rlcanary.contract.records.credit import ValueBatch
from rlcanary.reference.objective.pieces import own_function


def aggregate(values_BT: Tensor, batch: PolicyBatch | ValueBatch, conventions: Conventions) -> Tensor:
    """Reduce token values to one number as `conventions.aggregation` says.

    GRPO (2402.03300, eq. 3) averages sequence means, DAPO (2503.14476, eq. 8) tokens, Dr. GRPO (2503.20783) divides by a
    constant. Codebases differ in whether rows without a trained token count.

    Args:
        values_BT: [B, T].
        batch: its mask, group_ids and global counts are used. With global counts the result is this batch's share of the
            whole update's loss, so that the shares of all its pieces add up to it.
        conventions: aggregation and aggregation_constant are used.

    Returns:
        Scalar; zero where nothing is trained.

    Raises:
        NotProvided: the aggregation is "custom", or a function and the batch has global counts, which it does not take.
    """
    mask_BT = batch.mask.bool()
    values_BT = values_BT.masked_fill(~mask_BT, 0)
    if reduction := own_function(conventions.aggregation, "aggregation"):
        if batch.global_tokens is not None or batch.global_sequences is not None:
            raise NotProvided("an aggregation of one's own is that of a whole update, not of its parts")
        return reduction(values_BT, mask_BT)  # type: ignore[no-any-return]
    sequences = batch.global_sequences
    if sequences is None:
        sequences = count_sequences(batch, conventions)
    sequences = max(float(sequences), 1.0)
    match conventions.aggregation:
        case "token_mean" | "sequence_mean" | "sequence_mean_nonempty" as aggregation:
            return aggregate_tokens(values_BT, mask_BT, aggregation, batch.global_tokens, sequences)
        case "sequence_sum" | "sequence_sum_nonempty":
            return values_BT.sum() / sequences
        case "constant":
            return values_BT.sum() / (sequences * conventions.aggregation_constant)
        case "group_token_mean":
            group_of_row_B, groups = group_index(batch)
            sums_G = values_BT.new_zeros(groups).index_add(0, group_of_row_B, values_BT.sum(dim=1))
            tokens_B = mask_BT.sum(dim=1)
            tokens_G = tokens_B.new_zeros(groups).index_add(0, group_of_row_B, tokens_B)
            return (sums_G / tokens_G.clamp(min=1)).sum() / sequences
        case other:
            raise AssertionError(other)


def aggregate_tokens(
    values_BT: Tensor,
    mask_BT: Tensor,
    aggregation: TokenAggregation,
    global_tokens: float | None = None,
    global_sequences: float | None = None,
) -> Tensor:
    """Reduce token values to one number; with global counts to this batch's share of the whole update's.

    Args:
        values_BT: [B, T], zero outside the mask.
        mask_BT: [B, T] bool.
        aggregation: the kind of mean, or the sum.
        global_tokens: trained tokens of the whole update; None counts those of the mask.
        global_sequences: rows of the whole update, as `counted_sequences` counts them; None counts those of the mask.

    Returns:
        Scalar; zero where nothing is trained.
    """
    tokens_B = mask_BT.sum(dim=1)
    match aggregation:
        case "token_mean":
            return values_BT.sum() / max(float(tokens_B.sum()) if global_tokens is None else global_tokens, 1.0)
        case "sequence_mean" | "sequence_mean_nonempty":
            rows = counted_sequences(mask_BT, aggregation) if global_sequences is None else global_sequences
            return (values_BT.sum(dim=1) / tokens_B.clamp(min=1)).sum() / max(rows, 1.0)
        case "token_sum":
            return values_BT.sum()


def counted_sequences(mask_BT: Tensor, aggregation: TokenAggregation) -> float:
    """Count the rows that a mean over sequences divides by: all of them, or those with a trained token."""
    return float(mask_BT.any(dim=1).sum()) if aggregation == "sequence_mean_nonempty" else float(len(mask_BT))


def count_sequences(batch: PolicyBatch | ValueBatch, conventions: Conventions) -> float:
    """Count the rows that the aggregation divides by: all, those with a trained token, or the groups.

    The sum of this over all ranks and micro-batches is the `global_sequences` of each of them.
    """
    match conventions.aggregation:
        case "sequence_mean_nonempty" | "sequence_sum_nonempty":
            return float(batch.mask.bool().any(dim=1).sum())
        case "group_token_mean":
            return float(group_index(batch)[1])
        case _:
            return float(len(batch.mask))


def group_index(batch: PolicyBatch | ValueBatch) -> tuple[Tensor, int]:
    """[B] long: 0, 1, … in the order of the group ids; and how many groups there are."""
    group_ids_B = required(batch.group_ids, "group_ids", "aggregation 'group_token_mean'")
    unique_ids, index_B = torch.unique(group_ids_B, return_inverse=True)
    return index_B, len(unique_ids)


def required(values: Tensor | None, name: str, asked_by: str) -> Tensor:
    if values is None:
        raise ValueError(f"{asked_by} needs the batch to have {name}")
    return values
