"""Bugs in the critic and its loss."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from rlcanary.bugs.museum import Bug
from rlcanary.contract.batch import CollatedBatch, LossOutput
from rlcanary.contract.records.credit import ValueBatch


class ValuesOneEarly(Bug):
    id = "trl.values-one-early"
    source = "TRL 8070ac041, #137, survey T48"
    effect = "each action is judged against the value of the state before the one that it was drawn from"

    def values(self, model: Any, batch: CollatedBatch) -> Tensor:
        return super().values(model, replace(batch, completion_starts=(batch.completion_starts - 1).clamp(min=1)))


class ValuesOverTemperature(Bug):
    id = "slime.values-over-temperature"
    source = "slime d9d149dce, #1928"
    effect = "values are divided by the temperature of the rollouts, as logits are"

    def values(self, model: Any, batch: CollatedBatch) -> Tensor:
        return super().values(model, batch) / self.conventions.temperature


class FactorOfOneHalf(Bug):
    id = "verl.value-loss-factor"
    source = "verl 6e15bbe25, #2016, survey V24"
    effect = "the critic's gradient is twice the documented one"

    def value_loss(self, batch: ValueBatch) -> LossOutput:
        output = super().value_loss(batch)
        return LossOutput(output.loss / self.conventions.value_coef, output.metrics)


class MeanOfTheMicroBatch(Bug):
    id = "pipelinerl.value-loss-per-micro-batch"
    source = "PipelineRL f92a7e73e"
    effect = "the weight of the critic's loss depends on the number of micro-batches"

    def value_loss(self, batch: ValueBatch) -> LossOutput:
        return super().value_loss(replace(batch, global_tokens=None, global_sequences=None))
