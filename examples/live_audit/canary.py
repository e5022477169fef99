"""Tells rlcanary what this codebase declares, and where its loss is."""

from loss import policy_loss

from rlcanary import Adapter, LossOutput
from rlcanary.contract.presets import DAPO


class Canary(Adapter):
    name = "live-audit-example"
    conventions = DAPO.replace(old_logprobs="trainer")

    def policy_loss(self, batch):
        return LossOutput(policy_loss(batch.logprobs, batch.old_logprobs, batch.advantages, batch.mask))
