"""Log-probabilities and entropies of tokens, in float32 for logits of any dtype, with little memory.

Definition: log softmax(logits / temperature) at the token's id, in nats. Shapes: B rows, S sequence positions, T completion
positions, V vocabulary entries, N tokens of a packed sequence; lower-case letters are a block of the dimension.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from rlcanary.contract.batch import CollatedBatch
from rlcanary.contract.layers import layers_besides_attention


def token_logprobs(logits_BTV: Tensor, token_ids_BT: Tensor, temperature: float = 1.0) -> Tensor:
    """Compute the logprob of each id under the logits at its own position.

    The forward pass allocates no second tensor of the logits' size, for any strides; the backward pass allocates one,
    the gradient itself. A token whose upstream gradient is zero adds exactly zero to it, even with NaN logits.

    Args:
        logits_BTV: [B, T, V], any floating dtype; any number of leading dimensions will do. -inf marks an entry that
            cannot be drawn.
        token_ids_BT: [B, T] ids, aligned with the logits: the shift by one position is the caller's.
        temperature: the sampling temperature, above 0.

    Returns:
        [B, T] float32 (float64 for float64 logits), -inf for an id whose logit is -inf.

    Raises:
        ValueError: shapes do not fit, the ids are no integers or outside the vocabulary, or the temperature is not a
            finite number above 0.
    """
    check_ids(token_ids_BT, logits_BTV.shape, temperature)
    return _score(logits_BTV, token_ids_BT, temperature, want_entropy=False)[0]


def entropy(logits_BTV: Tensor, temperature: float = 1.0) -> Tensor:
    """The entropy of each position's distribution, -Σ p log p. Entries at -inf contribute nothing.

    Args:
        logits_BTV: [B, T, V], any floating dtype; any number of leading dimensions will do.
        temperature: the sampling temperature, above 0.

    Returns:
        [B, T] in nats, float32 (float64 for float64 logits), differentiable in the logits.

    Raises:
        ValueError: the temperature is not a finite number above 0.
    """
    ids_BT = torch.zeros(logits_BTV.shape[:-1], dtype=torch.long, device=logits_BTV.device)
    check_ids(ids_BT, logits_BTV.shape, temperature)
    return _score(logits_BTV, ids_BT, temperature, want_entropy=True)[1]


def completion_logprobs(model: Any, batch: CollatedBatch, temperature: float = 1.0) -> Tensor:
    """Forward pass, shift and gather: the logprob of every completion token given all that precedes it.

    The token at sequence position t is scored by the logits at position t - 1. Only these logits are read, in place.

    Args:
        model: a causal language model, called with input_ids, attention_mask and position_ids, that returns an object
            with `logits` [B, S, V].
        batch: input_ids [B, S] with the padding on either side.
        temperature: the sampling temperature, above 0.

    Returns:
        [B, T] float32, NaN outside `batch.completion_mask`.

    Raises:
        ValueError: a completion starts at position 0, so that nothing precedes it, or runs past the end of its row;
            or the ids at its place are not the completion's, or the attention mask leaves some of them out.
    """
    return _completion_scores(model, batch, temperature, want_entropy=False)[0]


def completion_scores(model: Any, batch: CollatedBatch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """`completion_logprobs`, and the entropy of the distribution that scored each of these tokens.

    Returns:
        [B, T] and [B, T] float32, NaN outside `batch.completion_mask`.
    """
    return _completion_scores(model, batch, temperature, want_entropy=True)


class Unpackable(ValueError):
    """A model on which rows cannot share a sequence."""


def packed_logprobs(model: Any, batch: CollatedBatch, temperature: float = 1.0) -> Tensor:
    """`completion_logprobs` with all rows in one sequence without padding, each row attending to itself only.

    Args:
        model: a causal language model whose layers mix positions by attention alone. It takes a [1, 1, N, N] attention mask
            of its dtype, added to the attention scores; one with a sliding window tells rows apart by their position ids.
        batch: as for `completion_logprobs`.
        temperature: the sampling temperature, above 0.

    Returns:
        [B, T] float32, NaN outside `batch.completion_mask`.

    Raises:
        Unpackable: a layer of the model mixes positions otherwise, such as a convolution, which no mask keeps in its row.
    """
    if others := layers_besides_attention(model):
        raise Unpackable(f"layers of the type {min(others)!r} reach from one packed row into the next")
    kept_BS = batch.attention_mask
    row_BS = torch.arange(len(kept_BS), device=kept_BS.device).unsqueeze(1).expand_as(kept_BS)
    row_N, ids_N = row_BS[kept_BS], batch.input_ids[kept_BS]
    count = len(ids_N)
    visible_NN = (row_N.unsqueeze(0) == row_N.unsqueeze(1)).tril()
    # In the model's precision: torch 2.13 silently misreads a float32 mask of a float64 model on processors without AVX-512.
    dtype = next(model.parameters()).dtype
    bias_11NN = torch.zeros(1, 1, count, count, dtype=dtype, device=kept_BS.device)
    bias_11NN.masked_fill_(~visible_NN, torch.finfo(dtype).min)
    config = getattr(model, "config", None)
    several = len(set(getattr(config, "layer_types", None) or ())) > 1
    is_windowed = getattr(config, "sliding_window", None) is not None or several
    # A mask that is given replaces the window, which transformers adds to one that it makes from positions that start anew.
    options = {"attention_mask": None, "use_cache": False} if is_windowed else {"attention_mask": bias_11NN}
    logits_NV = model(
        input_ids=ids_N.unsqueeze(0), position_ids=batch.position_ids[kept_BS].unsqueeze(0), **options
    ).logits[0]
    # Position of each completion token in the packed sequence.
    packed_BS = (kept_BS.reshape(-1).long().cumsum(dim=0) - 1).view(kept_BS.shape)
    offsets_T = torch.arange(batch.completion_ids.shape[1], device=kept_BS.device)
    positions_BT = (batch.completion_starts.unsqueeze(1) + offsets_T).clamp(max=kept_BS.shape[1] - 1)
    before_BT = (packed_BS.gather(1, positions_BT) - 1).clamp(min=0)
    # The padding id need not be in the vocabulary.
    ids_BT = batch.completion_ids.masked_fill(~batch.completion_mask, 0)
    logprobs_BT = token_logprobs(logits_NV[before_BT], ids_BT, temperature)
    return logprobs_BT.masked_fill(~batch.completion_mask, torch.nan)


def _completion_scores(
    model: Any, batch: CollatedBatch, temperature: float, want_entropy: bool
) -> tuple[Tensor, Tensor]:
    mask_BT = batch.completion_mask
    _check_places(batch)
    logits_BSV = model(
        input_ids=batch.input_ids, attention_mask=batch.attention_mask.long(), position_ids=batch.position_ids
    ).logits
    ids_BT = batch.completion_ids.masked_fill(~mask_BT, 0)
    check_ids(ids_BT, (*ids_BT.shape, logits_BSV.shape[-1]), temperature)
    starts = [start - 1 for start in batch.completion_starts.tolist()]
    # Up to each row's last token in the mask; the leading 0 is for a row, or a batch, without any.
    places_BT = torch.arange(1, mask_BT.shape[1] + 1, device=mask_BT.device) * mask_BT
    lengths = torch.nn.functional.pad(places_BT, (1, 0)).amax(dim=1).tolist()
    scores = _Scores.apply(logits_BSV, ids_BT, starts, lengths, temperature, want_entropy)  # type: ignore[no-untyped-call]
    return scores[0].masked_fill(~mask_BT, torch.nan), scores[1].masked_fill(~mask_BT, torch.nan)


def check_ids(token_ids: Tensor, logits_shape: Sequence[int], temperature: float) -> None:
    """Check that logits of this shape can score these ids at this temperature.

    Raises:
        ValueError: they cannot.
    """
    if tuple(logits_shape[:-1]) != tuple(token_ids.shape) or not token_ids.shape:
        raise ValueError(
            f"logits of shape {tuple(logits_shape)} do not score ids of shape {tuple(token_ids.shape)} one to one"
        )
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature={temperature!r} has to be a finite number above 0")
    if token_ids.is_floating_point() or token_ids.is_complex() or token_ids.dtype == torch.bool:
        raise ValueError(f"ids of {token_ids.dtype} are no token ids")
    vocabulary = logits_shape[-1]
    outside = (token_ids < 0) | (token_ids >= vocabulary)
    if outside.any():
        raise ValueError(f"id {int(token_ids[outside][0])} is outside the vocabulary of {vocabulary}")


def _check_places(batch: CollatedBatch) -> None:
    """Check that each completion starts at `completion_starts`, is attended to, and follows at least one token."""
    length = batch.input_ids.shape[1]
    starts_B1, mask_BT = batch.completion_starts.unsqueeze(1), batch.completion_mask
    positions_BT = starts_B1 + torch.arange(mask_BT.shape[1], device=starts_B1.device)
    too_early_BT = (starts_B1 < 1).expand_as(mask_BT)
    _refuse(too_early_BT & mask_BT, "the completion of row {row} starts at position 0 or before: no logits precede it")
    _refuse((positions_BT >= length) & mask_BT, f"the completion of row {{row}} runs past the row's {length} positions")
    positions_BT = positions_BT.clamp(0, length - 1)
    found_BT = batch.input_ids.gather(1, positions_BT)
    _refuse(
        (found_BT != batch.completion_ids) & mask_BT, "row {row} of input_ids does not hold its completion at its start"
    )
    attended_BT = batch.attention_mask.bool().gather(1, positions_BT)
    _refuse(~attended_BT & mask_BT, "the attention mask of row {row} leaves out tokens of its completion")


def _refuse(wrong_BT: Tensor, message: str) -> None:
    if wrong_BT.any():
        raise ValueError(message.format(row=int(wrong_BT.nonzero()[0, 0])))


def _score(logits: Tensor, ids: Tensor, temperature: float, want_entropy: bool) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies (zeros if not wanted) of aligned logits [..., V] and ids [...]."""
    width, vocabulary = logits.shape[-2:] if logits.ndim > 1 else (1, logits.shape[-1])
    rows = math.prod(logits.shape[:-2])
    scores = _Scores.apply(  # type: ignore[no-untyped-call]
        logits.reshape(rows, width, vocabulary),
        ids.reshape(rows, width),
        [0] * rows,
        [width] * rows,
        temperature,
        want_entropy,
    )
    return scores[0].view(ids.shape), scores[1].view(ids.shape)


class _Scores(torch.autograd.Function):
    """Logprobs and entropies of the ids of each row, read from its logits from a start on, a block at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_BSV: Tensor,
        ids_BT: Tensor,
        starts: list[int],
        lengths: list[int],
        temperature: float,
        want_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.float64 if logits_BSV.dtype == torch.float64 else torch.float32
        logprobs_BT = torch.zeros(ids_BT.shape, dtype=dtype, device=logits_BSV.device)
        entropy_BT = torch.zeros_like(logprobs_BT)
        tokens = _tokens_per_block(logits_BSV, lengths)
        blocks = list(_blocks(starts, lengths, tokens))
        rooms = _rooms(logits_BSV, tokens, dtype)
        for rows, read, write in blocks:
            scaled_btV, other_btV = _scaled(logits_BSV[rows, read], temperature, rooms)
            log_softmax_btV = torch.log_softmax(scaled_btV, dim=-1, out=other_btV)
            ids_bt1 = ids_BT[rows, write].long().unsqueeze(-1)
            logprobs_BT[rows, write] = log_softmax_btV.gather(-1, ids_bt1).squeeze(-1)
            if want_entropy:
                softmax_btV = log_softmax_btV.exp()
                # The probabilities add up to 1 but for a rounding that the entropy would multiply by itself.
                total_bt = softmax_btV.sum(dim=-1)
                # The limit of p log p at p = 0 is 0.
                log_softmax_btV.masked_fill_(softmax_btV == 0, 0)
                entropy_BT[rows, write] = -softmax_btV.mul_(log_softmax_btV).sum(dim=-1) / total_bt
        ctx.save_for_backward(logits_BSV, ids_BT, entropy_BT)
        ctx.blocks, ctx.tokens, ctx.temperature, ctx.want_entropy = blocks, tokens, temperature, want_entropy
        return logprobs_BT, entropy_BT

    @staticmethod
    def backward(ctx: Any, grad_logprobs_BT: Tensor, grad_entropy_BT: Tensor) -> tuple[Tensor | None, ...]:
        """Gradient of the logits from those of logprobs and entropies.

        d logprob / d logit_j = 1[j is the id] - p_j and d entropy / d logit_j = -p_j (log p_j + entropy), over temperature.
        """
        logits_BSV, ids_BT, entropy_BT = ctx.saved_tensors
        grad_BSV = torch.zeros(logits_BSV.shape, dtype=logits_BSV.dtype, device=logits_BSV.device)
        grad_logprobs_BT, grad_entropy_BT = grad_logprobs_BT / ctx.temperature, grad_entropy_BT / ctx.temperature
        rooms = _rooms(logits_BSV, ctx.tokens, grad_logprobs_BT.dtype)
        for rows, read, write in ctx.blocks:
            scaled_btV, other_btV = _scaled(logits_BSV[rows, read], ctx.temperature, rooms)
            grad_logprob_bt1 = grad_logprobs_BT[rows, write].unsqueeze(-1)
            is_unused_bt1 = grad_logprob_bt1 == 0
            if ctx.want_entropy:
                grad_entropy_bt1 = grad_entropy_BT[rows, write].unsqueeze(-1)
                is_unused_bt1 = is_unused_bt1 & (grad_entropy_bt1 == 0)
                log_softmax_btV = torch.log_softmax(scaled_btV, dim=-1, out=other_btV)
                softmax_btV = log_softmax_btV.exp()
                log_softmax_btV.masked_fill_(softmax_btV == 0, 0)
                pull_btV = log_softmax_btV.add_(entropy_BT[rows, write].unsqueeze(-1)).mul_(grad_entropy_bt1)
                grad_btV = softmax_btV.mul_(pull_btV.add_(grad_logprob_bt1)).neg_()
            else:
                grad_btV = torch.softmax(scaled_btV, dim=-1, out=other_btV).mul_(-grad_logprob_bt1)
            grad_btV.scatter_add_(-1, ids_BT[rows, write].long().unsqueeze(-1), grad_logprob_bt1)
            grad_BSV[rows, read] = grad_btV.masked_fill_(is_unused_bt1, 0)
        return grad_BSV, None, None, None, None, None


def _tokens_per_block(logits_BSV: Tensor, lengths: list[int]) -> int:
    """Tokens per block: enough to keep threads or a GPU busy, at most an eighth of all."""
    block_bytes = 2**24 if logits_BSV.device.type == "cpu" else 2**26
    return max(1, min(block_bytes // (4 * logits_BSV.shape[-1]), sum(lengths) // 8))


def _rooms(logits_BSV: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    """Two buffers that every block reuses: allocating memory costs more than the computation in it."""
    return torch.empty(2, tokens * logits_BSV.shape[-1], dtype=dtype, device=logits_BSV.device)


def _scaled(logits_btV: Tensor, temperature: float, rooms: Tensor) -> tuple[Tensor, Tensor]:
    """Scale logits by the temperature in the buffers' dtype (unchanged if that is a no-op); also return a free buffer."""
    first_btV, second_btV = rooms[:, : logits_btV.numel()].view(2, *logits_btV.shape)
    if logits_btV.dtype == rooms.dtype and temperature == 1 and logits_btV.is_contiguous():
        return logits_btV, second_btV
    first_btV.copy_(logits_btV)
    return first_btV if temperature == 1 else first_btV.div_(temperature), second_btV


def _blocks(starts: list[int], lengths: list[int], tokens: int) -> Iterator[tuple[slice, slice, slice]]:
    """Cut the tokens of all rows into blocks: (rows, their positions in the logits, their positions in the ids).

    A block is a slice, so that it is a view of the logits. It holds one row's tokens, or several rows that start and end
    alike.
    """
    row = 0
    for (start, length), alike in groupby(zip(starts, lengths, strict=True)):
        end = row + len(list(alike))
        rows_per_block = max(1, tokens // max(1, length))
        for first in range(row, end, rows_per_block):
            for begin in range(0, length, tokens):
                stop = min(begin + tokens, length)
                rows = slice(first, min(first + rows_per_block, end))
                yield rows, slice(start + begin, start + stop), slice(begin, stop)
        row = end
