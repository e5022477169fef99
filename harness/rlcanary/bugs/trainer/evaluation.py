"""Bugs in evaluation."""

from dataclasses import replace
from typing import Any

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.bugs.museum import Bug
from rlcanary.contract.adapter import Item


class ScheduleMovesInEvaluation(Bug):
    id = "N05"
    source = "NeMo RL 4a0989642, #446"
    effect = "each validation moves the learning-rate schedule on"

    def evaluate(self, state: Any) -> dict[str, float]:
        metrics = super().evaluate(state)
        state.scheduler.step()
        return metrics


class LeftInEvaluationMode(Bug):
    id = "O20"
    source = "OpenRLHF d906ca4b"
    effect = "after an evaluation the policy trains without dropout until the epoch ends"

    def evaluate(self, state: Any) -> dict[str, float]:
        state.model.eval()
        return super().evaluate(state)


class EvaluatedAtTrainingTemperature(Bug):
    id = "V16"
    source = "verl af15ae12f, #1181"
    effect = "validation is sampled at the temperature of training: its accuracy is another one each time"

    def evaluate(self, state: Any) -> dict[str, float]:
        trained_at = self.conventions.temperature
        return ReferenceAdapter(self.conventions.replace(evaluation_temperature=trained_at)).evaluate(state)


class AccuracyOfExactlyOne(Bug):
    id = "N28"
    source = "NeMo RL e3cfb11ae, #1619"
    effect = "validation counts the rewards that equal 1.0: it reads 0 for shaped rewards"

    def evaluate(self, state: Any) -> dict[str, float]:
        def exactly_one(item: Item) -> Item:
            return replace(item, reward=lambda text: float(item.reward(text) == 1.0))

        return super().evaluate(replace(state, eval_items=[exactly_one(item) for item in state.eval_items]))
