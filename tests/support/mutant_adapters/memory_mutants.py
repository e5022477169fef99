"""Mistakes that show only where more than one call, row or group comes together: caches, counters, shared records."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlcanary import reference
from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.contract.adapter import Item
from rlcanary.contract.batch import CollatedBatch, Group
from rlcanary.reference.rollout import sample_group
from rlcanary.reference.step import forward_mode


class ScheduleByMicroBatch(ReferenceAdapter):
    """The schedule advances once per micro-batch of four rows."""

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        metrics = super().train_step(state, batch)
        for _ in range(4, len(batch.rewards), 4):
            state.scheduler.step()
        return metrics


class ReferenceScoredWithDropout(ReferenceAdapter):
    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        if state.ref_model is not None:
            with torch.no_grad(), forward_mode(state.ref_model, training=True):
                scores_BT = reference.completion_logprobs(state.ref_model, batch, self.conventions.temperature)
            batch = replace(batch, ref_logprobs=scores_BT)
        return super().train_step(state, batch)


class SmallStepsNeverSent(ReferenceAdapter):
    """A tensor is sent if it moved since the last sync, by more than a threshold."""

    def sync_weights(self, state: Any, engine: Any) -> None:
        last: dict[str, Tensor] = getattr(engine, "last", {})
        now = {name: weight.detach().clone() for name, weight in state.model.named_parameters()}
        engine.load_weights(
            (name, weight)
            for name, weight in now.items()
            if name not in last or (weight - last[name]).norm() > 2e-4 * last[name].norm()
        )
        engine.last = now
        engine.reset_prefix_cache()
        engine.version += 1


class SeedsWrittenIntoTheRequest(ReferenceAdapter):
    def rollout(self, engine: Any, items: list[Item], sampling: Mapping[str, Any]) -> list[Group]:
        assert isinstance(sampling, dict)

        async def sample() -> list[Group]:
            pending = []
            for number, item in enumerate(items):
                if sampling["seed"] is not None:
                    sampling["seed"] += number * sampling["n"]
                pending.append(sample_group(engine, item, sampling))
            return await asyncio.gather(*pending)

        return asyncio.run(sample())


class GroupedByItem(ReferenceAdapter):
    """Two groups of an item that was drawn twice become one."""

    def make_batch(self, groups: list[Group], pad_token_id: int) -> CollatedBatch:
        batch = super().make_batch(groups, pad_token_id)
        numbers = {item: number for number, item in enumerate(dict.fromkeys(batch.item_ids))}
        return replace(batch, group_ids=torch.tensor([numbers[item] for item in batch.item_ids]))


class SampledPaddingDropped(ReferenceAdapter):
    def render(self, messages: list[Mapping[str, Any]], tokenizer: Any) -> tuple[list[int], list[bool]]:
        def cleaned(message: Mapping[str, Any]) -> Mapping[str, Any]:
            kept = [token for token in message.get("token_ids", ()) if token != tokenizer.pad_token_id]
            return {**message, "token_ids": kept} if "token_ids" in message else message

        return super().render([cleaned(message) for message in messages], tokenizer)


class EpochsCountedFromTheStart(ReferenceAdapter):
    """A resumed process begins with the order of epoch 0."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: dict[tuple[int, int], int] = {}

    def data_order(self, n_items: int, epoch: int, rank: int, world_size: int) -> list[int]:
        place = sum(items == n_items for items, _ in self.begun)
        return super().data_order(n_items, self.begun.setdefault((n_items, epoch), place), rank, world_size)


class EvaluatesOnOldPrefixes(ReferenceAdapter):
    """The engine of the evaluation is kept, and its prefix cache with it."""

    def evaluate(self, state: Any) -> dict[str, float]:
        if not hasattr(state, "engine"):
            state.engine = self.new_engine(state.model)
        state.engine.load_weights(state.model.named_parameters())
        sampling = {"temperature": self.conventions.evaluation_temperature, "max_new_tokens": 8}
        completions = state.engine.generate([item.prompt_ids for item in state.eval_items], sampling)
        rewards = self.score(list(state.eval_items), [sampled.text for (sampled,) in completions])
        return {"reward": float(rewards.double().mean())}


CAUGHT_BY = {
    ScheduleByMicroBatch: "step.learning_rate_schedule",
    ReferenceScoredWithDropout: "step.reference_has_no_dropout",
    SmallStepsNeverSent: "sync.small_steps",
    SeedsWrittenIntoTheRequest: "rollout.inputs_untouched",
    GroupedByItem: "batch.rewards_and_identity",
    SampledPaddingDropped: "rendering.sampled_tokens_as_they_are",
    EpochsCountedFromTheStart: "order.repeatable",
    EvaluatesOnOldPrefixes: "evaluation.current_weights",
}
MEMORY_MUTANTS = list(CAUGHT_BY)
