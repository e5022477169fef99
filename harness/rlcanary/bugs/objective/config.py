"""Bugs in the effect of settings."""

from rlcanary import reference
from rlcanary.bugs.museum import Bug
from rlcanary.contract.batch import LossOutput, PolicyBatch


class KlSwitchesTied(Bug):
    id = "verl.kl-switches-tied"
    source = "verl 072fc9fee, #644, survey V15"
    effect = "switching the KL loss off switches a KL penalty in the reward on"

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        coefficient = self.conventions.kl_coef or 1e-2
        return reference.policy_loss(batch, self.conventions.replace(kl_coef=coefficient))


class ThresholdNeverApplied(Bug):
    id = "nemo-rl.threshold-never-applied"
    source = "NeMo RL b59165262, #3671, survey N35"
    effect = "outlier sequences are trained although the filter is configured"

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        return reference.policy_loss(batch, self.conventions.replace(importance_level="none"))


class ZeroTakenForMissing(Bug):
    id = "trl.zero-taken-for-missing"
    source = "TRL c24964d0a, #6423, survey T34"
    effect = "an explicit 0 becomes the default"

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        coefficient = self.conventions.entropy_coef or 0.01
        return reference.policy_loss(batch, self.conventions.replace(entropy_coef=coefficient))


class EmptyRowsInTheDenominator(Bug):
    id = "verl.empty-rows-in-denominator"
    source = "verl 4424616d7, #3915, survey V40"
    effect = "fully masked sequences still count in the mean and shrink the loss"

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        counting_all = {"sequence_mean_nonempty": "sequence_mean", "sequence_sum_nonempty": "sequence_sum"}
        aggregation = counting_all.get(self.conventions.aggregation, self.conventions.aggregation)
        return reference.policy_loss(batch, self.conventions.replace(aggregation=aggregation))


class NormalisedBySequences(Bug):
    id = "prime-rl.normalised-by-sequences"
    source = "prime-rl 7e0673020, #2034, survey P08"
    effect = "the learning rate grows with the length of the completions"

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        swap = {"token_mean": "sequence_sum"}
        aggregation = swap.get(self.conventions.aggregation, self.conventions.aggregation)
        return reference.policy_loss(batch, self.conventions.replace(aggregation=aggregation))


class SequencesDividedByLength(Bug):
    id = "verl.token-sum-divided-by-length"
    source = "verl 4d722b176, #931, survey V11"
    effect = "the sum over a sequence's tokens is divided by its length: two options are the same"

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        swap = {"sequence_sum": "sequence_mean"}
        aggregation = swap.get(self.conventions.aggregation, self.conventions.aggregation)
        return reference.policy_loss(batch, self.conventions.replace(aggregation=aggregation))
