"""Estimates of the KL divergence from the logprobs of sampled tokens.

Definitions: J. Schulman, "Approximating KL divergence" (2020). With x drawn from the policy p and a reference q,
k1 = log p(x)/q(x) is unbiased, k2 = (log p/q)² / 2 has little variance, k3 = q/p - 1 - log q/p is unbiased and never
negative.
"""

import torch
from torch import Tensor

from rlcanary.conventions import Conventions


def kl(logprobs_BT: Tensor, ref_logprobs_BT: Tensor, conventions: Conventions) -> Tensor:
    """Per-token KL estimates in nats, differentiable in `logprobs_BT`.

    Args:
        logprobs_BT: [B, T] of the policy.
        ref_logprobs_BT: [B, T] of the reference model, for the same tokens.
        conventions: kl_estimator, kl_direction, kl_input_clamp, kl_output_clamp and kl_score_term are used. With
            kl_score_term the value is unchanged and the gradient gains estimate × ∇logprob, which makes the gradient of
            the expectation that of the true KL when the tokens are drawn from the policy itself.

    Returns:
        [B, T], of the dtype of the logprobs.
    """
    if logprobs_BT.shape != ref_logprobs_BT.shape:
        raise ValueError(
            f"logprobs of shape {tuple(logprobs_BT.shape)} and reference logprobs of shape "
            f"{tuple(ref_logprobs_BT.shape)} do not belong to the same tokens"
        )
    log_ratio_BT = logprobs_BT - ref_logprobs_BT
    if conventions.kl_direction == "reference_to_policy":
        log_ratio_BT = -log_ratio_BT
    if conventions.kl_input_clamp is not None:
        log_ratio_BT = log_ratio_BT.clamp(-conventions.kl_input_clamp, conventions.kl_input_clamp)
    match conventions.kl_estimator:
        case "k1":
            estimate_BT = log_ratio_BT
        case "k2":
            estimate_BT = log_ratio_BT.square() / 2
        case "k3":
            # expm1 keeps the digits that exp(x) - 1 loses for small x; near zero k3 is x²/2.
            estimate_BT = torch.expm1(-log_ratio_BT) + log_ratio_BT
        case "abs":
            estimate_BT = log_ratio_BT.abs()
    if conventions.kl_output_clamp is not None:
        estimate_BT = estimate_BT.clamp(-conventions.kl_output_clamp, conventions.kl_output_clamp)
    if conventions.kl_score_term:
        estimate_BT = estimate_BT + estimate_BT.detach() * (logprobs_BT - logprobs_BT.detach())
    return estimate_BT
