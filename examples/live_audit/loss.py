"""The loss of this codebase: clipped ratios, averaged over the tokens of the update."""

import torch


def policy_loss(logprobs, old_logprobs, advantages, mask):
    """logprobs, old_logprobs and mask [B, T], advantages [B] -> scalar."""
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = ratio.clamp(0.8, 1.28)
    advantages = advantages.unsqueeze(1)
    losses = -torch.minimum(ratio * advantages, clipped * advantages)
    return (losses * mask).sum() / mask.sum()
