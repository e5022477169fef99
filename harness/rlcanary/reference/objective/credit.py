"""Credit per token: outcome, returns to go, credit per turn, GAE, and their whitening.

Definitions: GAE (arXiv 1506.02438, eq. 16), REINFORCE++ (2501.03262), OPO (2505.23585), turn returns (Kevin, 2507.11948),
two lambdas (VC-PPO, 2503.01491). Shapes: B rows (completions), T completion positions.

The steps of a row are its trained tokens. Tokens of tools are part of the state that the next trained token sees: they
have no value, no reward and no discount. Positions outside the mask never enter, whatever stands there.
"""

import torch
from torch import Tensor

from rlcanary.contract.conventions import Conventions
from rlcanary.contract.records.credit import Credit, CreditBatch
from rlcanary.reference.masks import masked
from rlcanary.reference.objective.advantages import advantages


def token_advantages(batch: CreditBatch, conventions: Conventions) -> Credit:
    """Divide the rewards of the rows among their tokens.

    Computed in float64, without gradient.

    Args:
        batch: values are read by "gae" only, turn ids by "turn_returns" only.
        conventions: token_credit, baseline_weighting, discount, gae_lambda, critic_lambda, the whitening_* fields, and what
            `advantages` uses.

    Returns:
        Advantages [B, T], zero outside the mask, and with "gae" returns [B, T]; float64 for float64 rewards and float32
        otherwise.

    Raises:
        ValueError: shapes differ, a number at a trained token is NaN, the conventions ask for values or turn ids that the
            batch does not have, or as for `advantages`.
    """
    mask_BT = batch.mask.bool()
    token_rewards_BT = torch.zeros_like(mask_BT, dtype=torch.float64)
    if batch.token_rewards is not None:
        token_rewards_BT = masked(batch.token_rewards.detach().double(), mask_BT, "token_rewards")
    returns_BT = None
    match conventions.token_credit:
        case "outcome":
            rewards_B = batch.rewards.double() + token_rewards_BT.sum(dim=1)
            outcome_B = _row_advantages(rewards_B, batch, conventions)
            advantages_BT = outcome_B.unsqueeze(1).expand_as(mask_BT)
        case "returns":
            rewards_BT = token_rewards_BT + _on_last_token(_row_advantages(batch.rewards, batch, conventions), mask_BT)
            advantages_BT = returns_to_go(rewards_BT, mask_BT, conventions.discount)
        case "turn_returns":
            rewards_BT = token_rewards_BT + _on_last_token(_row_advantages(batch.rewards, batch, conventions), mask_BT)
            advantages_BT = _turn_returns(rewards_BT, mask_BT, batch.turn_ids, conventions.discount)
        case "gae":
            if batch.values is None:
                raise ValueError("token_credit 'gae' needs the batch to have values")
            values_BT = masked(batch.values.detach().double(), mask_BT, "values")
            # The clip of rewards, and the treatment of NaN, without a baseline or a scale.
            plain = conventions.replace(advantage_baseline="none", advantage_scale="none", baseline_weighting="rows")
            rewards_BT = token_rewards_BT + _on_last_token(_row_advantages(batch.rewards, batch, plain), mask_BT)
            discount, trace, other = conventions.discount, conventions.gae_lambda, conventions.critic_lambda
            advantages_BT = gae(rewards_BT, values_BT, mask_BT, discount, trace)
            targets_BT = advantages_BT if other is None else gae(rewards_BT, values_BT, mask_BT, discount, other)
            returns_BT = (targets_BT + values_BT).to(_dtype(batch))
    advantages_BT = whitened(advantages_BT, mask_BT, conventions).masked_fill(~mask_BT, 0)
    return Credit(advantages_BT.to(_dtype(batch)), returns_BT)


def gae(rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, discount: float, trace: float) -> Tensor:
    """Generalised advantage estimation over the trained tokens; behind the last one every value is zero.

    Args:
        rewards_BT: [B, T].
        values_BT: [B, T] before each token.
        mask_BT: [B, T] bool.
        discount: gamma, per trained token.
        trace: lambda.

    Returns:
        [B, T], zero outside the mask.
    """
    later_B = next_value_B = torch.zeros_like(rewards_BT[:, 0])
    columns = []
    for is_trained_B, reward_B, value_B in reversed(list(zip(mask_BT.T, rewards_BT.T, values_BT.T, strict=True))):
        error_B = reward_B + discount * next_value_B - value_B
        later_B = torch.where(is_trained_B, error_B + discount * trace * later_B, later_B)
        next_value_B = torch.where(is_trained_B, value_B, next_value_B)
        columns.append(later_B)
    return torch.stack(columns[::-1], dim=1).masked_fill(~mask_BT, 0)


def returns_to_go(rewards_BT: Tensor, mask_BT: Tensor, discount: float) -> Tensor:
    """Sum the rewards of each trained token and of those behind it, discounted: `gae` without values at lambda 1."""
    return gae(rewards_BT, torch.zeros_like(rewards_BT), mask_BT, discount, 1.0)


def whitened(values_BT: Tensor, mask_BT: Tensor, conventions: Conventions) -> Tensor:
    """Centre and scale by the trained tokens of the whole batch, as the `whitening_*` fields say.

    Equal numbers are not divided.
    """
    kept_N = values_BT[mask_BT]
    if conventions.whitening == "none" or not len(kept_N):
        return values_BT
    ddof, mean = conventions.whitening_ddof, kept_N.mean()
    deviation = mean.new_zeros(())
    if len(kept_N) > ddof:
        deviation = kept_N.std(correction=ddof)
    elif conventions.whitening != "mean" and conventions.whitening_singleton != "undivided":
        return values_BT if conventions.whitening_singleton == "unwhitened" else torch.full_like(values_BT, torch.nan)
    divisor = torch.where(deviation == 0, 1.0, deviation)
    match conventions.whitening:
        case "mean_std":
            return (values_BT - mean) / divisor
        case "mean":
            return values_BT - mean
        case "std":
            return values_BT / divisor


def _row_advantages(rewards_B: Tensor, batch: CreditBatch, conventions: Conventions) -> Tensor:
    tokens_B = batch.mask.bool().sum(dim=1) if conventions.baseline_weighting == "tokens" else None
    return advantages(rewards_B.double(), batch.group_ids, conventions, tokens_B)


def _on_last_token(rewards_B: Tensor, mask_BT: Tensor) -> Tensor:
    """[B] -> [B, T]: each reward at its row's last trained token, zero elsewhere and in rows without one."""
    is_last_BT = mask_BT & (mask_BT.flip(1).cumsum(dim=1).flip(1) == 1)
    return torch.where(is_last_BT, rewards_B.unsqueeze(1), 0.0)


def _turn_returns(rewards_BT: Tensor, mask_BT: Tensor, turn_ids_BT: Tensor | None, discount: float) -> Tensor:
    if turn_ids_BT is None:
        raise ValueError("token_credit 'turn_returns' needs the batch to have turn_ids")
    result_BT = torch.zeros_like(rewards_BT)
    for rewards_T, mask_T, turn_ids_T, result_T in zip(rewards_BT, mask_BT, turn_ids_BT, result_BT, strict=True):
        later = rewards_T.new_zeros(())
        for turn_id in turn_ids_T[mask_T].unique().flip(0):
            is_of_turn_T = mask_T & (turn_ids_T == turn_id)
            later = rewards_T[is_of_turn_T].sum() + discount * later
            result_T[is_of_turn_T] = later
    return result_BT


def _dtype(batch: CreditBatch) -> torch.dtype:
    return torch.float64 if batch.rewards.dtype == torch.float64 else torch.float32
