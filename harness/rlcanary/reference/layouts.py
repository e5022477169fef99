"""Rows, updates and vocabularies that are split over ranks, computed by all ranks in turn.

Context parallelism cuts a row in a zigzag, so that every rank has as much causal attention to compute (Llama 3, arXiv
2407.21783, section 3.3.2). A vocabulary is split as in Megatron-LM (1909.08053, section 3).
Shapes: B rows (completions), T completion positions, N positions of a row, W vocabulary entries of a rank.
"""

from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from rlcanary.contract.batch import CollatedBatch, PolicyBatch
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.records.layouts import Layout, RowShard, VocabShards
from rlcanary.reference.logprobs import check_ids
from rlcanary.reference.objective.losses import policy_loss, split
from rlcanary.reference.step import batch_metrics, descend, policy_batch


def whole_row(batch: CollatedBatch, row: int) -> RowShard:
    """Return all positions of a row, without padding: the shard of the only rank."""
    attended_S = batch.attention_mask[row].bool()
    ids_N = batch.input_ids[row][attended_S]
    first, last = _predictors(batch, row)

    def beside_predictors(values_BT: Tensor, elsewhere: float) -> Tensor:
        values_N = values_BT.new_full(ids_N.shape, elsewhere)
        values_N[first:last] = values_BT[row, : last - first]
        return values_N

    return RowShard(
        input_ids=ids_N,
        attention_mask=torch.ones_like(ids_N, dtype=torch.bool),
        position_ids=batch.position_ids[row][attended_S],
        labels=ids_N.roll(-1),
        loss_mask=beside_predictors(batch.completion_mask.bool(), False),
        old_logprobs=None if batch.old_logprobs is None else beside_predictors(batch.old_logprobs, torch.nan),
        ref_logprobs=None if batch.ref_logprobs is None else beside_predictors(batch.ref_logprobs, torch.nan),
    )


def shard_rows(batch: CollatedBatch, n_ranks: int, rank: int) -> list[RowShard]:
    """Cut each row into 2 × `n_ranks` chunks, padded at the row's end, and give rank r the chunks r and 2n - 1 - r."""
    return [_shard(whole_row(batch, row), n_ranks, rank) for row in range(len(batch.rewards))]


def gathered_logprobs(shards: list[list[Tensor]], batch: CollatedBatch, n_ranks: int) -> Tensor:
    """Put logprobs beside the positions of `shard_rows` together -> [B, T], NaN outside `completion_mask`.

    Args:
        shards: by rank and row, [N] as long as the row's shard.
        batch: the rows that were cut.
        n_ranks: ranks of the context-parallel group.
    """
    mask_BT, rows = batch.completion_mask.bool(), []
    for row, of_ranks in enumerate(zip(*shards, strict=True)):
        length = int(batch.attention_mask[row].sum())
        places = torch.cat([_places(length, n_ranks, rank) for rank in range(n_ranks)])
        first, last = _predictors(batch, row)
        row_T = torch.cat(of_ranks)[places.argsort()][first:last]
        rows.append(torch.nn.functional.pad(row_T, (0, mask_BT.shape[1] - len(row_T))))
    return torch.stack(rows).masked_fill(~mask_BT, torch.nan)


def sharded_update(state: Any, batch: CollatedBatch, layout: Layout, conventions: Conventions) -> dict[str, float]:
    """Update the policy on one batch, piece by piece. Every layout gives the update of `train_step`.

    Args:
        state: as for `train_step`.
        batch: the sampled completions; not modified.
        layout: its pieces. Tensor-parallel ranks compute the same loss, which counts once.
        conventions: as for `train_step`.

    Returns:
        The metrics of `train_step`, and `loss`.

    Raises:
        ValueError: there are fewer rows, or groups that have to stay whole, than pieces of rows.
    """
    whole = policy_batch(state.model, state.ref_model, batch, conventions)
    with torch.no_grad():
        metrics = policy_loss(whole, conventions).metrics
    losses = [policy_loss(piece, conventions).loss for piece in pieces(whole, batch, layout, conventions)]
    # Each rank of a context-parallel group has the loss of its whole rows, with the gradient of its own tokens.
    loss = torch.stack(losses).sum()
    return {
        **metrics,
        **descend(state, loss, conventions),
        "loss": float(loss.detach()) / layout.context_parallel,
        **batch_metrics(batch),
    }


def pieces(whole: PolicyBatch, batch: CollatedBatch, layout: Layout, conventions: Conventions) -> Iterator[PolicyBatch]:
    """Yield what each rank trains in each micro-batch: its rows, with the gradient of its own positions.

    The other positions of a row are constants, gathered from their ranks. So the gradients of all pieces add up to that of
    the whole, also where a loss couples the tokens of a row.

    Raises:
        ValueError: as for `split`.
    """
    owners_BT = context_ranks(batch, layout.context_parallel)
    for rank in range(layout.context_parallel):
        own_BT = owners_BT == rank
        logprobs_BT = torch.where(own_BT, whole.logprobs, whole.logprobs.detach())
        seen = replace(whole, logprobs=logprobs_BT)
        if whole.entropy is not None:
            seen.entropy = torch.where(own_BT, whole.entropy, whole.entropy.detach())
        yield from split(seen, layout.data_parallel * layout.micro_batches, conventions)


def context_ranks(batch: CollatedBatch, n_ranks: int) -> Tensor:
    """[B, T] the rank that computes the logprob of each completion token: the one with the position before it."""
    owners_BT = torch.zeros(batch.completion_mask.shape, dtype=torch.long, device=batch.completion_mask.device)
    for row, rank in product(range(len(owners_BT)), range(n_ranks)):
        first, last = _predictors(batch, row)
        places = _places(int(batch.attention_mask[row].sum()), n_ranks, rank)
        owners_BT[row, places[(places >= first) & (places < last)] - first] = rank
    return owners_BT


def vocab_parallel_logprobs(shards: VocabShards, token_ids_BT: Tensor, temperature: float) -> Tensor:
    """Log softmax over the vocabulary of all ranks: each gives its maximum, its sum and the logits of its own ids.

    Args:
        shards: the logits of each rank, any floating dtype.
        token_ids_BT: [B, T].
        temperature: the sampling temperature, above 0.

    Returns:
        [B, T] float32 (float64 for float64 logits), differentiable in the logits.

    Raises:
        ValueError: as for `token_logprobs`.
    """
    check_ids(token_ids_BT, (*token_ids_BT.shape, shards.vocab_size), temperature)
    width = shards.logits[0].shape[-1]
    scaled, chosen = [], []
    for rank, logits_BTW in enumerate(shards.logits):
        entries_W = torch.arange(width, device=logits_BTW.device) + rank * width
        exact_BTW = logits_BTW if logits_BTW.dtype == torch.float64 else logits_BTW.float()
        scaled.append((exact_BTW / temperature).masked_fill(entries_W >= shards.vocab_size, -torch.inf))
        is_own_BTW = token_ids_BT.unsqueeze(-1) == entries_W
        chosen.append(scaled[-1].masked_fill(~is_own_BTW, 0).sum(dim=-1))
    largest_BT = torch.stack([each.detach().amax(dim=-1) for each in scaled]).amax(dim=0)
    sums = [(each - largest_BT.unsqueeze(-1)).exp().sum(dim=-1) for each in scaled]
    return torch.stack(chosen).sum(dim=0) - largest_BT - torch.stack(sums).sum(dim=0).log()


def _predictors(batch: CollatedBatch, row: int) -> tuple[int, int]:
    """The first position of the row that predicts a token of its completion, and the end of these positions."""
    attended_S, start = batch.attention_mask[row].bool(), int(batch.completion_starts[row])
    return int(attended_S[:start].sum()) - 1, int(attended_S.sum()) - 1


def _places(length: int, n_ranks: int, rank: int) -> Tensor:
    """The places in a row of this length that a rank has; those behind the row's end are padding."""
    chunk = -(-length // (2 * n_ranks))
    starts = rank * chunk, (2 * n_ranks - 1 - rank) * chunk
    return torch.cat([torch.arange(start, start + chunk) for start in starts])


def _shard(row: RowShard, n_ranks: int, rank: int) -> RowShard:
    length = len(row.input_ids)
    places = _places(length, n_ranks, rank).to(row.input_ids.device)
    padding = (0, -length % (2 * n_ranks))
    cut = {
        name: torch.nn.functional.pad(value, padding)[places]
        for name, value in ((field.name, getattr(row, field.name)) for field in fields(row))
        if value is not None
    }
    return replace(row, **cut)
