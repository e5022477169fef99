"""Policy losses: ratio, clipping, correction, KL and entropy terms, and their aggregation.

Definitions: PPO (arXiv 1707.06347, eq. 7), GRPO (2402.03300, eq. 3), dual clip (1912.09729, eq. 5), Dr. GRPO (2503.20783),
DAPO (2503.14476, eq. 8), GSPO (2507.18071, eq. 5-7), CISPO (2506.13585, eq. 4-5), GMPO (2507.20673, eq. 4), SAPO
(2511.20347, eq. 5-6), truncated importance sampling (TIS).
Shapes: B rows (completions), T completion positions.

Masked positions never enter: no content of theirs, NaN and infinities included, changes a value or a gradient.
"""

import math
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from rlcanary.contract.batch import LossOutput, PolicyBatch
from rlcanary.contract.conventions import Aggregation, Conventions
from rlcanary.contract.declining import NotProvided
from rlcanary.contract.records.credit import ValueBatch
from rlcanary.reference.masks import masked
from rlcanary.reference.objective.aggregation import aggregate, count_sequences, group_index, required
from rlcanary.reference.objective.kl import kl
from rlcanary.reference.objective.pieces import own_function

Trained = TypeVar("Trained", PolicyBatch, ValueBatch)


def policy_loss(batch: PolicyBatch, conventions: Conventions, whole: PolicyBatch | None = None) -> LossOutput:
    """Compute the loss to minimise under the conventions, and the metrics of its tokens.

    Args:
        batch: logprobs [B, T] carry the gradient; everything else is taken as constant, except entropy.
        conventions: every field from `objective` on is used. A KL term placed in the reward is not added here: see
            `rewards_with_kl`.
        whole: the update of which the batch is a part, for the quantile of `top_entropy`.

    Returns:
        A scalar loss and its metrics. A batch without a trained token has loss zero and NaN metrics, and a metric is NaN
        where the logprobs that it needs, and the loss does not, were not all given. An objective of its own has no clip
        fraction.

    Raises:
        NotProvided: a piece that is needed is "custom".
        ValueError: the conventions ask for reference, sampler, entropy or group data that the batch does not have, shapes
            differ, or a value that the loss needs at a trained token is NaN.
    """
    mask_BT = batch.mask.bool()
    logprobs_BT = masked(batch.logprobs, mask_BT, "logprobs")
    old_logprobs_BT = masked(batch.old_logprobs.detach(), mask_BT, "old_logprobs")
    advantages_BT = _token_advantages(batch.advantages.detach(), mask_BT)

    log_ratio_BT = _log_ratio(logprobs_BT, old_logprobs_BT, mask_BT, conventions)
    ratio_BT = log_ratio_BT.exp()
    metrics = {}
    if objective := own_function(conventions.objective, "objective"):
        loss_BT = objective(logprobs_BT, old_logprobs_BT, advantages_BT, mask_BT)
    else:
        bounds = _clip_bounds(old_logprobs_BT, conventions)
        loss_BT, is_clipped_BT = _surrogate(logprobs_BT, log_ratio_BT, advantages_BT, mask_BT, bounds, conventions)
        is_low_BT = is_clipped_BT & (log_ratio_BT.detach() < bounds[0])
        # Where A < 0, only dual clip has a bound above.
        is_dual_BT = is_clipped_BT & ~is_low_BT & (advantages_BT < 0) & (conventions.objective != "cispo")
        metrics["clip_fraction"] = _masked_mean(is_clipped_BT, mask_BT)
        metrics["clip_fraction_low"] = _masked_mean(is_low_BT, mask_BT)
        metrics["clip_fraction_high"] = _masked_mean(is_clipped_BT & ~is_low_BT & ~is_dual_BT, mask_BT)
        metrics["dual_clip_fraction"] = _masked_mean(is_dual_BT, mask_BT)
    if conventions.off_policy_mask is not None:
        gap_BT = _off_policy_gap(batch, logprobs_BT, mask_BT, conventions)
        loss_BT = loss_BT.masked_fill((advantages_BT < 0) & (gap_BT > conventions.off_policy_mask), 0)
    chosen = batch if conventions.top_entropy is None else _of_high_entropy(batch, whole or batch, conventions)
    loss_BT = loss_BT.masked_fill(~chosen.mask.bool(), 0)
    if conventions.importance_level != "none":
        sampler_logprobs_BT = required(batch.sampler_logprobs, "sampler_logprobs", "importance_level")
        loss_BT = loss_BT * importance_weights(old_logprobs_BT, sampler_logprobs_BT, mask_BT, conventions)

    metrics["logprob"] = _masked_mean(logprobs_BT, mask_BT)
    metrics["old_logprob"] = _masked_mean(old_logprobs_BT, mask_BT)
    metrics["ratio_mean"] = _masked_mean(ratio_BT, mask_BT)
    metrics["ratio_min"] = float(ratio_BT.detach()[mask_BT].min()) if mask_BT.any() else torch.nan
    metrics["ratio_max"] = float(ratio_BT.detach()[mask_BT].max()) if mask_BT.any() else torch.nan
    metrics["approx_kl"] = _masked_mean(_step_estimate(logprobs_BT.detach() - old_logprobs_BT, conventions), mask_BT)
    loss = aggregate(loss_BT, batch, conventions)
    metrics["policy_loss"] = float(loss.detach()) if mask_BT.any() else torch.nan
    kl_is_in_loss = conventions.kl_coef != 0 and conventions.kl_placement == "loss"
    if batch.ref_logprobs is not None or kl_is_in_loss:
        ref_logprobs_BT = required(batch.ref_logprobs, "ref_logprobs", "kl_coef").detach()
        ref_logprobs_BT = masked(ref_logprobs_BT, mask_BT, "ref_logprobs", allow_nan=not kl_is_in_loss)
        own = conventions.replace(ratio_level="token")
        log_weights_BT = (
            _log_ratio(logprobs_BT, old_logprobs_BT, mask_BT, own) if conventions.kl_ratio_weighted else None
        )
        kl_BT = kl(logprobs_BT, ref_logprobs_BT, conventions, log_weights_BT)
        metrics["ref_logprob"] = _masked_mean(ref_logprobs_BT, mask_BT)
        metrics["kl"] = _masked_mean(kl_BT, mask_BT)
        if kl_is_in_loss:
            loss = loss + conventions.kl_coef * _term(kl_BT, batch, conventions, conventions.kl_aggregation)
    if batch.sampler_logprobs is not None:
        sampler_logprobs_BT = masked(batch.sampler_logprobs, mask_BT, "sampler_logprobs", allow_nan=True)
        metrics["sampler_logprob"] = _masked_mean(sampler_logprobs_BT, mask_BT)
        metrics["mult_prob_error"] = _masked_mean((old_logprobs_BT - sampler_logprobs_BT).abs().exp(), mask_BT)
    if batch.entropy is not None or conventions.entropy_coef != 0:
        entropy_BT = required(batch.entropy, "entropy", "entropy_coef")
        entropy_BT = masked(entropy_BT, mask_BT, "entropy", allow_nan=conventions.entropy_coef == 0)
        metrics["entropy"] = _masked_mean(entropy_BT, mask_BT)
        if conventions.entropy_coef != 0:
            bonus = _term(entropy_BT, chosen, conventions, conventions.entropy_aggregation)
            loss = loss - conventions.entropy_coef * bonus
    return LossOutput(loss, metrics)


def _step_estimate(log_ratio_BT: Tensor, conventions: Conventions) -> Tensor:
    """Estimate KL(old policy ‖ policy) at each token from its log-ratio of the policy to the old one."""
    match conventions.approx_kl_estimator:
        case "k1":
            return -log_ratio_BT
        case "k2":
            return log_ratio_BT.square() / 2
        case "k3":
            return log_ratio_BT.expm1() - log_ratio_BT


def _term(values_BT: Tensor, batch: PolicyBatch, conventions: Conventions, aggregation: Aggregation | None) -> Tensor:
    """Aggregate a term of the loss on its own terms.

    Raises:
        NotProvided: the batch is a part whose rows are counted for another aggregation.
    """
    if aggregation is None:
        return aggregate(values_BT, batch, conventions)
    counted = {"sequence_mean_nonempty": "nonempty", "sequence_sum_nonempty": "nonempty", "group_token_mean": "groups"}
    is_part = batch.global_sequences is not None and aggregation != "token_mean"
    if is_part and counted.get(aggregation) != counted.get(conventions.aggregation):
        raise NotProvided("the rows of the whole update are counted for another aggregation")
    return aggregate(values_BT, batch, conventions.replace(aggregation=aggregation))


def _of_high_entropy(batch: PolicyBatch, whole: PolicyBatch, conventions: Conventions) -> PolicyBatch:
    """Return the batch with a mask of the tokens from the 1 - top_entropy quantile of the whole update's entropy on.

    Counts of a whole update are those of its chosen tokens, for the entropy bonus.

    Raises:
        NotProvided: the batch is a part, and so is the whole: its quantile is not that of the update.
    """
    if whole.global_tokens is not None or whole.global_sequences is not None:
        raise NotProvided("the quantile of the entropy is that of a whole update, not of its parts")
    entropies_N = _trained_entropy(whole)[whole.mask.bool()]
    least = entropies_N.quantile(1 - (conventions.top_entropy or 1)) if len(entropies_N) else 0.0
    chosen = replace(batch, mask=batch.mask.bool() & (_trained_entropy(batch) >= least))
    if whole is batch:
        return chosen
    all_chosen = replace(whole, mask=whole.mask.bool() & (_trained_entropy(whole) >= least))
    counted = conventions.replace(aggregation=conventions.entropy_aggregation or conventions.aggregation)
    return replace(
        chosen,
        global_tokens=float(all_chosen.mask.sum()),
        global_sequences=count_sequences(all_chosen, counted),
    )


def _trained_entropy(batch: PolicyBatch) -> Tensor:
    return masked(required(batch.entropy, "entropy", "top_entropy").detach(), batch.mask.bool(), "entropy")


def importance_ratio(logprobs_BT: Tensor, old_logprobs_BT: Tensor, mask_BT: Tensor, conventions: Conventions) -> Tensor:
    """π/π_old of each token, or of its sequence: the exponential of the mean log-ratio over the row's tokens (GSPO).

    Args:
        logprobs_BT: [B, T] of the policy in training.
        old_logprobs_BT: [B, T] of the policy that the ratio is taken against.
        mask_BT: [B, T] bool.
        conventions: ratio_level and log_ratio_clamp are used; the clamp applies to the exponent.

    Returns:
        [B, T], 1 outside the mask, differentiable in `logprobs_BT`. A sequence's ratio stands at each of its tokens.
    """
    mask_BT = mask_BT.bool()
    ratio_BT = _log_ratio(logprobs_BT, old_logprobs_BT, mask_BT, conventions).exp()
    return ratio_BT.masked_fill(~mask_BT, 1)


def importance_weights(
    trainer_logprobs_BT: Tensor, sampler_logprobs_BT: Tensor, mask_BT: Tensor, conventions: Conventions
) -> Tensor:
    """Weights that correct for tokens drawn by an engine whose probabilities differ from the trainer's.

    Truncation is TIS, per token or per sequence. Masking is IcePop, which drops weights outside the bounds. Both are
    computed as in verl, NeMo RL, OpenRLHF and TRL, which agree to rounding.

    Args:
        trainer_logprobs_BT: [B, T] of the trainer, under the weights that sampled.
        sampler_logprobs_BT: [B, T] of the engine.
        mask_BT: [B, T] bool.
        conventions: importance_level, importance_mode, importance_low and importance_high are used. A sequence's weight
            is the product of its tokens' weights.

    Returns:
        [B, T] without gradient, 0 outside the mask and 1 everywhere inside it when importance_level is "none".

    Raises:
        NotProvided: importance_mode is needed and "custom".
        ValueError: a token inside the mask was not scored (NaN).
    """
    mask_BT = mask_BT.bool()
    if conventions.importance_level == "none":
        return mask_BT.to(trainer_logprobs_BT.dtype)
    trainer_BT = masked(trainer_logprobs_BT.detach(), mask_BT, "trainer_logprobs")
    log_weight_BT = trainer_BT - masked(sampler_logprobs_BT.detach(), mask_BT, "sampler_logprobs")
    if conventions.importance_level == "sequence":
        log_weight_BT = log_weight_BT.sum(dim=1, keepdim=True).expand_as(log_weight_BT)
    weight_BT = log_weight_BT.exp()
    if bounded := own_function(conventions.importance_mode, "importance_mode"):
        weight_BT = bounded(weight_BT)
    elif conventions.importance_mode == "truncate":
        weight_BT = weight_BT.clamp(max=conventions.importance_high)
    else:
        inside_BT = (weight_BT >= conventions.importance_low) & (weight_BT <= conventions.importance_high)
        weight_BT = weight_BT.masked_fill(~inside_BT, 0)
    return weight_BT.masked_fill(~mask_BT, 0)


def split(batch: Trained, n_pieces: int, conventions: Conventions) -> list[Trained]:
    """Cut the batch into pieces whose losses and gradients add up to those of the whole.

    The pieces serve as micro-batches or as data-parallel shards; where a framework averages gradients over its ranks,
    multiply each shard's loss by their number. Rows are cut in order and as evenly as possible. Groups stay whole where
    the aggregation needs them.

    Raises:
        ValueError: fewer than one piece, or more pieces than rows (groups).
    """
    if conventions.aggregation == "group_token_mean":
        group_of_row_B, groups = group_index(batch)
        units = [(group_of_row_B == index).nonzero().squeeze(1) for index in range(groups)]
    else:
        units = list(torch.arange(len(batch.mask), device=batch.mask.device).split(1))
    if not 1 <= n_pieces <= len(units):
        raise ValueError(f"cannot cut {len(units)} rows or groups into {n_pieces} pieces")
    whole = replace(
        batch,
        global_tokens=float(batch.mask.bool().sum()) if batch.global_tokens is None else batch.global_tokens,
        global_sequences=(
            count_sequences(batch, conventions) if batch.global_sequences is None else batch.global_sequences
        ),
    )
    bounds = [piece * len(units) // n_pieces for piece in range(n_pieces + 1)]
    return [whole.rows(torch.cat(units[start:end])) for start, end in pairwise(bounds)]


def accumulated_loss(batch: PolicyBatch, n_micro: int, conventions: Conventions) -> LossOutput:
    """The same update in micro-batches: value and gradient are those of `policy_loss` on the whole batch.

    Args:
        batch: the whole update.
        n_micro: number of pieces that `split` cuts it into, of any token counts.
        conventions: as for `policy_loss`.

    Returns:
        The sum of the pieces' losses, whose backward pass runs all of theirs, and the metrics of the whole.

    Raises:
        ValueError: as for `policy_loss` and `split`.
    """
    losses = [policy_loss(piece, conventions, batch).loss for piece in split(batch, n_micro, conventions)]
    with torch.no_grad():
        metrics = policy_loss(batch, conventions).metrics
    return LossOutput(torch.stack(losses).sum(), metrics)


def _log_ratio(logprobs_BT: Tensor, old_logprobs_BT: Tensor, mask_BT: Tensor, conventions: Conventions) -> Tensor:
    log_ratio_BT = (logprobs_BT - old_logprobs_BT).masked_fill(~mask_BT, 0)
    if conventions.ratio_level == "sequence":
        log_ratio_BT = _row_mean(log_ratio_BT, mask_BT)
    if conventions.log_ratio_clamp is not None:
        log_ratio_BT = log_ratio_BT.clamp(-conventions.log_ratio_clamp, conventions.log_ratio_clamp)
    return log_ratio_BT


def _surrogate(
    logprobs_BT: Tensor,
    log_ratio_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    bounds: tuple[Tensor, Tensor],
    conventions: Conventions,
) -> tuple[Tensor, Tensor]:
    """Token losses, and a mask of the tokens that clipping leaves without gradient (CISPO: with less weight).

    Ratios are clipped as logarithms: a clipped token then has gradient zero however large its ratio, where the exponential
    would overflow and turn the zero into NaN.
    """
    unclipped_BT = torch.zeros_like(mask_BT)
    low_BT, high_BT = bounds
    match conventions.objective:
        case "reinforce":
            return -advantages_BT * logprobs_BT, unclipped_BT
        case "sapo":
            positive, negative = conventions.sapo_temperature_positive, conventions.sapo_temperature_negative
            temperature_BT = torch.full_like(log_ratio_BT, negative).masked_fill(advantages_BT > 0, positive)
            # The gate is shut long before a ratio of exp(30), whose exponential could overflow and turn its slope into NaN.
            ratio_BT = log_ratio_BT.clamp(max=30.0).exp()
            gate_BT = torch.sigmoid(temperature_BT * (ratio_BT - 1)) * 4 / temperature_BT
            return -gate_BT * advantages_BT, unclipped_BT
        case "cispo":
            held_BT = log_ratio_BT.clamp(low_BT, high_BT)
            is_clipped_BT = (held_BT != log_ratio_BT) & (advantages_BT != 0)
            return -held_BT.exp().detach() * advantages_BT * logprobs_BT, is_clipped_BT
    # min(rA, clip(r)A) bounds the ratio above where A > 0 and below where A < 0; dual clip adds an upper bound there.
    ceiling = math.inf if conventions.dual_clip is None else _log(conventions.dual_clip)
    floored_BT = log_ratio_BT.clamp(min=low_BT).clamp(max=ceiling)
    held_BT = torch.where(advantages_BT > 0, log_ratio_BT.clamp(max=high_BT), floored_BT)
    is_clipped_BT = (held_BT != log_ratio_BT) & (advantages_BT != 0)
    if conventions.objective == "gmpo":
        held_BT = _row_mean(held_BT, mask_BT)
    # Without an advantage there is no loss, also where the ratio is infinite.
    return -held_BT.masked_fill(advantages_BT == 0, 0).exp() * advantages_BT, is_clipped_BT


def _clip_bounds(old_logprobs_BT: Tensor, conventions: Conventions) -> tuple[Tensor, Tensor]:
    """[B, T] the bounds of the log-ratio of each token."""

    def bound(distance: float | None, free: float) -> Tensor:
        if distance is None:
            return torch.full_like(old_logprobs_BT, free)
        if conventions.clip_bounds == "fixed":
            return torch.full_like(old_logprobs_BT, _log(1 + distance))
        room_BT = 1 + 4 * distance / old_logprobs_BT.exp()
        return ((1 + room_BT.clamp(min=0).sqrt()) / 2).log()

    low = conventions.clip_low
    return bound(None if low is None else -low, -math.inf), bound(conventions.clip_high, math.inf)


def _off_policy_gap(batch: PolicyBatch, logprobs_BT: Tensor, mask_BT: Tensor, conventions: Conventions) -> Tensor:
    """[B, T] the row's mean of the logprobs of what sampled it minus the present ones."""
    behaviour = batch.old_logprobs
    if conventions.importance_level != "none":
        behaviour = required(batch.sampler_logprobs, "sampler_logprobs", "importance_level")
    behaviour_BT = masked(behaviour.detach(), mask_BT, "old_logprobs")
    return _row_mean(behaviour_BT - logprobs_BT.detach(), mask_BT)


def _row_mean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """[B, T] the mean over the row's tokens inside the mask, at each of them."""
    tokens_B1 = mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
    return (values_BT.masked_fill(~mask_BT, 0).sum(dim=1, keepdim=True) / tokens_B1).expand_as(values_BT)


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def _token_advantages(advantages: Tensor, mask_BT: Tensor) -> Tensor:
    """[B] or [B, T] -> [B, T], zero outside the mask."""
    if advantages.shape == mask_BT.shape[:1]:
        advantages = advantages.unsqueeze(1).expand_as(mask_BT)
    return masked(advantages, mask_BT, "advantages")


def _masked_mean(values_BT: Tensor, mask_BT: Tensor) -> float:
    """Mean over the tokens inside the mask; NaN when there is none."""
    return float(values_BT.detach()[mask_BT].double().mean())
