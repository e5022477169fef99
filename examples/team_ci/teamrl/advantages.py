"""Advantages of groups."""

import torch


def group_advantages(rewards, group_ids, eps=1e-6):
    """Centre and scale the rewards [B] of each group -> [B]."""
    advantages = torch.zeros_like(rewards)
    for group_id in group_ids.unique():
        members = group_ids == group_id
        group = rewards[members]
        if len(group) > 1:
            advantages[members] = (group - group.mean()) / (group.std() + eps)
    return advantages
