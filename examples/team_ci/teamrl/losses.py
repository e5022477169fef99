"""The policy loss."""

import torch


def policy_loss(logprobs, old_logprobs, advantages, mask, low=0.2, high=0.28):
    """DAPO's loss: clipped further up than down, a mean over the trained tokens. [B, T], advantages [B] or [B, T]."""
    ratio = (logprobs - old_logprobs).masked_fill(~mask, 0).exp()
    advantages = advantages.unsqueeze(1) if advantages.ndim == 1 else advantages
    losses = -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    return losses[mask].sum() / mask.sum().clamp(min=1)
