"""Mistakes that only hostile inputs show: tool tokens, earlier requests, ends that come at once, odd orders of arrival."""

import asyncio
import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlcanary import reference
from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.contract.adapter import Item
from rlcanary.contract.batch import CollatedBatch, Completion, Group, LossOutput, PolicyBatch


def _without_tool_tokens(batch: CollatedBatch) -> CollatedBatch:
    attended_BS = batch.attention_mask.clone()
    for row, start in enumerate(batch.completion_starts.tolist()):
        width = min(batch.completion_mask.shape[1], attended_BS.shape[1] - start)
        trained_T = batch.completion_mask[row, :width]
        # Padding of the completion is not attended either way.
        attended_BS[row, start : start + width] &= trained_T
    return replace(batch, attention_mask=attended_BS)


class ToolTokensUnattended(ReferenceAdapter):
    """Takes the mask of what is trained for the mask of what is attended."""

    def completion_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        attended = _without_tool_tokens(batch)
        output = model(
            input_ids=batch.input_ids, attention_mask=attended.attention_mask, position_ids=batch.position_ids
        )
        logprobs_BT = torch.full(batch.completion_ids.shape, torch.nan)
        for row, start in enumerate(batch.completion_starts.tolist()):
            length = min(batch.completion_ids.shape[1], batch.input_ids.shape[1] - start)
            ids_L = batch.completion_ids[row, :length]
            scores_LV = (output.logits[row, start - 1 : start - 1 + length] / temperature).log_softmax(dim=-1)
            logprobs_BT[row, :length] = scores_LV.gather(1, ids_L.unsqueeze(1)).squeeze(1)
        return logprobs_BT


class RewardOfToolTokens(ReferenceAdapter):
    """Trains on every token of a completion, those of tools included."""

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        width = batch.completion_mask.shape[1]
        attended_B = batch.attention_mask.cumsum(dim=1).gather(1, batch.completion_starts.unsqueeze(1)).squeeze(1) - 1
        lengths_B1 = (batch.attention_mask.sum(dim=1) - attended_B).unsqueeze(1)
        mask_BT = torch.arange(width) < lengths_B1
        old_BT = None if batch.old_logprobs is None else batch.old_logprobs.nan_to_num(-1.0)
        return super().train_step(state, replace(batch, completion_mask=mask_BT, old_logprobs=old_BT))


class FirstTemperatureStays(ReferenceAdapter):
    """The engine's processor of logits is made with the first request."""

    def new_engine(self, model: Any) -> Any:
        engine = super().new_engine(model)
        engine.first = None
        return engine

    def generate(self, engine: Any, prompts: list[list[int]], sampling: Mapping[str, Any]) -> list[list[Completion]]:
        engine.first = engine.first or sampling
        return super().generate(engine, prompts, {**sampling, "temperature": engine.first["temperature"]})


class NeverEndsAtOnce(ReferenceAdapter):
    """A completion has at least two tokens."""

    def generate(self, engine: Any, prompts: list[list[int]], sampling: Mapping[str, Any]) -> list[list[Completion]]:
        wanted, ends = sampling["n"], sampling["eos_token_ids"] or ()
        groups = super().generate(engine, prompts, {**sampling, "n": 3 * wanted} if ends else sampling)
        if not ends:
            return groups
        return [[each for each in group if each.token_ids[0] not in ends][:wanted] for group in groups]


class GroupsAsTheyArrive(ReferenceAdapter):
    """Groups are collected as their requests finish, and sorted back by the order that the scripts of old had."""

    def rollout(self, engine: Any, items: list[Item], sampling: Mapping[str, Any]) -> list[Group]:
        arrived: list[Group] = []

        async def one(item: Item) -> None:
            completions = await engine.agenerate(item.prompt_ids, sampling)
            rewards = self.score([item] * len(completions), [str(each.text) for each in completions]).tolist()
            arrived.append(Group(item.prompt_ids, completions, rewards, item_id=item.id, policy_version=0))

        async def everything() -> None:
            await asyncio.gather(*map(one, items))

        asyncio.run(everything())
        return arrived[::-1]


class LengthUpToTheLastTrainedToken(ReferenceAdapter):
    """The mean of a row divides by the place of its last trained token."""

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        output = super().policy_loss(batch)
        places_T = torch.arange(1, batch.mask.shape[1] + 1)
        share = batch.mask.sum() / (batch.mask * places_T).amax(dim=1).sum().clamp(min=1)
        return LossOutput(output.loss * share, output.metrics)


class AdvantagesNeverZero(ReferenceAdapter):
    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        return super().policy_loss(replace(batch, advantages=batch.advantages + 0.01))


class EntropyNeverFilledIn(ReferenceAdapter):
    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        output = super().policy_loss(batch)
        return LossOutput(output.loss, {**output.metrics, "entropy": 0.0})


class WeightsOfTheOther(ReferenceAdapter):
    """The correction divides by the trainer's probability, and is a little off throughout."""

    def importance_weights(self, trainer_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> Tensor:
        return super().importance_weights(trainer_logprobs, sampler_logprobs, mask) * 0.9

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        if batch.sampler_logprobs is not None:
            mirrored_BT = 2 * batch.old_logprobs - batch.sampler_logprobs
            batch = replace(batch, sampler_logprobs=mirrored_BT)
        return super().policy_loss(batch)


class RewardsUncentred(ReferenceAdapter):
    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        return reference.train_step(state, batch, self.conventions.replace(advantage_baseline="none"))


class SyncSkippedAfterEvaluation(ReferenceAdapter):
    """A sync is skipped where nothing is marked as changed, and an evaluation clears the mark that an update sets."""

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        state.is_changed = True
        return super().train_step(state, batch)

    def evaluate(self, state: Any) -> dict[str, float]:
        state.is_changed = False
        return super().evaluate(state)

    def sync_weights(self, state: Any, engine: Any) -> None:
        if getattr(state, "is_changed", True):
            super().sync_weights(state, engine)
        else:
            engine.version += 1


class FirstWeightsPutBack(ReferenceAdapter):
    """The weights that are put back after an evaluation are those of the first evaluation."""

    def evaluate(self, state: Any) -> dict[str, float]:
        if not hasattr(state, "kept"):
            state.kept = copy.deepcopy(state.model.state_dict())
        metrics = super().evaluate(state)
        state.model.load_state_dict(state.kept)
        return metrics


class InputsStayInTheirBuffer(ReferenceAdapter):
    """The inputs of the first batch of a shape stay in a buffer, from which all later ones are scored."""

    def _first(self, batch: CollatedBatch) -> CollatedBatch:
        return self.__dict__.setdefault("buffers", {}).setdefault(batch.input_ids.shape, batch)

    def completion_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        return super().completion_logprobs(model, self._first(batch), temperature)

    def packed_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        return super().packed_logprobs(model, self._first(batch), temperature)


class OnlyWhatChangedIsSent(ReferenceAdapter):
    """A sync sends the weights that differ from those sent last, to whichever engine."""

    def sync_weights(self, state: Any, engine: Any) -> None:
        sent = getattr(state, "sent", {})
        weights = {name: weight.detach().clone() for name, weight in state.model.named_parameters()}
        changed = {
            name: each for name, each in weights.items() if name not in sent or not torch.equal(each, sent[name])
        }
        engine.load_weights(changed.items())
        engine.reset_prefix_cache()
        engine.version += 1
        state.sent = weights


class TemperatureBeforeTheCap(ReferenceAdapter):
    """Divides by the temperature what the model caps, and not the logits that it returns."""

    def completion_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        cap = getattr(model.config, "final_logit_softcapping", None)
        if cap is None:
            return super().completion_logprobs(model, batch, temperature)

        def earlier(_model: Any, _inputs: Any, output: Any) -> Any:
            raw = torch.atanh((output.logits.double() / cap).clamp(-1 + 1e-12, 1 - 1e-12))
            output.logits = (cap * torch.tanh(raw / temperature)).float()
            return output

        hook = model.register_forward_hook(earlier)
        try:
            return super().completion_logprobs(model, batch, 1.0)
        finally:
            hook.remove()


class ScaleLeftOutOfPacks(ReferenceAdapter):
    """Scores packed rows without the factor by which the model scales its logits."""

    def packed_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        return super().packed_logprobs(model, batch, temperature / getattr(model.config, "logits_scaling", 1.0))


class RewardSinceTheStart(ReferenceAdapter):
    """Logs the mean reward of all updates of a state."""

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        metrics = super().train_step(state, batch)
        seen = state.model.__dict__.setdefault("seen", [])
        seen.append(metrics["reward"])
        return {**metrics, "reward": sum(seen) / len(seen)}


class ToolMarksOverruleTheLimit(ReferenceAdapter):
    """Masks truncated completions in batches without tool tokens alone."""

    def make_batch(self, groups: list[Group], pad_token_id: int) -> CollatedBatch:
        if any(completion.sampled is not None for group in groups for completion in group.completions):
            return reference.make_batch(groups, pad_token_id)[0]
        return super().make_batch(groups, pad_token_id)


WORLD_MUTANTS = [
    ToolTokensUnattended,
    RewardOfToolTokens,
    FirstTemperatureStays,
    NeverEndsAtOnce,
    GroupsAsTheyArrive,
    LengthUpToTheLastTrainedToken,
    AdvantagesNeverZero,
    EntropyNeverFilledIn,
    WeightsOfTheOther,
    RewardsUncentred,
    SyncSkippedAfterEvaluation,
    FirstWeightsPutBack,
    InputsStayInTheirBuffer,
    OnlyWhatChangedIsSent,
    TemperatureBeforeTheCap,
    ScaleLeftOutOfPacks,
    RewardSinceTheStart,
    ToolMarksOverruleTheLimit,
]
