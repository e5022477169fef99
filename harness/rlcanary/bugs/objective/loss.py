"""Bugs in policy losses."""

from dataclasses import replace

from rlcanary import reference
from rlcanary.bugs.museum import Bug
from rlcanary.contract.batch import LossOutput, PolicyBatch


class AdvantagesAsMask(Bug):
    id = "verl.advantages-as-mask"
    source = "verl fbec86d7f, #2513, survey V28"
    effect = "the loss is weighted by the square of the advantage: bad completions are reinforced"

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        return reference.policy_loss(replace(batch, advantages=batch.advantages.square()), self.conventions)


class AllAdvantagesForAll(Bug):
    id = "prime-rl.advantages-summed"
    source = "prime-rl 8d77a2cd9, survey P04"
    effect = "every completion gets the sum of all advantages"

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        total = batch.advantages.sum(dim=0, keepdim=True).expand_as(batch.advantages)
        return reference.policy_loss(replace(batch, advantages=total), self.conventions)


class MaskByMultiplication(Bug):
    id = "verl.mask-by-multiplication"
    source = "verl 5cbad8379, #2377, survey V27"
    effect = "NaN at a padding position makes the whole loss NaN"

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        output = super().policy_loss(batch)
        padding = (batch.logprobs * ~batch.mask).sum() + (batch.old_logprobs * ~batch.mask).sum()
        return LossOutput(output.loss + 0 * padding, output.metrics)


class KlOverPadding(Bug):
    id = "openrlhf.kl-over-padding"
    source = "OpenRLHF cfd42d94, #983, survey O15"
    effect = "the logged KL is too small by the fraction of padding"

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        output = super().policy_loss(batch)
        share = float(batch.mask.float().mean())
        return LossOutput(output.loss, {**output.metrics, "kl": output.metrics["kl"] * share})


class OldLogprobsNotReindexed(Bug):
    id = "trl.old-logprobs-not-reindexed"
    source = "TRL 941fb332c, #4454, survey T23"
    effect = "after sorting, the ratio compares the logprobs of different completions"

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        order = batch.mask.sum(dim=1).argsort(descending=True, stable=True)
        return super().policy_loss(replace(batch.rows(order), old_logprobs=batch.old_logprobs))
