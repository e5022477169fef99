"""Adapter of this codebase for rlcanary. Let each method call your own function, and delete those that you do not need.

The docs of rlcanary list what else an adapter can provide (docs/adapters.md) and declare (docs/contract.md).
"""

import torch

from rlcanary import Adapter, Conventions, LossOutput


class MyCodebase(Adapter):
    name = "my-codebase"
    conventions = Conventions(advantage_ddof=1, advantage_eps=1e-6, clip_high=0.28, aggregation="token_mean")

    def token_logprobs(self, logits, token_ids, temperature):  # type: ignore[no-untyped-def]
        scores = (logits.float() / temperature).log_softmax(dim=-1)
        return scores.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)

    def completion_mask(self, completion_ids, eos_token_ids, pad_token_id):  # type: ignore[no-untyped-def]
        is_eos = torch.isin(completion_ids, torch.tensor(eos_token_ids)).long()
        return is_eos.cumsum(dim=1) - is_eos == 0

    def advantages(self, rewards, group_ids):  # type: ignore[no-untyped-def]
        advantages = torch.zeros_like(rewards)
        for group_id in group_ids.unique():
            group = rewards[group_ids == group_id].double()
            if group.min() != group.max():  # true of a NaN, which then shows in the advantages
                scaled = (group - group.mean()) / (group.std() + 1e-6)
                advantages[group_ids == group_id] = scaled.to(rewards.dtype)
        return advantages

    def policy_loss(self, batch):  # type: ignore[no-untyped-def]
        ratio = (batch.logprobs - batch.old_logprobs).masked_fill(~batch.mask, 0).exp()
        advantages = batch.advantages.unsqueeze(1) if batch.advantages.ndim == 1 else batch.advantages
        loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
        return LossOutput(loss[batch.mask].sum() / batch.mask.sum().clamp(min=1))
