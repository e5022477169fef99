"""Logprobs from hidden states and the head's weight, without holding all logits in memory at once.

The vocabulary is walked in tiles. Forward, each tile of logits is folded into the running log-sum-exp of every token.
Backward, each tile is computed again and turned in place into the gradient of its logits, which gives the tile's rows of the
weight's gradient in one product over all tokens and adds to the hidden states' gradient. That is four matrix products of the
logits' size where autograd, which keeps the logits, has three; in exchange nothing of that size is written to memory. The
first tiles, of a fixed number, are kept from one pass to the other, which brings small problems closer to three.

Shapes: B rows, T positions, N = B × T tokens, D hidden features, V vocabulary entries, v entries of one tile.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlcanary.reference.logprobs import check_ids

# Larger tiles are hardly faster alone, but far less is lost to threads that wait for each other on a busy machine.
TILE_BYTES = 2**26
# A number of tiles and not a share of them, so that the memory does not grow with the vocabulary.
TILES_KEPT = 2


class Scores(NamedTuple):
    """Logprobs and entropies of one pass over the vocabulary: [B, T] in nats, float32 (float64 for float64 inputs)."""

    logprobs: Tensor
    entropy: Tensor


def fused_linear_logprobs(
    hidden_BTD: Tensor, weight_VD: Tensor, ids_BT: Tensor, temperature: float = 1.0, chunk: int | None = None
) -> Tensor:
    """`token_logprobs(hidden @ weight.T, ids, temperature)` without the logits.

    Logits have the dtype of the inputs, as from a model's head, and everything after them is float32: for float32 logits
    of a bfloat16 model, give both inputs in float32. The weight's gradient is summed over tokens inside one product,
    which accumulates in float32, and rounded once to the weight's dtype; the hidden states' is summed over tiles in
    float32. Pass only the trained tokens, `hidden[mask]` and `ids[mask]`: it saves work, and values at padding cannot
    reach the weight's gradient.

    Memory beyond inputs and gradients: a float32 tile [N, chunk], where a gradient is needed two tiles of the inputs' dtype
    that are kept for it, and for half precision one more of these and the hidden states' gradient in float32.

    Args:
        hidden_BTD: [B, T, D] last hidden states, at the positions that predict the ids; any leading dimensions will do.
        weight_VD: [V, D] weight of the head, of the same dtype.
        ids_BT: [B, T].
        temperature: the sampling temperature, above 0.
        chunk: vocabulary entries per tile; None picks tiles of 64 MiB, but not below 256 entries.

    Returns:
        [B, T] float32 (float64 for float64 inputs), differentiable in hidden states and weight, once.

    Raises:
        ValueError: shapes or dtypes do not fit, an id is outside the vocabulary, or temperature or chunk is not above 0.
    """
    return _fused(hidden_BTD, weight_VD, ids_BT, temperature, chunk, want_entropy=False).logprobs


def fused_linear_logprobs_and_entropy(
    hidden_BTD: Tensor, weight_VD: Tensor, ids_BT: Tensor, temperature: float = 1.0, chunk: int | None = None
) -> Scores:
    """`fused_linear_logprobs` and the entropy of each token's distribution from one pass, both differentiable."""
    return _fused(hidden_BTD, weight_VD, ids_BT, temperature, chunk, want_entropy=True)


def _fused(
    hidden: Tensor, weight_VD: Tensor, ids: Tensor, temperature: float, chunk: int | None, want_entropy: bool
) -> Scores:
    if weight_VD.ndim != 2 or hidden.shape[-1:] != weight_VD.shape[-1:] or hidden.dtype != weight_VD.dtype:
        raise ValueError(
            f"hidden states of shape {tuple(hidden.shape)} and {hidden.dtype} do not fit a head of shape "
            f"{tuple(weight_VD.shape)} and {weight_VD.dtype}"
        )
    vocabulary = len(weight_VD)
    check_ids(ids, (*hidden.shape[:-1], vocabulary), temperature)
    if chunk is None:
        chunk = max(256, TILE_BYTES // (4 * max(1, ids.numel())))
    if chunk < 1:
        raise ValueError(f"chunk={chunk!r} has to be at least 1")
    needs_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight_VD.requires_grad)
    scores: tuple[Tensor, Tensor] = _FusedScores.apply(  # type: ignore[no-untyped-call]
        hidden.reshape(ids.numel(), hidden.shape[-1]),
        weight_VD,
        ids.reshape(-1).long(),
        temperature,
        min(chunk, vocabulary),
        TILES_KEPT if needs_gradient else 0,
        want_entropy,
    )
    return Scores(scores[0].view(ids.shape), scores[1].view(ids.shape))


class _FusedScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        ids_N: Tensor,
        temperature: float,
        chunk: int,
        tiles_kept: int,
        want_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        # Running sums are per token, so that float64 costs nothing and rounding does not add up over tiles.
        logit_N = torch.zeros(len(ids_N), dtype=torch.float64, device=ids_N.device)
        mean_logit_N = torch.zeros_like(logit_N)
        normaliser_N = torch.full_like(logit_N, -math.inf)
        kept: list[Tensor] = []
        for tile, logits_Nv, _ in _tiles(hidden_ND, weight_VD, temperature, chunk, kept, tiles_kept):
            column_N1, is_here_N1 = _columns(ids_N, tile)
            logit_N += logits_Nv.gather(1, column_N1).masked_fill_(~is_here_N1, 0).squeeze(1)
            highest_N1 = logits_Nv.amax(dim=1, keepdim=True)
            shifted_Nv = logits_Nv.sub_(highest_N1)
            unnormalised_Nv = shifted_Nv.exp() if want_entropy else shifted_Nv.exp_()
            sum_N = unnormalised_Nv.sum(dim=1)
            tile_normaliser_N = sum_N.double().log() + highest_N1.squeeze(1)
            total_N = torch.logaddexp(normaliser_N, tile_normaliser_N)
            if want_entropy:
                tile_mean_N = unnormalised_Nv.mul_(shifted_Nv).sum(dim=1) / sum_N + highest_N1.squeeze(1)
                mean_logit_N *= (normaliser_N - total_N).exp()
                mean_logit_N += tile_mean_N * (tile_normaliser_N - total_N).exp()
            normaliser_N = total_N
        entropy_N = normaliser_N - mean_logit_N if want_entropy else torch.zeros_like(logit_N)
        ctx.save_for_backward(hidden_ND, weight_VD, ids_N, normaliser_N, entropy_N, *kept)
        ctx.temperature, ctx.chunk, ctx.want_entropy = temperature, chunk, want_entropy
        dtype = _precise(hidden_ND.dtype)
        return (logit_N - normaliser_N).to(dtype), entropy_N.to(dtype)

    @staticmethod
    def backward(ctx: Any, grad_logprobs_N: Tensor, grad_entropy_N: Tensor) -> tuple[Tensor | None, ...]:
        """For scaled logits z: d logprob / dz_j = 1[j is the id] - p_j, d entropy / dz_j = -p_j (log p_j + entropy)."""
        hidden_ND, weight_VD, ids_N, normaliser_N, entropy_N, *kept = ctx.saved_tensors
        dtype = _precise(hidden_ND.dtype)
        grad_logprobs_N1 = (grad_logprobs_N / ctx.temperature).unsqueeze(1)
        grad_entropy_N1 = (grad_entropy_N / ctx.temperature).unsqueeze(1)
        normaliser_N1, entropy_N1 = normaliser_N.to(dtype).unsqueeze(1), entropy_N.to(dtype).unsqueeze(1)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden_ND = torch.zeros(hidden_ND.shape, dtype=dtype, device=hidden_ND.device) if needs_hidden else None
        grad_weight_VD = torch.empty_like(weight_VD) if needs_weight else None
        for tile, logits_Nv, spare_Nv in _tiles(hidden_ND, weight_VD, ctx.temperature, ctx.chunk, kept):
            log_softmax_Nv = logits_Nv.sub_(normaliser_N1)
            if ctx.want_entropy:
                softmax_Nv = log_softmax_Nv.exp()
                pull_Nv = log_softmax_Nv.add_(entropy_N1).mul_(grad_entropy_N1).add_(grad_logprobs_N1)
                grad_Nv = pull_Nv.mul_(softmax_Nv).neg_()
            else:
                grad_Nv = log_softmax_Nv.exp_().mul_(-grad_logprobs_N1)
            column_N1, is_here_N1 = _columns(ids_N, tile)
            grad_Nv.scatter_add_(1, column_N1, grad_logprobs_N1 * is_here_N1)
            grad_Nv = grad_Nv if dtype == hidden_ND.dtype else spare_Nv.copy_(grad_Nv)
            if grad_hidden_ND is not None:
                if dtype == hidden_ND.dtype:
                    grad_hidden_ND.addmm_(grad_Nv, weight_VD[tile])
                else:
                    grad_hidden_ND += grad_Nv @ weight_VD[tile]
            if grad_weight_VD is not None:
                torch.mm(grad_Nv.t(), hidden_ND, out=grad_weight_VD[tile])
        grad_hidden_ND = None if grad_hidden_ND is None else grad_hidden_ND.to(hidden_ND.dtype)
        return grad_hidden_ND, grad_weight_VD, None, None, None, None, None


def _tiles(
    hidden_ND: Tensor, weight_VD: Tensor, temperature: float, chunk: int, kept: list[Tensor], tiles_kept: int = 0
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield each tile of the vocabulary: its entries, its scaled logits [N, v], and a buffer of the inputs' dtype.

    The caller may overwrite both: they are reused for every tile. They are the same tensor unless the inputs are in
    half precision. `kept` has the products of the first tiles, and is first filled up to `tiles_kept`.
    """
    tokens, vocabulary, dtype = len(hidden_ND), len(weight_VD), _precise(hidden_ND.dtype)
    products = torch.empty(tokens * chunk, dtype=hidden_ND.dtype, device=hidden_ND.device)
    logits = products if dtype == products.dtype else torch.empty_like(products, dtype=dtype)
    for index, start in enumerate(range(0, vocabulary, chunk)):
        tile = slice(start, min(start + chunk, vocabulary))
        shape = tokens, tile.stop - start
        products_Nv, logits_Nv = (buffer[: math.prod(shape)].view(shape) for buffer in (products, logits))
        if index == len(kept) < tiles_kept:
            kept.append(torch.mm(hidden_ND, weight_VD[tile].t()))
        if index < len(kept):
            logits_Nv.copy_(kept[index])
        else:
            torch.mm(hidden_ND, weight_VD[tile].t(), out=products_Nv)
            if logits is not products:
                logits_Nv.copy_(products_Nv)
        yield tile, logits_Nv if temperature == 1 else logits_Nv.div_(temperature), products_Nv


def _columns(ids_N: Tensor, tile: slice) -> tuple[Tensor, Tensor]:
    """Column of each id in the tile and whether it is there, [N, 1] each. An absent id gets an arbitrary column."""
    column_N1 = ids_N.unsqueeze(1) - tile.start
    is_here_N1 = (ids_N.unsqueeze(1) >= tile.start) & (ids_N.unsqueeze(1) < tile.stop)
    return column_N1.clamp(0, tile.stop - tile.start - 1), is_here_N1


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
