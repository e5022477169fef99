"""Rewards to advantages."""

import torch

EPS = 1e-4


def group_advantages(rewards, group_ids):
    """[B]: how much better each completion is than the others of its prompt, in their standard deviations."""
    if not rewards.isfinite().all():
        raise ValueError(f"a reward is not a finite number: {rewards.tolist()}")
    rewards = rewards.double()  # the mean of equal float32 numbers need not be that number
    _, index, size = torch.unique(group_ids, return_inverse=True, return_counts=True)

    def group_sum(values):
        return values.new_zeros(len(size)).index_add(0, index, values)

    centred = rewards - (group_sum(rewards) / size)[index]
    std = (group_sum(centred**2) / (size - 1).clamp(min=1)).sqrt()
    return (centred / (std[index] + EPS)).float()
