"""Cross entropy of labels, as in supervised fine-tuning (SFT), and the reduction of token losses that other losses share.

Shapes: B rows, S sequence positions, T positions with a loss, V vocabulary entries, N trained tokens.

Positions that are not trained never enter: no content of theirs, NaN and infinities included, changes a value or a gradient.
"""

import torch
from torch import Tensor

from rlcanary.contract.batch import LossOutput
from rlcanary.contract.conventions import Conventions, TokenAggregation
from rlcanary.contract.records.other_losses import SupervisedBatch


def supervised_loss(batch: SupervisedBatch, conventions: Conventions) -> LossOutput:
    """Cross entropy of each trained token under the logits at the position before it.

    With a label smoothing of e, the target is (1 - e) on the label plus e / V on every id of the vocabulary (Szegedy et al.,
    arXiv 1512.00567, section 7).

    Args:
        batch: the logits carry the gradient.
        conventions: supervised_aggregation and supervised_label_smoothing are used.

    Returns:
        A scalar loss and its metrics. A batch without a trained token has loss zero; the metrics that average over tokens
        are then NaN.
    """
    mask_BT = batch.mask.bool()[:, 1:]
    logits_NV, ids_N = batch.logits[:, :-1][mask_BT], batch.token_ids[:, 1:][mask_BT]
    logprobs_NV = log_softmax(logits_NV)
    nll_N = -logprobs_NV.gather(1, ids_N.unsqueeze(1)).squeeze(1)
    smoothing = conventions.supervised_label_smoothing
    loss_BT = spread((1 - smoothing) * nll_N - smoothing * logprobs_NV.mean(dim=1), mask_BT)
    aggregation = conventions.supervised_aggregation
    loss = aggregate_tokens(loss_BT, mask_BT, aggregation, batch.global_tokens, batch.global_sequences)
    nll = mean(nll_N)
    metrics = {
        "loss": float(loss.detach()),
        "nll": nll,
        "perplexity": float(torch.tensor(nll, dtype=torch.float64).exp()),
        "accuracy": mean(logits_NV.argmax(dim=1) == ids_N),
        "tokens": float(mask_BT.sum()),
    }
    return LossOutput(loss, metrics)


def log_softmax(logits: Tensor) -> Tensor:
    """Log softmax over the last dimension, in float32 at least."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(dtype).log_softmax(dim=-1)


def spread(values_N: Tensor, mask_BT: Tensor) -> Tensor:
    """Put the values of the trained tokens in their places -> [B, T], zero elsewhere."""
    return values_N.new_zeros(mask_BT.shape).masked_scatter(mask_BT, values_N)


def mean(values: Tensor) -> float:
    """Mean without gradient; NaN of nothing."""
    return float(values.detach().double().mean())


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
