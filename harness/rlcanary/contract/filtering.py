"""The distribution that a token is drawn from: logits behind temperature and filters."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.sampling import Sampling


def processed_logprobs(logits_NV: Tensor, sampling: Sampling) -> Tensor:
    """Logprobs after temperature (above 0), then min_p, then top_k, then top_p; -inf marks tokens that cannot be drawn.

    Args:
        logits_NV: [N, V].
        sampling: its temperature, min_p, top_k and top_p are used.

    Returns:
        [N, V], normalised.
    """
    import torch

    scores_NV = logits_NV / sampling.temperature
    if sampling.min_p:
        least_N1 = scores_NV.amax(dim=-1, keepdim=True) + math.log(sampling.min_p)
        scores_NV = scores_NV.masked_fill(scores_NV < least_N1, -torch.inf)
    if 0 < sampling.top_k < scores_NV.shape[-1]:
        smallest_N1 = scores_NV.topk(sampling.top_k, dim=-1).values[:, -1:]
        scores_NV = scores_NV.masked_fill(scores_NV < smallest_N1, -torch.inf)
    if sampling.top_p < 1:
        sorted_NV, order_NV = scores_NV.sort(dim=-1, descending=True)
        softmax_NV = sorted_NV.softmax(dim=-1)
        # The token with which the sum passes top_p is the last one kept.
        is_out_NV = softmax_NV.cumsum(dim=-1) - softmax_NV >= sampling.top_p
        scores_NV = scores_NV.masked_fill(is_out_NV.gather(1, order_NV.argsort(dim=-1)), -torch.inf)
    return scores_NV.log_softmax(dim=-1)
