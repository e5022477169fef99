"""The reward of a completion from what several reward functions gave it."""

from torch import Tensor

from rlcanary.contract.records.reward_parts import RewardParts


def combine_rewards(parts: RewardParts) -> Tensor:
    """Add up the parts of each completion's reward, each times its weight.

    Args:
        parts: the values [B, K] and their weights. A function that gave nothing (NaN) adds nothing.

    Returns:
        [B] rewards, NaN where no function gave anything.

    Raises:
        ValueError: there is not one weight per function.
    """
    values_BK = parts.values
    if len(parts.weights) != values_BK.shape[1]:
        raise ValueError(f"{len(parts.weights)} weights for {values_BK.shape[1]} reward functions")
    rewards_B = (values_BK * values_BK.new_tensor(list(parts.weights))).nansum(dim=1)
    return rewards_B.masked_fill(values_BK.isnan().all(dim=1), float("nan"))
