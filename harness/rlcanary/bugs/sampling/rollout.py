"""Bugs between the sampler and the trainer."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlcanary.bugs.museum import Bug
from rlcanary.contract.adapter import Item
from rlcanary.contract.batch import Group
from rlcanary.reference.rollout import sample_group
from rlcanary.tiny_models import BOS_ID, PAD_ID

Sampling = Mapping[str, Any]


class AsTheyComplete(Bug):
    id = "N08"
    source = "NeMo RL 2093fba63, #478"
    effect = "rows come back in the order in which they ended: completions stand under other prompts"

    def rollout(self, engine: Any, items: list[Item], sampling: Sampling) -> list[Group]:
        async def as_they_complete() -> list[Group]:
            requests = [asyncio.create_task(sample_group(engine, item, sampling)) for item in items]
            return [await group for group in asyncio.as_completed(requests)]

        return asyncio.run(as_they_complete())


class LastRoundDiscarded(Bug):
    id = "O05"
    source = "OpenRLHF d37da139, #1300"
    effect = "what was sampled together with the end of the data is never trained"

    def rollout(self, engine: Any, items: list[Item], sampling: Sampling) -> list[Group]:
        groups: list[Group] = []
        waiting = super().rollout(engine, items, sampling)
        while waiting:
            group, exhausted = waiting.pop(0), not waiting
            if exhausted:
                break
            groups.append(group)
        return groups


class RaggedChunksZipped(Bug):
    id = "O06"
    source = "OpenRLHF 0028a82a, #1299"
    effect = "where the workers' shares are unequal, the longer ones lose their rest"

    def rollout(self, engine: Any, items: list[Item], sampling: Sampling) -> list[Group]:
        groups = super().rollout(engine, items, sampling)
        pairs = zip(groups[::2], groups[1::2], strict=False)
        return [group for pair in pairs for group in pair]


class PromptNotCounted(Bug):
    id = "N30"
    source = "NeMo RL 04f30bbf1, #299"
    effect = "the budget leaves out the tokens that are there already: sequences exceed it"

    def rollout(self, engine: Any, items: list[Item], sampling: Sampling) -> list[Group]:
        longest = max(len(item.prompt_ids) for item in items)
        return super().rollout(engine, items, {**sampling, "max_new_tokens": sampling["max_new_tokens"] + longest})


class TemplateStripped(Bug):
    id = "T12"
    source = "TRL 79ec242ae, #3651"
    effect = "the sampler gets the prompt without the template's special tokens, the trainer with them"

    def rollout(self, engine: Any, items: list[Item], sampling: Sampling) -> list[Group]:
        return self.sampled_from(
            [[token for token in item.prompt_ids if token > 3] for item in items], engine, items, sampling
        )

    def sampled_from(
        self, prompts: Sequence[Sequence[int]], engine: Any, items: list[Item], sampling: Sampling
    ) -> list[Group]:
        """Sample from these prompts, and return groups that claim the items' own prompts."""
        changed = [replace(item, prompt_ids=prompt) for item, prompt in zip(items, prompts, strict=True)]
        groups = super().rollout(engine, changed, sampling)
        return [replace(group, prompt_ids=item.prompt_ids) for group, item in zip(groups, items, strict=True)]


class PaddingLeaked(TemplateStripped):
    id = "T13"
    source = "TRL b674989f1, #3698"
    effect = "the sampler reads padding in front of every short prompt, the trainer masks it"

    def rollout(self, engine: Any, items: list[Item], sampling: Sampling) -> list[Group]:
        longest = max(len(item.prompt_ids) for item in items)
        padded = [[PAD_ID] * (longest - len(item.prompt_ids)) + list(item.prompt_ids) for item in items]
        return self.sampled_from(padded, engine, items, sampling)


class EngineAddsBos(TemplateStripped):
    id = "P11"
    source = "prime-rl da65956b0, #367"
    effect = "the template has written a BOS and the engine adds another"

    def rollout(self, engine: Any, items: list[Item], sampling: Sampling) -> list[Group]:
        return self.sampled_from([[BOS_ID, *item.prompt_ids] for item in items], engine, items, sampling)


class TrainerReadsRawPrompt(Bug):
    id = "P12"
    source = "prime-rl beb12f03e, #503"
    effect = "the sampler sees the chat template, the trainer scores behind the bare prompt"

    def rollout(self, engine: Any, items: list[Item], sampling: Sampling) -> list[Group]:
        groups = super().rollout(engine, items, sampling)
        return [replace(group, prompt_ids=[token for token in group.prompt_ids if token > 3]) for group in groups]


class VersionReadAfterwards(Bug):
    id = "version-after"
    source = "rlvr-experiments train_grpo.py, measured"
    effect = "a group that straddled a weight sync is tagged with the version behind it and counts as fresh"

    def rollout(self, engine: Any, items: list[Item], sampling: Sampling) -> list[Group]:
        groups = super().rollout(engine, items, sampling)
        return [replace(group, policy_version=engine.version) for group in groups]
