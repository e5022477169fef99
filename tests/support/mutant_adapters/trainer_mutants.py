"""Mistakes for the checks of trainers and engines that no shipped bug in the museum trips, and trainers without mistakes."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from rlcanary import reference
from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.checks.worlds.samples import trainer_logprobs
from rlcanary.contract.adapter import TrainState
from rlcanary.contract.batch import CollatedBatch, Completion
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.presets import GRPO


class GradientsAccumulate(ReferenceAdapter):
    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        policy = reference.policy_batch(state.model, state.ref_model, batch, self.conventions)
        reference.policy_loss(policy, self.conventions).loss.backward()
        state.optimizer.step()
        state.scheduler.step()
        return {}


class RewardsCentredInPlace(ReferenceAdapter):
    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        batch.rewards -= batch.rewards.mean()
        return super().train_step(state, batch)


class ReferenceFollowsPolicy(ReferenceAdapter):
    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        metrics = super().train_step(state, batch)
        if state.ref_model is not None:
            state.ref_model.load_state_dict(state.model.state_dict())
        return metrics


class DependsOnWhatRanBefore(ReferenceAdapter):
    steps = 0

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        self.steps += 1
        return super().train_step(state, replace(batch, old_logprobs=batch.old_logprobs - 0.05 * self.steps))


class DividedByTheWidth(ReferenceAdapter):
    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        width = batch.completion_ids.shape[1]
        by_width = self.conventions.replace(aggregation="constant", aggregation_constant=width)
        return reference.train_step(state, batch, by_width)


class SortedWithoutItsRewards(ReferenceAdapter):
    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        order = batch.completion_mask.sum(dim=1).argsort(descending=True, stable=True)
        return super().train_step(state, replace(batch, rewards=batch.rewards[order]))


class MomentsForgotten(ReferenceAdapter):
    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        metrics = super().train_step(state, batch)
        state.optimizer.state.clear()
        return metrics


class Ascends(ReferenceAdapter):
    def new_state(self, model: Any, ref_model: Any, learning_rate: float) -> Any:
        state = super().new_state(model, ref_model, learning_rate)
        state.optimizer.param_groups[0]["maximize"] = True
        return state


class TwoStepsPerBatch(ReferenceAdapter):
    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        super().train_step(state, batch)
        return super().train_step(state, batch)


class DrawsInEvaluation(ReferenceAdapter):
    def evaluate(self, state: Any) -> dict[str, float]:
        torch.rand(1)
        return super().evaluate(state)


class EvaluatesTheFirstWeights(ReferenceAdapter):
    engine = None

    def new_engine(self, model: Any) -> Any:
        self.engine = self.engine or super().new_engine(model)
        return self.engine


class EndsWithoutEos(ReferenceAdapter):
    def generate(self, engine: Any, prompts: list[list[int]], sampling: Mapping[str, Any]) -> list[list[Completion]]:
        def stripped(completion: Completion) -> Completion:
            keep = len(completion.token_ids) - (completion.finish_reason == "stop")
            logprobs = completion.logprobs or []
            return replace(completion, token_ids=completion.token_ids[:keep], logprobs=logprobs[:keep])

        groups = super().generate(engine, prompts, sampling)
        return [[stripped(completion) for completion in group] for group in groups]


class TruncatedSaysStop(ReferenceAdapter):
    def generate(self, engine: Any, prompts: list[list[int]], sampling: Mapping[str, Any]) -> list[list[Completion]]:
        groups = super().generate(engine, prompts, sampling)
        return [[replace(completion, finish_reason="stop") for completion in group] for group in groups]


class ShortestPromptFirst(ReferenceAdapter):
    def generate(self, engine: Any, prompts: list[list[int]], sampling: Mapping[str, Any]) -> list[list[Completion]]:
        return super().generate(engine, sorted(prompts, key=len), sampling)


class GreedyTakenForUnset(ReferenceAdapter):
    def generate(self, engine: Any, prompts: list[list[int]], sampling: Mapping[str, Any]) -> list[list[Completion]]:
        return super().generate(engine, prompts, {**sampling, "temperature": sampling["temperature"] or 1.0})


class TopKFromTheModelsConfig(ReferenceAdapter):
    """Draws from the 50 likeliest tokens only and reports the logprobs of the whole distribution."""

    def generate(self, engine: Any, prompts: list[list[int]], sampling: Mapping[str, Any]) -> list[list[Completion]]:
        @cache
        def unfiltered(prompt: tuple[int, ...], token_ids: tuple[int, ...]) -> list[float]:
            temperature = sampling["temperature"] or 1.0
            return trainer_logprobs(engine.model, prompt, token_ids, temperature).tolist()

        filtered = super().generate(engine, prompts, {**sampling, "top_k": sampling["top_k"] or 50})
        return [
            [replace(drawn, logprobs=unfiltered(tuple(prompt), tuple(drawn.token_ids))) for drawn in group]
            for prompt, group in zip(prompts, filtered, strict=True)
        ]


class CountedInFinally(ReferenceAdapter):
    def sync_weights(self, state: Any, engine: Any) -> None:
        try:
            engine.load_weights(state.model.named_parameters())
            engine.reset_prefix_cache()
        finally:
            engine.version += 1


class LostConnectionSwallowed(ReferenceAdapter):
    def sync_weights(self, state: Any, engine: Any) -> None:
        try:
            super().sync_weights(state, engine)
        except ConnectionError:
            engine.version += 1


class CastForTheWireInPlace(ReferenceAdapter):
    def sync_weights(self, state: Any, engine: Any) -> None:
        for parameter in state.model.parameters():
            parameter.data = parameter.data.bfloat16().float()
        super().sync_weights(state, engine)


class CopyMadeAtTheStart(ReferenceAdapter):
    sent: Any = None

    def sync_weights(self, state: Any, engine: Any) -> None:
        self.sent = self.sent or copy.deepcopy(dict(state.model.named_parameters()))
        engine.load_weights(self.sent.items())
        engine.reset_prefix_cache()
        engine.version += 1


class NoiseAfterTheFirstUpdate(ReferenceAdapter):
    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        metrics = super().train_step(state, batch)
        random = torch.Generator().manual_seed(0)
        for parameter in state.model.parameters():
            parameter.data = torch.randn(parameter.shape, generator=random) * 0.3
        return metrics


class HeadIsNotLoaded(ReferenceAdapter):
    def new_state(self, model: Any, ref_model: Any, learning_rate: float) -> Any:
        torch.nn.init.normal_(model.lm_head.weight, std=0.3, generator=torch.Generator().manual_seed(0))
        return super().new_state(model, ref_model, learning_rate)


class HalvedBelowItsBound(ReferenceAdapter):
    """Hidden by a bound that every gradient is longer than."""

    def __init__(self, conventions: Conventions = GRPO) -> None:
        super().__init__(conventions.replace(max_grad_norm=1.0))

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        policy = reference.policy_batch(state.model, state.ref_model, batch, self.conventions)
        output = reference.policy_loss(policy, self.conventions)
        return {**output.metrics, "lr": reference.descend(state, 0.5 * output.loss, self.conventions)["lr"]}


class ScheduleAheadOfItsUpdate(ReferenceAdapter):
    """Warms up over four updates, and the schedule moves before the optimizer does."""

    def new_state(self, model: Any, ref_model: Any, learning_rate: float) -> Any:
        state = super().new_state(model, ref_model, learning_rate)
        state.scheduler = torch.optim.lr_scheduler.LambdaLR(state.optimizer, lambda k: min(1, (k + 1) / 4))
        return state

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        state.scheduler.step()
        return super().train_step(replace(state, scheduler=_Still()), batch)


class _Still:
    def step(self) -> None:
        """Stays where it is."""


class SwapsWeightsInEvaluation(ReferenceAdapter):
    """Moves other weights in at one evaluation and out at the next."""

    def evaluate(self, state: Any) -> dict[str, float]:
        metrics = super().evaluate(state)
        with torch.no_grad():
            state.model.lm_head.weight.neg_()
        return metrics


class EveryOtherEvaluationItemLeftOut(ReferenceAdapter):
    def evaluate(self, state: Any) -> dict[str, float]:
        return super().evaluate(replace(state, eval_items=list(state.eval_items)[::2]))


class CompletionsGoToOtherItems(ReferenceAdapter):
    """The shortest prompt is answered first, and its answer is rewarded as that of the first item."""

    def evaluate(self, state: Any) -> dict[str, float]:
        prompts = sorted((item.prompt_ids for item in state.eval_items), key=len)
        items = [replace(item, prompt_ids=prompt) for item, prompt in zip(state.eval_items, prompts, strict=True)]
        return super().evaluate(replace(state, eval_items=items))


class NoEntropyBonus(ReferenceAdapter):
    """The loss has the bonus; the step calls it without."""

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        return reference.train_step(state, batch, self.conventions.replace(entropy_coef=0.0))


CAUGHT_BY = {
    NoEntropyBonus: "step.declared_gradient",
    NoiseAfterTheFirstUpdate: "step.same_policy",
    HeadIsNotLoaded: "sync.same_policy",
    HalvedBelowItsBound: "step.declared_gradient",
    ScheduleAheadOfItsUpdate: "step.learning_rate_schedule",
    SwapsWeightsInEvaluation: "evaluation.training_goes_on",
    EveryOtherEvaluationItemLeftOut: "evaluation.reward",
    CompletionsGoToOtherItems: "evaluation.reward",
    GradientsAccumulate: "step.gradients_start_anew",
    RewardsCentredInPlace: "step.batch_untouched",
    ReferenceFollowsPolicy: "step.reference_model_stays",
    DependsOnWhatRanBefore: "step.repeatable",
    DividedByTheWidth: "step.padding",
    SortedWithoutItsRewards: "step.row_order",
    MomentsForgotten: "step.only_the_optimizer_moves",
    Ascends: "step.direction",
    TwoStepsPerBatch: "step.declared_gradient",
    DrawsInEvaluation: "evaluation.random_state",
    EvaluatesTheFirstWeights: "evaluation.current_weights",
    EndsWithoutEos: "parity.endings",
    TruncatedSaysStop: "parity.endings",
    ShortestPromptFirst: "parity.greedy",
    GreedyTakenForUnset: "parity.greedy",
    TopKFromTheModelsConfig: "parity.distribution",
    CountedInFinally: "sync.interrupted",
    LostConnectionSwallowed: "sync.interrupted",
    CastForTheWireInPlace: "sync.trainer_untouched",
    CopyMadeAtTheStart: "sync.every_parameter",
}


class DropoutAndSampledEvaluation(ReferenceAdapter):
    """Declares both, and does as it says."""

    def __init__(self, conventions: Conventions = GRPO) -> None:
        super().__init__(conventions.replace(training_dropout=True, evaluation_temperature=0.7))


class DropoutLeftOut(DropoutAndSampledEvaluation):
    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        return reference.train_step(state, batch, self.conventions.replace(training_dropout=False))


class EvaluationModeNotUndone(DropoutAndSampledEvaluation):
    """Leaves the model in evaluation mode, in which the next update then runs."""

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        drops_out = self.conventions.training_dropout and state.model.training
        metrics = reference.train_step(state, batch, self.conventions.replace(training_dropout=drops_out))
        state.model.eval()
        return metrics


class EvaluatesGreedily(DropoutAndSampledEvaluation):
    def evaluate(self, state: Any) -> dict[str, float]:
        return ReferenceAdapter(self.conventions.replace(evaluation_temperature=0.0)).evaluate(state)


class EvaluatesMoreLively(DropoutAndSampledEvaluation):
    def evaluate(self, state: Any) -> dict[str, float]:
        return ReferenceAdapter(self.conventions.replace(evaluation_temperature=1.0)).evaluate(state)


# What they declare and ignore, on top of `DropoutAndSampledEvaluation`.
IGNORED = {
    DropoutLeftOut: "step.dropout_is_on",
    EvaluationModeNotUndone: "step.training_mode",
    EvaluatesGreedily: "evaluation.temperature",
    EvaluatesMoreLively: "evaluation.temperature",
}
TRAINER_MUTANTS = [*CAUGHT_BY, *IGNORED]


class PlainGradientDescent(ReferenceAdapter):
    def new_state(self, model: Any, ref_model: Any, learning_rate: float) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
        return TrainState(model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0), ref_model)


class TwoLearningRatesAndWeightDecay(ReferenceAdapter):
    def new_state(self, model: Any, ref_model: Any, learning_rate: float) -> Any:
        head, body = [], []
        for name, parameter in model.named_parameters():
            (head if name == "lm_head.weight" else body).append(parameter)
        groups = [{"params": body, "weight_decay": 0.1}, {"params": head, "lr": learning_rate / 2}]
        optimizer = torch.optim.AdamW(groups, lr=learning_rate)
        return TrainState(model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0), ref_model)


class MicroBatches(ReferenceAdapter):
    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        policy = reference.policy_batch(state.model, state.ref_model, batch, self.conventions)
        output = reference.accumulated_loss(policy, 2, self.conventions)
        return {**output.metrics, **reference.descend(state, output.loss, self.conventions)}


class RetriesALostSync(ReferenceAdapter):
    def sync_weights(self, state: Any, engine: Any) -> None:
        try:
            engine.load_weights(state.model.named_parameters())
        except ConnectionError:
            engine.load_weights(state.model.named_parameters())
        engine.reset_prefix_cache()
        engine.version += 1


class SyncsInChunks(ReferenceAdapter):
    def sync_weights(self, state: Any, engine: Any) -> None:
        weights = list(state.model.state_dict().items())
        for start in range(0, len(weights), 5):
            engine.load_weights(weights[start : start + 5])
        engine.reset_prefix_cache()
        engine.version += 1


class EvaluatesInEvaluationMode(ReferenceAdapter):
    def evaluate(self, state: Any) -> dict[str, float]:
        was_training = state.model.training
        state.model.eval()
        metrics = super().evaluate(state)
        state.model.train(was_training)
        return metrics


class SamplesInTwoRequests(ReferenceAdapter):
    def generate(self, engine: Any, prompts: list[list[int]], sampling: Mapping[str, Any]) -> list[list[Completion]]:
        seed, n = sampling["seed"], sampling["n"]
        parts = []
        for part, count in enumerate((n - n // 2, n // 2)):
            if count:
                own_seed = None if seed is None else 1000 * seed + part
                parts.append(super().generate(engine, prompts, {**sampling, "n": count, "seed": own_seed}))
        return [[completion for group in groups for completion in group] for groups in zip(*parts, strict=True)]


class OwnWarmup(ReferenceAdapter):
    """Has a schedule of its own, and keeps it where nobody can take it away."""

    def new_state(self, model: Any, ref_model: Any, learning_rate: float) -> Any:
        state = super().new_state(model, ref_model, learning_rate)
        state.scheduler = torch.optim.lr_scheduler.LambdaLR(state.optimizer, lambda k: min(1, (k + 1) / 4))
        state.steps = [state.scheduler]
        return state

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        return super().train_step(replace(state, scheduler=state.steps[0]), batch)


class ClearsGradientsInEvaluation(ReferenceAdapter):
    def evaluate(self, state: Any) -> dict[str, float]:
        state.optimizer.zero_grad()
        return super().evaluate(state)


class OldLogprobsByTheTrainer(ReferenceAdapter):
    def __init__(self) -> None:
        super().__init__(GRPO.replace(old_logprobs="trainer", max_grad_norm=1.0, temperature=0.7))

    def configured(self, **changes: Any) -> Any:
        return ReferenceAdapter(self.conventions.replace(**changes))

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        return super().train_step(state, replace(batch, old_logprobs=None))


CORRECT = [
    OwnWarmup,
    ClearsGradientsInEvaluation,
    PlainGradientDescent,
    TwoLearningRatesAndWeightDecay,
    MicroBatches,
    RetriesALostSync,
    SyncsInChunks,
    EvaluatesInEvaluationMode,
    SamplesInTwoRequests,
    OldLogprobsByTheTrainer,
]
