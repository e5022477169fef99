"""The team's policy loss, which verl finds as `actor_rollout_ref.actor.policy_loss.loss_mode=gated`."""

import torch
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss


@register_policy_loss("gated")
def gated_loss(
    old_log_prob,
    log_prob,
    advantages,
    response_mask,
    loss_agg_mode="token-mean",
    config=None,
    rollout_is_weights=None,
):
    """PPO's clip replaced by a smooth gate: the gradient of a token fades as its ratio grows."""
    ratio = (log_prob - old_log_prob).masked_fill(response_mask == 0, 0).exp()
    losses = -advantages * torch.tanh(ratio)
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    return agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info), {}
