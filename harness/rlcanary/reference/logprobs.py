"""Log-probabilities and entropies of tokens, in float32 whatever the logits are, with little memory.

Definition: log softmax(logits / temperature) at the token's id, in nats. Shapes: B rows, S sequence positions, T completion
positions, V vocabulary entries, D hidden features, N = B × T.
"""

from typing import Any

import torch
from torch import Tensor

from rlcanary.batch import CollatedBatch

# Rows of logits are handled a few at a time, so that the float32 copy stays in the processor's cache: this many bytes.
CHUNK_BYTES = {"cpu": 2**21, "cuda": 2**27}


def token_logprobs(logits_BTV: Tensor, token_ids_BT: Tensor, temperature: float = 1.0) -> Tensor:
    """The logprob of each id under the logits at its own position.

    No second tensor of the logits' size is alive in the forward pass; the backward pass holds one, the gradient itself.

    Args:
        logits_BTV: [B, T, V], any floating dtype. -inf marks an entry that cannot be drawn.
        token_ids_BT: [B, T] ids, aligned with the logits: the shift by one position is the caller's.
        temperature: the sampling temperature, above 0.

    Returns:
        [B, T] float32 (float64 for float64 logits), -inf for an id whose logit is -inf.

    Raises:
        ValueError: shapes do not fit, the temperature is not above 0, or an id is outside the vocabulary.
    """
    _check_ids(logits_BTV, token_ids_BT, temperature)
    logits_NV, ids_N = logits_BTV.reshape(-1, logits_BTV.shape[-1]), token_ids_BT.reshape(-1)
    logprobs_N: Tensor = _Scores.apply(logits_NV, ids_N, temperature, True, False)[0]  # type: ignore[no-untyped-call]
    return logprobs_N.view(token_ids_BT.shape)


def entropy(logits_BTV: Tensor, temperature: float = 1.0) -> Tensor:
    """The entropy of each position's distribution. Entries at -inf contribute nothing.

    Args:
        logits_BTV: [B, T, V], any floating dtype.
        temperature: the sampling temperature, above 0.

    Returns:
        [B, T] in nats, float32 (float64 for float64 logits).
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature!r} has to be above 0")
    shape = logits_BTV.shape[:-1]
    ids_N = torch.zeros(shape.numel(), dtype=torch.long, device=logits_BTV.device)
    logits_NV = logits_BTV.reshape(-1, logits_BTV.shape[-1])
    entropy_N: Tensor = _Scores.apply(logits_NV, ids_N, temperature, False, True)[1]  # type: ignore[no-untyped-call]
    return entropy_N.view(shape)


def completion_logprobs(model: Any, batch: CollatedBatch, temperature: float = 1.0) -> Tensor:
    """Forward pass, shift and gather: the logprob of every completion token given all that precedes it.

    The token at sequence position t is scored by the logits at position t - 1.

    Args:
        model: a causal language model, called with input_ids, attention_mask and position_ids, that returns an object
            with `logits` [B, S, V].
        batch: input_ids [B, S] with the padding on either side.
        temperature: the sampling temperature, above 0.

    Returns:
        [B, T] float32, NaN outside `batch.completion_mask`.

    Raises:
        ValueError: a completion starts at position 0, so that nothing precedes it, or runs past the end of its row;
            or the ids at its place are not the completion's.
    """
    starts_B1 = batch.completion_starts.unsqueeze(1)
    width = batch.completion_ids.shape[1]
    length = batch.input_ids.shape[1]
    mask_BT = batch.completion_mask
    positions_BT = starts_B1 + torch.arange(width, device=starts_B1.device)
    if (starts_B1 < 1).any():
        row = int((starts_B1 < 1).nonzero()[0, 0])
        raise ValueError(f"the completion of row {row} starts at position {int(starts_B1[row])}: no logits precede it")
    if (positions_BT[mask_BT] >= length).any():
        row = int((mask_BT & (positions_BT >= length)).nonzero()[0, 0])
        raise ValueError(f"the completion of row {row} runs past the row's {length} positions")
    positions_BT = positions_BT.clamp(max=length - 1)
    found_BT = batch.input_ids.gather(1, positions_BT)
    if (found_BT != batch.completion_ids)[mask_BT].any():
        row = int(((found_BT != batch.completion_ids) & mask_BT).nonzero()[0, 0])
        raise ValueError(f"row {row} of input_ids does not hold its completion at completion_starts")

    logits_BSV = model(
        input_ids=batch.input_ids, attention_mask=batch.attention_mask.long(), position_ids=batch.position_ids
    ).logits
    rows_B1 = torch.arange(len(starts_B1), device=starts_B1.device).unsqueeze(1)
    logits_BTV = logits_BSV[rows_B1, positions_BT - 1]
    logprobs_BT = token_logprobs(logits_BTV, batch.completion_ids, temperature)
    return logprobs_BT.masked_fill(~mask_BT, torch.nan)


def _check_ids(logits_BTV: Tensor, token_ids_BT: Tensor, temperature: float) -> None:
    if logits_BTV.shape[:-1] != token_ids_BT.shape:
        raise ValueError(
            f"logits of shape {tuple(logits_BTV.shape)} do not score ids of shape {tuple(token_ids_BT.shape)} one to one"
        )
    if not temperature > 0:
        raise ValueError(f"temperature={temperature!r} has to be above 0")
    vocabulary = logits_BTV.shape[-1]
    outside = (token_ids_BT < 0) | (token_ids_BT >= vocabulary)
    if outside.any():
        raise ValueError(f"id {int(token_ids_BT[outside][0])} is outside the vocabulary of {vocabulary}")


class _Scores(torch.autograd.Function):
    """Logprobs and entropies of rows of logits, chunk by chunk in both directions."""

    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, ids_N: Tensor, temperature: float, want_logprobs: bool, want_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.float64 if logits_NV.dtype == torch.float64 else torch.float32
        logprobs_N = logits_NV.new_zeros(len(ids_N), dtype=dtype)
        entropy_N = logits_NV.new_zeros(len(ids_N), dtype=dtype)
        for rows in _chunks(logits_NV):
            log_softmax_nV = _scaled(logits_NV[rows], temperature, dtype).log_softmax(dim=-1)
            if want_logprobs:
                logprobs_N[rows] = log_softmax_nV.gather(1, ids_N[rows].unsqueeze(1)).squeeze(1)
            if want_entropy:
                entropy_N[rows] = _row_entropy(log_softmax_nV)
        ctx.save_for_backward(logits_NV, ids_N, entropy_N)
        ctx.temperature, ctx.want_logprobs, ctx.want_entropy = temperature, want_logprobs, want_entropy
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_logprobs_N: Tensor, grad_entropy_N: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits_NV, ids_N, entropy_N = ctx.saved_tensors
        grad_NV = torch.empty_like(logits_NV)
        for rows in _chunks(logits_NV):
            scaled_nV = _scaled(logits_NV[rows], ctx.temperature, grad_logprobs_N.dtype)
            if ctx.want_entropy:
                log_softmax_nV = scaled_nV.log_softmax(dim=-1)
                softmax_nV = log_softmax_nV.exp()
                # dH/dx_j = -p_j (log p_j + H); the limit at p_j = 0 is 0.
                surprise_nV = log_softmax_nV.masked_fill_(softmax_nV == 0, 0).add_(entropy_N[rows].unsqueeze(1))
                grad_nV = surprise_nV.mul_(softmax_nV).mul_(-grad_entropy_N[rows].unsqueeze(1))
            else:
                softmax_nV = scaled_nV.softmax(dim=-1)
                grad_nV = torch.zeros((), dtype=softmax_nV.dtype, device=softmax_nV.device)
            if ctx.want_logprobs:
                grad_n1 = grad_logprobs_N[rows].unsqueeze(1)
                softmax_nV.mul_(-grad_n1).scatter_add_(1, ids_N[rows].unsqueeze(1), grad_n1)
                grad_nV = softmax_nV.add_(grad_nV) if ctx.want_entropy else softmax_nV
            grad_NV[rows] = grad_nV.div_(ctx.temperature)
        return grad_NV, None, None, None, None


def _chunks(logits_NV: Tensor) -> list[slice]:
    rows, vocabulary = logits_NV.shape
    budget = CHUNK_BYTES.get(logits_NV.device.type, CHUNK_BYTES["cuda"])
    size = max(1, budget // (4 * vocabulary))
    return [slice(start, start + size) for start in range(0, rows, size)]


def _scaled(logits_nV: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    upcast_nV = logits_nV.to(dtype)
    return upcast_nV if temperature == 1 else upcast_nV / temperature


def _row_entropy(log_softmax_nV: Tensor) -> Tensor:
    softmax_nV = log_softmax_nV.exp()
    return -(softmax_nV * log_softmax_nV.masked_fill(softmax_nV == 0, 0)).sum(dim=-1)
