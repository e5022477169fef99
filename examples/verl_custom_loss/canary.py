"""verl with the team's loss: its engine, micro-batches, ranks and KL as they are, and `gated_loss` inside."""

import loss  # noqa: F401 - registers the loss mode
import torch

from rlcanary.adapters.verl.adapter import VerlAdapter


def gated(logprobs, old_logprobs, advantages, mask):
    """The losses of the tokens as the team means them, [B, T], before they are aggregated."""
    log_ratio = (logprobs - old_logprobs).masked_fill(~mask, 0)
    return -advantages * torch.tanh(log_ratio.exp())


class Canary(VerlAdapter):
    name = "verl-custom-loss"

    def __init__(self, actor=None, *others):
        super().__init__({"policy_loss": {"loss_mode": "gated"}, **(actor or {})}, *others)

    @property
    def conventions(self):
        declared = super().conventions
        return declared.replace(objective=gated) if declared.objective == "custom" else declared
