"""Estimates of the KL divergence from the logprobs of sampled tokens.

Definitions: J. Schulman, "Approximating KL divergence" (2020). With x drawn from the policy p and a reference q,
k1 = log p(x)/q(x) is unbiased, k2 = (log p/q)² / 2 has little variance and the right gradient, k3 = q/p - 1 - log q/p is
unbiased and never negative. Shapes: B rows (completions), T completion positions.
"""

import math

import torch
from torch import Tensor

from rlcanary.contract.conventions import Conventions
from rlcanary.reference.masks import masked
from rlcanary.reference.objective.pieces import own_function


def kl(
    logprobs_BT: Tensor, ref_logprobs_BT: Tensor, conventions: Conventions, log_weights_BT: Tensor | None = None
) -> Tensor:
    """Per-token KL estimates in nats, differentiable in `logprobs_BT` and `log_weights_BT`.

    A token whose log-ratio or estimate lies beyond its clamp has no gradient at all, as in NeMo RL: neither through the
    score-function part nor through its weight.

    Args:
        logprobs_BT: [B, T] of the policy.
        ref_logprobs_BT: [B, T] of the reference model, for the same tokens.
        conventions: kl_estimator, kl_direction, kl_input_clamp, kl_output_clamp and kl_score_term are used. With
            kl_score_term the value is unchanged and the gradient gains estimate × ∇logprob. Over tokens drawn from the
            policy itself the gradient is then that of the expected estimate: for k1 and k3 of KL(policy ‖ reference) the
            true KL's. k2 has the true KL's gradient without the term and not with it.
        log_weights_BT: [B, T] logarithms of factors of the estimates, such as importance ratios, which are applied before
            kl_output_clamp; None is a factor of 1.

    Returns:
        [B, T], of the dtype of the logprobs.

    Raises:
        NotProvided: the estimator is "custom".
        ValueError: shapes differ.
    """
    if logprobs_BT.shape != ref_logprobs_BT.shape:
        raise ValueError(
            f"logprobs of shape {tuple(logprobs_BT.shape)} and reference logprobs of shape "
            f"{tuple(ref_logprobs_BT.shape)} do not belong to the same tokens"
        )
    with torch.no_grad():
        exact_BT = _log_ratio(logprobs_BT, ref_logprobs_BT, conventions)
        bound = math.inf if conventions.kl_input_clamp is None else conventions.kl_input_clamp
        log_ratio_BT = exact_BT.clamp(-bound, bound)
        is_clamped_BT = log_ratio_BT != exact_BT
        exact_BT = _estimate(log_ratio_BT, conventions)
        if log_weights_BT is not None:
            exact_BT = exact_BT * log_weights_BT.exp()
        bound = math.inf if conventions.kl_output_clamp is None else conventions.kl_output_clamp
        value_BT = exact_BT.clamp(-bound, bound)
        is_clamped_BT |= value_BT != exact_BT

    # Computed again with harmless numbers where a clamp holds: behind an exponential that overflows, 0 × ∞ would make the
    # gradient NaN there.
    logprobs_BT = logprobs_BT.masked_fill(is_clamped_BT, 0)
    log_ratio_BT = _log_ratio(logprobs_BT, ref_logprobs_BT.masked_fill(is_clamped_BT, 0), conventions)
    estimate_BT = _estimate(log_ratio_BT, conventions)
    if log_weights_BT is not None:
        estimate_BT = estimate_BT * log_weights_BT.masked_fill(is_clamped_BT, 0).exp()
    if conventions.kl_score_term:
        estimate_BT = estimate_BT + estimate_BT.detach() * (logprobs_BT - logprobs_BT.detach())
    return torch.where(is_clamped_BT, value_BT, estimate_BT)


def _log_ratio(logprobs_BT: Tensor, ref_logprobs_BT: Tensor, conventions: Conventions) -> Tensor:
    log_ratio_BT = logprobs_BT - ref_logprobs_BT
    return -log_ratio_BT if conventions.kl_direction == "reference_to_policy" else log_ratio_BT


def _estimate(log_ratio_BT: Tensor, conventions: Conventions) -> Tensor:
    if estimator := own_function(conventions.kl_estimator, "kl_estimator"):
        return estimator(log_ratio_BT)  # type: ignore[no-any-return]
    match conventions.kl_estimator:
        case "k1":
            return log_ratio_BT
        case "k2":
            return log_ratio_BT.square() / 2
        case "k3":
            # expm1 keeps the digits that exp(x) - 1 loses for small x; near zero k3 is x²/2.
            return torch.expm1(-log_ratio_BT) + log_ratio_BT
        case "abs":
            return log_ratio_BT.abs()
        case other:
            raise AssertionError(other)


def rewards_with_kl(
    rewards: Tensor, logprobs_BT: Tensor, ref_logprobs_BT: Tensor, mask_BT: Tensor, conventions: Conventions
) -> Tensor:
    """Rewards minus kl_coef × KL, for a KL that is placed in the reward; advantages are taken from the result.

    This is the counterpart of the KL term of `policy_loss`. With kl_placement "loss" the rewards are returned
    unchanged, so that a step which calls both applies the KL once. The definition is that of InstructGPT (arXiv
    2203.02155, eq. 2), RLOO (2402.14740) and verl's apply_kl_penalty.

    Args:
        rewards: [B], from which the sum of the row's estimates is taken, or [B, T], from which each token's is.
        logprobs_BT: [B, T] of the policy that sampled.
        ref_logprobs_BT: [B, T] of the reference model.
        mask_BT: [B, T] bool, true on the tokens that count.
        conventions: kl_placement, kl_coef and the fields that `kl` uses.

    Returns:
        Tensor of the rewards' shape and dtype (float32 if theirs is no float), without gradient.

    Raises:
        ValueError: shapes differ, or a logprob inside the mask is NaN.
    """
    if rewards.shape not in (mask_BT.shape, mask_BT.shape[:1]):
        raise ValueError(
            f"rewards of shape {tuple(rewards.shape)} are neither per row nor per token of a mask of shape "
            f"{tuple(mask_BT.shape)}"
        )
    rewards = rewards.detach()
    if conventions.kl_placement == "loss" or conventions.kl_coef == 0:
        return rewards
    mask_BT = mask_BT.bool()
    kl_BT = kl(
        masked(logprobs_BT.detach(), mask_BT, "logprobs").double(),
        masked(ref_logprobs_BT.detach(), mask_BT, "ref_logprobs").double(),
        conventions,
    )
    penalty = kl_BT if rewards.ndim == 2 else kl_BT.sum(dim=1)
    return (rewards - conventions.kl_coef * penalty).to(rewards.dtype if rewards.is_floating_point() else torch.float32)
