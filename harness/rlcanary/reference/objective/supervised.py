"""Cross entropy of labels, as in supervised fine-tuning (SFT).

Shapes: B rows, S sequence positions, T positions with a loss, V vocabulary entries, N trained tokens.

Positions that are not trained never enter: no content of theirs, NaN and infinities included, changes a value or a gradient.
"""

import torch
from torch import Tensor

from rlcanary.contract.batch import LossOutput
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.records.other_losses import SupervisedBatch
from rlcanary.reference.objective.aggregation import aggregate_tokens


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
