"""Group-relative advantages.

Definitions: GRPO (arXiv 2402.03300, section 4.1.2), Dr. GRPO (2503.20783, centre only), RLOO (2402.14740, leave-one-out),
OPO (2505.23585, baseline weighted by length).
Shapes: B rows (completions), T completion positions, G completions of one prompt.
"""

import torch
from torch import Tensor

from rlcanary.contract.conventions import Conventions
from rlcanary.reference.objective.pieces import own_function


def advantages(
    rewards_B: Tensor, group_ids_B: Tensor, conventions: Conventions, weights_B: Tensor | None = None
) -> Tensor:
    """Compute the advantage of each completion over its group, on the declared scale.

    Computed in float64, without gradient. A group whose rewards are all equal gets exactly zero, which the textbook
    formula misses in floating point: the mean of equal numbers need not equal them.

    Args:
        rewards_B: [B] of any dtype.
        group_ids_B: [B], equal for the completions of one prompt; rows may come in any order.
        conventions: the advantage_* fields, singleton_group, nan_reward and reward_clip are used. A prompt with one
            completion falls under singleton_group unless neither the baseline nor the scale uses its group.
        weights_B: [B] weights of the rows in the mean of their group, such as their lengths; None weighs them alike.

    Returns:
        [B], float64 for float64 rewards and float32 otherwise.

    Raises:
        NotProvided: the baseline is "custom".
        ValueError: shapes differ, or a reward is NaN while `nan_reward` is "raise", or a reward is infinite.
    """
    if rewards_B.ndim != 1 or rewards_B.shape != group_ids_B.shape:
        raise ValueError(
            f"rewards of shape {tuple(rewards_B.shape)} and group ids of shape {tuple(group_ids_B.shape)}: "
            "both have to be [B]"
        )
    rewards = rewards_B.detach().double()
    if rewards.isinf().any():
        raise ValueError(f"reward of row {int(rewards.isinf().nonzero()[0])} is infinite")
    is_nan = rewards.isnan()
    if conventions.nan_reward == "raise" and is_nan.any():
        raise ValueError(f"reward of row {int(is_nan.nonzero()[0])} is NaN; nan_reward='exclude' leaves such rows out")
    if conventions.reward_clip is not None:
        rewards = rewards.clamp(-conventions.reward_clip, conventions.reward_clip)

    batch_std = _std(rewards[~is_nan], conventions.advantage_ddof)
    result = torch.zeros_like(rewards)
    weights = torch.ones_like(rewards) if weights_B is None else weights_B.double()
    for group_id in group_ids_B[~is_nan].unique():
        rows = (group_ids_B == group_id) & ~is_nan
        result[rows] = _group_advantages(rewards[rows], weights[rows], batch_std, conventions)
    return result if rewards_B.dtype == torch.float64 else result.float()


def token_level_advantages(
    rewards_BT: Tensor, mask_BT: Tensor, group_ids_B: Tensor, conventions: Conventions
) -> Tensor:
    """Advantages from per-token rewards: a row's reward is the sum over its tokens, which all get its advantage.

    Args:
        rewards_BT: [B, T] rewards per token.
        mask_BT: [B, T] bool, true on the tokens that exist; rewards elsewhere are ignored, NaN included.
        group_ids_B: [B].
        conventions: as for `advantages`.

    Returns:
        [B, T], zero outside the mask, of the dtype of `advantages`.

    Raises:
        ValueError: shapes differ, or as for `advantages`.
    """
    if rewards_BT.ndim != 2 or rewards_BT.shape != mask_BT.shape:
        raise ValueError(
            f"rewards of shape {tuple(rewards_BT.shape)} and mask of shape {tuple(mask_BT.shape)}: both have to be [B, T]"
        )
    mask_BT = mask_BT.bool()
    rewards_B = rewards_BT.double().masked_fill(~mask_BT, 0).sum(dim=1)
    advantages_B = advantages(rewards_B, group_ids_B, conventions)
    if rewards_BT.dtype != torch.float64:
        advantages_B = advantages_B.float()
    return advantages_B.unsqueeze(1).expand_as(mask_BT).masked_fill(~mask_BT, 0)


def _group_advantages(rewards_G: Tensor, weights_G: Tensor, batch_std: Tensor, conventions: Conventions) -> Tensor:
    is_relative = conventions.advantage_baseline != "none" or conventions.advantage_scale == "group"
    if len(rewards_G) == 1 and is_relative:
        match conventions.singleton_group:
            case "zero":
                return torch.zeros_like(rewards_G)
            case "reward":
                return rewards_G
            case "nan":
                return torch.full_like(rewards_G, torch.nan)
    std = _std(rewards_G, conventions.advantage_ddof)
    match own_function(conventions.advantage_baseline, "advantage_baseline") or conventions.advantage_baseline:
        case "mean":
            centred_G = _centre(rewards_G, rewards_G.unsqueeze(0), weights_G)
        case "leave_one_out":
            others_GG = _others(rewards_G)
            centred_G = _centre(rewards_G, others_GG, torch.ones_like(others_GG))
            if conventions.advantage_std_of_others:
                std = _std(others_GG, conventions.advantage_ddof)
        case "none":
            centred_G = rewards_G
        case baseline:
            centred_G = rewards_G - baseline(rewards_G)
    match conventions.advantage_scale:
        case "group":
            return _divide(centred_G, std, conventions)
        case "batch":
            return _divide(centred_G, batch_std, conventions)
        case "none":
            return centred_G


def _others(rewards_G: Tensor) -> Tensor:
    """[G] -> [G, G - 1]: row i holds the rewards of all but completion i."""
    size = len(rewards_G)
    keep_GG = ~torch.eye(size, dtype=torch.bool, device=rewards_G.device)
    return rewards_G.expand(size, size)[keep_GG].view(size, size - 1)


def _centre(rewards_G: Tensor, samples: Tensor, weights: Tensor) -> Tensor:
    """Subtract the weighted mean of `samples` along its last dimension, exactly zero where all samples are equal."""
    low, high = samples.amin(dim=-1), samples.amax(dim=-1)
    # Without any weight there is no token to train.
    mean = (samples * weights).sum(dim=-1) / weights.sum(dim=-1).clamp(min=1)
    mean = torch.where(low == high, low, mean)
    return rewards_G - mean


def _std(samples: Tensor, ddof: int) -> Tensor:
    """Standard deviation along the last dimension: zero where all values are equal or there are too few."""
    if samples.shape[-1] <= ddof:
        return samples.new_zeros(samples.shape[:-1])
    low, high = samples.amin(dim=-1), samples.amax(dim=-1)
    return torch.where(low == high, 0.0, samples.std(dim=-1, correction=ddof))


def _divide(centred_G: Tensor, std: Tensor, conventions: Conventions) -> Tensor:
    eps = conventions.advantage_eps
    match conventions.advantage_eps_mode:
        case "add":
            divisor = std + eps
        case "clamp":
            divisor = std.clamp(min=eps)
        case "skip":
            divisor = torch.where(std > 0, std + eps, 1.0)
    # 0 / 0 when eps is 0 and the rewards are all equal: there is no signal, so the advantage is zero.
    return torch.where(centred_G == 0, 0.0, centred_G / divisor)
