"""Bugs in preference losses and in what they log."""

from rlcanary import reference
from rlcanary.bugs.museum import Bug
from rlcanary.contract.batch import LossOutput
from rlcanary.contract.records.other_losses import PreferenceBatch


class AccuracyOfMeans(Bug):
    id = "open-instruct.accuracy-of-means"
    source = "open-instruct 6624eba5e, #374, survey I33"
    effect = "the mean rewards are compared instead of the pairs: the accuracy of a batch is 0 or 1"

    def preference_loss(self, batch: PreferenceBatch) -> LossOutput:
        output = super().preference_loss(batch)
        return LossOutput(
            output.loss, {**output.metrics, "reward_accuracy": float(output.metrics["reward_margin"] > 0)}
        )


class RewardsAgainstTheReference(Bug):
    id = "open-instruct.rewards-of-another-loss"
    source = "open-instruct 6624eba5e, #374, survey I33"
    effect = "SimPO, which has no reference, logs the rewards of DPO"

    def preference_loss(self, batch: PreferenceBatch) -> LossOutput:
        output = super().preference_loss(batch)
        if batch.ref_chosen_logprobs is None:
            return output
        dpo = self.conventions.replace(preference_reference=True, preference_length_normalised=False)
        logged = reference.preference_loss(batch, dpo).metrics
        return LossOutput(output.loss, {**logged, "loss": output.metrics["loss"]})


class MeanOfNothing(Bug):
    id = "open-instruct.mean-of-nothing"
    source = "open-instruct 94a17b99a, #1685, survey I34"
    effect = "the averaged logprob of a completion without a trained token is 0 / 0: the loss of its batch is NaN"

    def preference_loss(self, batch: PreferenceBatch) -> LossOutput:
        output = super().preference_loss(batch)
        if self.conventions.preference_length_normalised:
            for mask_BT in (batch.chosen_mask, batch.rejected_mask):
                tokens = mask_BT.any(dim=1).float().min()
                output = LossOutput(output.loss * tokens / tokens, output.metrics)
        return output
