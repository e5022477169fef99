"""How rlcanary calls train.py, whose functions it imports."""

import train

from rlcanary import Adapter, Conventions, LossOutput, NotProvided


class Canary(Adapter):
    name = "single-file-trainer"
    conventions = Conventions(
        advantage_ddof=1,
        advantage_eps=1e-6,
        singleton_group="zero",
        clip_low=0.2,
        clip_high=0.2,
        aggregation="token_mean",
        old_logprobs="trainer",
    )

    def token_logprobs(self, logits, token_ids, temperature):
        return train.token_logprobs(logits, token_ids, temperature)

    def completion_mask(self, completion_ids, eos_token_ids, pad_token_id):
        if len(eos_token_ids) > 1:
            raise NotProvided("train.py knows one end of sequence")
        return train.completion_mask(completion_ids, eos_token_ids[0])

    def advantages(self, rewards, group_ids):
        return train.group_advantages(rewards, group_ids)

    def policy_loss(self, batch):
        if batch.advantages.ndim > 1:
            raise NotProvided("train.py has an advantage per completion")
        return LossOutput(train.policy_loss(batch.logprobs, batch.old_logprobs, batch.advantages, batch.mask))
