"""Rollout: prompts are sampled concurrently, and each completion stays with its prompt."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rlcanary.contract.batch import Completion, Group
from rlcanary.reference.data.scoring import RewardedItem, score


class AsyncEngine(Protocol):
    """The part of `rlcanary.contract.engine.Engine` that sampling needs."""

    @property
    def version(self) -> int: ...

    async def agenerate(self, prompt: Sequence[int], sampling: Mapping[str, Any]) -> list[Completion]: ...


def rollout(engine: AsyncEngine, items: Sequence[RewardedItem], sampling: Mapping[str, Any]) -> list[Group]:
    """Sample and score `sampling["n"]` completions for each item -> one group per item, in the order of the items.

    All prompts are under way at once and finish in any order. Ids are passed on as they are, never decoded and encoded
    again. A group's policy version is that of the moment its prompt was sent, so that a weight sync during sampling
    makes the group look older than it is and never younger.

    Args:
        items: the items to sample for, in the order of the result.
        engine: the inference engine; its completions carry their text.
        sampling: the fields of `rlcanary.contract.sampling.Sampling`, passed to the engine as they are.

    Raises:
        ValueError: the engine returned another number of completions than n, or a completion without text.
        Exception: the engine raised it; a failed request never yields a group.
    """

    async def all_groups() -> list[Group]:
        return await asyncio.gather(*(sample_group(engine, item, sampling) for item in items))

    return asyncio.run(all_groups())


async def sample_group(engine: AsyncEngine, item: RewardedItem, sampling: Mapping[str, Any]) -> Group:
    """Sample and score the group of one item."""
    version = engine.version
    completions = await engine.agenerate(item.prompt_ids, sampling)
    if len(completions) != sampling["n"]:
        raise ValueError(f"item {item.id!r}: {sampling['n']} completions requested, {len(completions)} returned")
    texts = [completion.text for completion in completions if completion.text is not None]
    if len(texts) != len(completions):
        raise ValueError(f"item {item.id!r}: a completion came back without its text, which its reward is made from")
    rewards = score([item] * len(texts), texts).tolist()
    return Group(item.prompt_ids, completions, rewards, item_id=item.id, policy_version=version)
