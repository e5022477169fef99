"""How rlcanary calls this codebase. `rlcanary init` wrote the file, and the team put calls of its functions into it."""

from teamrl.advantages import group_advantages
from teamrl.losses import policy_loss

from rlcanary import Adapter, Conventions, LossOutput


class Canary(Adapter):
    name = "teamrl"
    conventions = Conventions(
        advantage_ddof=1, advantage_eps=1e-6, singleton_group="zero", clip_high=0.28, aggregation="token_mean"
    )

    def advantages(self, rewards, group_ids):
        return group_advantages(rewards, group_ids)

    def policy_loss(self, batch):
        return LossOutput(policy_loss(batch.logprobs, batch.old_logprobs, batch.advantages, batch.mask))
