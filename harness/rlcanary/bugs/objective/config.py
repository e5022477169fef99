"""Bugs in the effect of settings."""

from rlcanary import reference
from rlcanary.bugs.museum import Bug
from rlcanary.contract.batch import LossOutput, PolicyBatch


class KlSwitchesTied(Bug):
    id = "V15"
    source = "verl 072fc9fee, #644"
    effect = "who switches the KL loss off gets a KL penalty all the same"

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        coefficient = self.conventions.kl_coef or 1e-2
        return reference.policy_loss(batch, self.conventions.replace(kl_coef=coefficient))


class ThresholdNeverApplied(Bug):
    id = "N35"
    source = "NeMo RL b59165262, #3671"
    effect = "outlier sequences are trained although the filter is configured"

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        return reference.policy_loss(batch, self.conventions.replace(importance_level="none"))


class ZeroTakenForMissing(Bug):
    id = "T34"
    source = "TRL c24964d0a, #6423"
    effect = "an explicit 0 becomes the default"

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        coefficient = self.conventions.entropy_coef or 0.01
        return reference.policy_loss(batch, self.conventions.replace(entropy_coef=coefficient))


class EmptyRowsInTheDenominator(Bug):
    id = "V40"
    source = "verl 4424616d7, #3915"
    effect = "sequences that were masked out as a whole dilute the others"

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        counting_all = {"sequence_mean_nonempty": "sequence_mean", "sequence_sum_nonempty": "sequence_sum"}
        aggregation = counting_all.get(self.conventions.aggregation, self.conventions.aggregation)
        return reference.policy_loss(batch, self.conventions.replace(aggregation=aggregation))


class NormalisedBySequences(Bug):
    id = "P08"
    source = "prime-rl 7e0673020, #2034"
    effect = "the learning rate grows with the length of the completions"

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        swap = {"token_mean": "sequence_sum"}
        aggregation = swap.get(self.conventions.aggregation, self.conventions.aggregation)
        return reference.policy_loss(batch, self.conventions.replace(aggregation=aggregation))


class SequencesDividedByLength(Bug):
    id = "V11"
    source = "verl 4d722b176, #931"
    effect = "the sum over a sequence's tokens is divided by its length: two options are the same"

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        swap = {"sequence_sum": "sequence_mean"}
        aggregation = swap.get(self.conventions.aggregation, self.conventions.aggregation)
        return reference.policy_loss(batch, self.conventions.replace(aggregation=aggregation))
