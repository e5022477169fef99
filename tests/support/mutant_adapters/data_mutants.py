"""Mistakes for the checks of data and rollouts that no shipped bug in the museum trips."""

import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.contract.adapter import Item
from rlcanary.contract.batch import CollatedBatch, Completion, Group
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.presets import GRPO
from rlcanary.contract.records.lengths import Lengths
from rlcanary.contract.records.reward_parts import RewardParts


class RewardsOfNeighbours(ReferenceAdapter):
    def make_batch(self, groups: list[Group], pad_token_id: int) -> CollatedBatch:
        batch = super().make_batch(groups, pad_token_id)
        batch.rewards = batch.rewards.roll(1)
        return batch


class EmptyCompletionsDropped(ReferenceAdapter):
    def make_batch(self, groups: list[Group], pad_token_id: int) -> CollatedBatch:
        kept = []
        for group in groups:
            completions = [completion for completion in group.completions if completion.token_ids]
            kept.append(replace(group, completions=completions, rewards=group.rewards[: len(completions)]))
        return super().make_batch(kept, pad_token_id)


class RewardsAsTheyComplete(ReferenceAdapter):
    def score(self, items: list[Item], completions: list[str]) -> Tensor:
        score = super().score
        with ThreadPoolExecutor() as pool:
            scored = [pool.submit(score, [item], [text]) for item, text in zip(items, completions, strict=True)]
            return torch.cat([future.result() for future in as_completed(scored)])


class CompletionsStrippedInPlace(ReferenceAdapter):
    def score(self, items: list[Item], completions: list[str]) -> Tensor:
        rewards = super().score(items, completions)
        completions[:] = [text.strip() for text in completions]
        return rewards


class SamplingParametersChanged(ReferenceAdapter):
    def rollout(self, engine: Any, items: list[Item], sampling: Mapping[str, Any]) -> list[Group]:
        groups = super().rollout(engine, items, sampling)
        sampling["n"] = 1  # type: ignore[index]
        return groups


class OneSeedForAll(ReferenceAdapter):
    def rollout(self, engine: Any, items: list[Item], sampling: Mapping[str, Any]) -> list[Group]:
        return super().rollout(engine, items, {**sampling, "seed": 42})


class SeedOfZeroIgnored(ReferenceAdapter):
    def rollout(self, engine: Any, items: list[Item], sampling: Mapping[str, Any]) -> list[Group]:
        return super().rollout(engine, items, {**sampling, "seed": sampling["seed"] or None})


class ToolAnswersSwapped(ReferenceAdapter):
    def render(self, messages: list[Mapping[str, Any]], tokenizer: Any) -> tuple[list[int], list[bool]]:
        answers = [message for message in messages if message["role"] == "tool"]
        return super().render(
            [answers.pop() if message["role"] == "tool" else message for message in messages], tokenizer
        )


class ToolsLeftOut(ReferenceAdapter):
    def render(
        self, messages: list[Mapping[str, Any]], tokenizer: Any, tools: list[Mapping[str, Any]] | None = None
    ) -> tuple[list[int], list[bool]]:
        return super().render(messages, tokenizer)


class MaskMadeWithoutTools(ReferenceAdapter):
    def render(
        self, messages: list[Mapping[str, Any]], tokenizer: Any, tools: list[Mapping[str, Any]] | None = None
    ) -> tuple[list[int], list[bool]]:
        ids, _ = super().render(messages, tokenizer, tools)
        _, trained = super().render(messages, tokenizer)
        return ids, trained + [False] * (len(ids) - len(trained))


class CompletionsEncodedAgain(ReferenceAdapter):
    def rollout(self, engine: Any, items: list[Item], sampling: Mapping[str, Any]) -> list[Group]:
        def again(completion: Any) -> Any:
            return replace(completion, token_ids=engine.tokenizer.encode(completion.text, add_special_tokens=False))

        groups = super().rollout(engine, items, sampling)
        return [replace(group, completions=[again(c) for c in group.completions]) for group in groups]


class FailuresBecomeEmptyCompletions(ReferenceAdapter):
    def rollout(self, engine: Any, items: list[Item], sampling: Mapping[str, Any]) -> list[Group]:
        groups = []
        for item in items:
            try:
                groups += super().rollout(engine, [item], sampling)
            except RuntimeError:
                groups.append(Group(item.prompt_ids, [], [], item_id=item.id))
        empty = next(group for group in groups if group.completions).completions[0]
        made_up = replace(empty, token_ids=[], logprobs=[], text="")
        return [
            group if group.completions else replace(group, completions=[made_up], rewards=[0.0]) for group in groups
        ]


class LongConversationsCutFromTheLeft(ReferenceAdapter):
    def render(self, messages: list[Mapping[str, Any]], tokenizer: Any) -> tuple[list[int], list[bool]]:
        ids, trained = super().render(messages, tokenizer)
        return ids[-40:], trained[-40:]


class OneFlagTooFew(ReferenceAdapter):
    def render(self, messages: list[Mapping[str, Any]], tokenizer: Any) -> tuple[list[int], list[bool]]:
        ids, trained = super().render(messages, tokenizer)
        return ids, trained[:-1]


class MessagesPopped(ReferenceAdapter):
    def render(self, messages: list[Mapping[str, Any]], tokenizer: Any) -> tuple[list[int], list[bool]]:
        rendered = super().render(messages, tokenizer)
        messages.pop()
        return rendered


class RemainderDroppedBeforeShuffling(ReferenceAdapter):
    def data_order(self, n_items: int, epoch: int, rank: int, world_size: int) -> list[int]:
        return super().data_order(n_items - n_items % world_size, epoch, rank, world_size)


class RanksShuffleOnTheirOwn(ReferenceAdapter):
    def data_order(self, n_items: int, epoch: int, rank: int, world_size: int) -> list[int]:
        order: list[int] = torch.randperm(n_items, generator=torch.Generator().manual_seed(10 * epoch + rank)).tolist()
        return order[rank::world_size]


class EpochIgnored(ReferenceAdapter):
    def data_order(self, n_items: int, epoch: int, rank: int, world_size: int) -> list[int]:
        return super().data_order(n_items, 0, rank, world_size)


class SequentialButShuffled(ReferenceAdapter):
    def __init__(self, conventions: Conventions = GRPO.replace(data_order="sequential")) -> None:  # noqa: B008
        super().__init__(conventions)

    def data_order(self, n_items: int, epoch: int, rank: int, world_size: int) -> list[int]:
        return ReferenceAdapter().data_order(n_items, epoch, rank, world_size)


class GlobalSeedSet(ReferenceAdapter):
    def data_order(self, n_items: int, epoch: int, rank: int, world_size: int) -> list[int]:
        random.seed(epoch)
        return super().data_order(n_items, epoch, rank, world_size)


class MeanBetweenZeroAndOne(ReferenceAdapter):
    def keep_group(self, rewards: Tensor) -> bool:
        return 0 < float(rewards.mean()) < 1


class RewardsSortedInPlace(ReferenceAdapter):
    def keep_group(self, rewards: Tensor) -> bool:
        rewards.copy_(rewards.sort().values)
        return super().keep_group(rewards)


class NoPenaltyOfWhatWasCut(ReferenceAdapter):
    def shape_rewards(self, rewards: Tensor, lengths: Lengths) -> Tensor:
        shaped = super().shape_rewards(rewards, lengths)
        return torch.where(lengths.completions < lengths.max_new_tokens, shaped, rewards)


class LimitOfTheLongest(ReferenceAdapter):
    def shape_rewards(self, rewards: Tensor, lengths: Lengths) -> Tensor:
        return super().shape_rewards(rewards, replace(lengths, max_new_tokens=int(lengths.completions.max())))


class RewardsShapedInPlace(ReferenceAdapter):
    def shape_rewards(self, rewards: Tensor, lengths: Lengths) -> Tensor:
        return rewards.copy_(super().shape_rewards(rewards, lengths))


class WeightsOfRewardsIgnored(ReferenceAdapter):
    def combine_rewards(self, parts: RewardParts) -> Tensor:
        return super().combine_rewards(replace(parts, weights=[1.0] * len(parts.weights)))


class NothingSaidIsZero(ReferenceAdapter):
    def combine_rewards(self, parts: RewardParts) -> Tensor:
        return super().combine_rewards(parts).nan_to_num()


class PartsScaledByTheBatch(ReferenceAdapter):
    def combine_rewards(self, parts: RewardParts) -> Tensor:
        values = parts.values
        largest = values.nan_to_num().abs().max(dim=0).values.clamp(min=1)
        return super().combine_rewards(replace(parts, values=values / largest))


class PartsWeightedInPlace(ReferenceAdapter):
    def combine_rewards(self, parts: RewardParts) -> Tensor:
        parts.values.mul_(torch.tensor(parts.weights))
        return super().combine_rewards(replace(parts, weights=[1.0] * len(parts.weights)))


class TruncatedAlwaysMasked(ReferenceAdapter):
    def make_batch(self, groups: list[Group], pad_token_id: int) -> CollatedBatch:
        return ReferenceAdapter(self.conventions.replace(mask_truncated=True)).make_batch(groups, pad_token_id)


class RemainderIgnored(ReferenceAdapter):
    def accumulation_steps(self, batch_size: int, micro_batch_size: int, n_ranks: int, sequence_parallel: int) -> int:
        return batch_size * sequence_parallel // (micro_batch_size * n_ranks)


class ReferenceLogprobsOfTheNeighbour(ReferenceAdapter):
    def make_batch(self, groups: list[Group], pad_token_id: int) -> CollatedBatch:
        batch = super().make_batch(groups, pad_token_id)
        shifted = None if batch.ref_logprobs is None else batch.ref_logprobs.roll(1, 0)
        return replace(batch, ref_logprobs=shifted)


class NewestVersionOfARow(ReferenceAdapter):
    def make_batch(self, groups: list[Group], pad_token_id: int) -> CollatedBatch:
        batch = super().make_batch(groups, pad_token_id)
        rows = [(group, completion) for group in groups for completion in group.completions]
        newest = [max(completion.token_versions or [group.policy_version]) for group, completion in rows]
        return replace(batch, policy_versions=torch.tensor(newest))


class RewardsInHalfPrecision(ReferenceAdapter):
    def make_batch(self, groups: list[Group], pad_token_id: int) -> CollatedBatch:
        batch = super().make_batch(groups, pad_token_id)
        return replace(batch, rewards=batch.rewards.bfloat16())


class TimeoutsScoreZero(ReferenceAdapter):
    def score(self, items: list[Item], completions: list[str]) -> Tensor:
        def guarded(item: Item) -> Item:
            def reward(text: str) -> float | None:
                try:
                    return item.reward(text)
                except TimeoutError:
                    return 0.0

            return replace(item, reward=reward)

        return super().score([guarded(item) for item in items], completions)


class TruncatedUnlessTheFirstEnd(ReferenceAdapter):
    def rollout(self, engine: Any, items: list[Item], sampling: Mapping[str, Any]) -> list[Group]:
        def judged(completion: Completion) -> Completion:
            has_ended = list(completion.token_ids[-1:]) == list(sampling["eos_token_ids"][:1])
            return replace(completion, finish_reason="stop" if has_ended else "length")

        groups = super().rollout(engine, items, sampling)
        return [replace(group, completions=list(map(judged, group.completions))) for group in groups]


class PacksLongestFirst(ReferenceAdapter):
    """Rows that do not fit into one pack come back in the order in which they were packed."""

    def packed_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        scores_BT = super().packed_logprobs(model, batch, temperature)
        lengths_B = batch.attention_mask.sum(dim=1)
        return scores_BT[lengths_B.argsort(descending=True)] if int(lengths_B.sum()) > 64 else scores_BT


DATA_MUTANTS = [
    value
    for value in list(vars().values())
    if isinstance(value, type) and issubclass(value, ReferenceAdapter) and value is not ReferenceAdapter
]
