"""Tests of whether a group or completion is worth training on. They decide for one each and drop nothing."""

from torch import Tensor

from rlcanary.contract.batch import Completion, Group


def has_signal(rewards_G: Tensor, threshold: float = 0.0) -> bool:
    """Tell whether a group's rewards differ by more than `threshold`: dynamic sampling (DAPO, 2503.14476, section 3.2).

    The test uses their range. The standard deviation of equal numbers is often not zero in floating point, so that a
    test for zero lets such groups through.

    Args:
        rewards_G: [G] rewards of one group.
        threshold: in units of reward.

    Raises:
        ValueError: there is no reward, or one is NaN.
    """
    if rewards_G.numel() == 0:
        raise ValueError("a group without rewards neither has nor lacks signal")
    if rewards_G.isnan().any():
        raise ValueError("a NaN reward neither has nor lacks signal; decide about it before filtering")
    return bool(rewards_G.max() - rewards_G.min() > threshold)


def is_overlong(completion: Completion, max_tokens: int) -> bool:
    """Tell whether a completion was truncated or has more than `max_tokens` tokens (DAPO's overlong filtering)."""
    return completion.finish_reason == "length" or len(completion.token_ids) > max_tokens


def is_stale(group: Group, trainer_version: int, max_staleness: int) -> bool:
    """Tell whether any token of the group was sampled more than `max_staleness` policy versions before `trainer_version`.

    Raises:
        ValueError: a token claims a version that the trainer has not reached.
    """
    # Versions per token are more exact than the version at which the group was sent.
    versions = [
        version for completion in group.completions for version in completion.token_versions or (group.policy_version,)
    ]
    if max(versions) > trainer_version:
        raise ValueError(f"sampled by policy version {max(versions)}, but the trainer is at {trainer_version}")
    return min(versions) < trainer_version - max_staleness
