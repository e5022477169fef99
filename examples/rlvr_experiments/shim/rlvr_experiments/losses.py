"""Advantages and the loss: those of `rlcanary.reference`, which the trainer trains with."""

import torch

from rlcanary.contract.batch import PolicyBatch
from rlcanary.contract.conventions import Conventions
from rlcanary.reference import advantages, policy_loss
from rlvr_experiments.ops import compute_logprobs

SAMPLE_STD = Conventions(advantage_ddof=1, advantage_eps=1e-6, advantage_eps_mode="clamp")


def compute_advantages(rewards, group_size=None):
    """Return the advantages [B] over groups of one size, which lie one after the other; None is one group."""
    size = group_size or len(rewards)
    return advantages(rewards, torch.arange(len(rewards) // size).repeat_interleave(size), SAMPLE_STD)


class GRPOLoss:
    """The loss of GRPO: a clipped ratio, k3 to the reference model, a mean over the tokens of each row."""

    def __init__(self, beta, eps=0.2):
        self.conventions = Conventions(
            aggregation="sequence_mean", kl_estimator="k3", kl_coef=beta, clip_low=eps, clip_high=eps
        )

    def __call__(
        self,
        logits,
        response,
        ref_logprobs,
        rollout_logprobs,
        advantages,
        padding_mask,
        prompt_lens=None,
        temperature=1.0,
    ):
        """Return the loss of completions, whose logprobs are taken from the logits."""
        logprobs, _ = compute_logprobs(logits, response, temperature, prompt_lens=prompt_lens)
        batch = PolicyBatch(logprobs, rollout_logprobs, advantages, padding_mask.bool(), ref_logprobs)
        return policy_loss(batch, self.conventions).loss
