"""The adapter that the team writes once: what its code means to do, and how rlcanary calls it."""

from rlcanary.adapters import Adapter
from rlcanary.batch import LossOutput
from rlcanary.conventions import Conventions
from tinygrpo import loss
from tinygrpo.advantages import group_advantages
from tinygrpo.config import GRPOConfig


class TinyGRPO(Adapter):
    name = "tinygrpo"
    conventions = Conventions(
        advantage_scale="group",
        advantage_eps=1e-4,
        aggregation="token_mean",
        kl_estimator="k3",
        kl_coef=GRPOConfig.beta,
    )

    def token_logprobs(self, logits, token_ids, temperature):
        return loss.token_logprobs(logits, token_ids, temperature)

    def completion_mask(self, completion_ids, eos_token_ids, pad_token_id):
        return loss.completion_mask(completion_ids, eos_token_ids)

    def advantages(self, rewards, group_ids):
        return group_advantages(rewards, group_ids)

    def kl(self, logprobs, ref_logprobs):
        return loss.kl(logprobs, ref_logprobs)

    def policy_loss(self, batch):
        value, metrics = loss.policy_loss(
            batch.logprobs, batch.old_logprobs, batch.ref_logprobs, batch.advantages, batch.mask, beta=GRPOConfig.beta
        )
        return LossOutput(value, metrics)
