"""Bugs in evaluation."""

from dataclasses import replace
from typing import Any

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.bugs.museum import Bug
from rlcanary.contract.adapter import Item


class ScheduleMovesInEvaluation(Bug):
    id = "nemo-rl.schedule-moves-in-evaluation"
    source = "NeMo RL 4a0989642, #446, survey N05"
    effect = "each validation advances the learning-rate schedule"

    def evaluate(self, state: Any) -> dict[str, float]:
        metrics = super().evaluate(state)
        state.scheduler.step()
        return metrics


class LeftInEvaluationMode(Bug):
    id = "openrlhf.left-in-evaluation-mode"
    source = "OpenRLHF d906ca4b, survey O20"
    effect = "after an evaluation the policy trains without dropout until the epoch ends"

    def evaluate(self, state: Any) -> dict[str, float]:
        state.model.eval()
        return super().evaluate(state)


class EvaluatedAtTrainingTemperature(Bug):
    id = "verl.evaluated-at-training-temperature"
    source = "verl af15ae12f, #1181, survey V16"
    effect = "validation is sampled at the training temperature: its accuracy is random"

    def evaluate(self, state: Any) -> dict[str, float]:
        trained_at = self.conventions.temperature
        return ReferenceAdapter(self.conventions.replace(evaluation_temperature=trained_at)).evaluate(state)


class AccuracyOfExactlyOne(Bug):
    id = "nemo-rl.accuracy-of-exactly-one"
    source = "NeMo RL e3cfb11ae, #1619, survey N28"
    effect = "validation counts rewards equal to 1.0: it reports 0 for shaped rewards"

    def evaluate(self, state: Any) -> dict[str, float]:
        def exactly_one(item: Item) -> Item:
            return replace(item, reward=lambda text: float(item.reward(text) == 1.0))

        return super().evaluate(replace(state, eval_items=[exactly_one(item) for item in state.eval_items]))
