"""Bugs in the ends of completions."""

from dataclasses import replace

from rlcanary import reference
from rlcanary.bugs.museum import Bug
from rlcanary.contract.batch import LossOutput, PolicyBatch


class AnyOverAllRows(Bug):
    id = "torchrl.any-eos-in-batch"
    source = "torchrl 665e2773c, #4082, survey R04"
    effect = "rows without a token pass the check and count as a loss of zero"

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        if not self.conventions.aggregation.endswith("_nonempty"):
            return super().policy_loss(batch)
        has_tokens_B = batch.mask.any().expand(len(batch.mask))
        counted = replace(batch, global_sequences=float(has_tokens_B.sum()))
        return reference.policy_loss(counted, self.conventions)
