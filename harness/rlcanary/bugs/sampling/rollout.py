"""Bugs between the sampler and the trainer."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlcanary.bugs.museum import Bug
from rlcanary.contract.adapter import Item
from rlcanary.contract.batch import Completion, Group
from rlcanary.reference.rollout import sample_group
from rlcanary.tiny_models import BOS_ID, PAD_ID

Sampling = Mapping[str, Any]


class AsTheyComplete(Bug):
    id = "nemo-rl.rows-in-order-of-completion"
    source = "NeMo RL 2093fba63, #478, survey N08"
    effect = "rows come back in order of completion: completions are paired with other prompts"

    def rollout(self, engine: Any, items: list[Item], sampling: Sampling) -> list[Group]:
        async def as_they_complete() -> list[Group]:
            requests = [asyncio.create_task(sample_group(engine, item, sampling)) for item in items]
            return [await group for group in asyncio.as_completed(requests)]

        return asyncio.run(as_they_complete())


class LastRoundDiscarded(Bug):
    id = "openrlhf.last-round-discarded"
    source = "OpenRLHF d37da139, #1300, survey O05"
    effect = "the last samples of the data are never trained"

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
    id = "openrlhf.uneven-chunks-zipped"
    source = "OpenRLHF 0028a82a, #1299, survey O06"
    effect = "with unequal shares per worker, the longer ones are cut"

    def rollout(self, engine: Any, items: list[Item], sampling: Sampling) -> list[Group]:
        groups = super().rollout(engine, items, sampling)
        pairs = zip(groups[::2], groups[1::2], strict=False)
        return [group for pair in pairs for group in pair]


class PromptNotCounted(Bug):
    id = "nemo-rl.prompt-not-in-budget"
    source = "NeMo RL 04f30bbf1, #299, survey N30"
    effect = "the token budget does not count the prompt: sequences exceed it"

    def rollout(self, engine: Any, items: list[Item], sampling: Sampling) -> list[Group]:
        longest = max(len(item.prompt_ids) for item in items)
        return super().rollout(engine, items, {**sampling, "max_new_tokens": sampling["max_new_tokens"] + longest})


class NoEndNeverPassedOn(Bug):
    id = "verl.ignore-eos-never-passed-on"
    source = "verl 15560eae1, #6630; NeMo RL, #2788"
    effect = "a run that asks for completions without an end still gets those that end at the engine's own EOS"

    def rollout(self, engine: Any, items: list[Item], sampling: Sampling) -> list[Group]:
        passed_on = {name: value for name, value in sampling.items() if name != "eos_token_ids" or value}
        return super().rollout(engine, items, passed_on)


class TemplateStripped(Bug):
    id = "trl.template-stripped"
    source = "TRL 79ec242ae, #3651, survey T12"
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
    id = "trl.padding-sent-to-sampler"
    source = "TRL b674989f1, #3698, survey T13"
    effect = "the sampler attends to the padding before short prompts, the trainer masks it"

    def rollout(self, engine: Any, items: list[Item], sampling: Sampling) -> list[Group]:
        longest = max(len(item.prompt_ids) for item in items)
        padded = [[PAD_ID] * (longest - len(item.prompt_ids)) + list(item.prompt_ids) for item in items]
        return self.sampled_from(padded, engine, items, sampling)


class EngineAddsBos(TemplateStripped):
    id = "prime-rl.engine-adds-bos"
    source = "prime-rl da65956b0, #367, survey P11"
    effect = "the template has written a BOS and the engine adds another"

    def rollout(self, engine: Any, items: list[Item], sampling: Sampling) -> list[Group]:
        return self.sampled_from([[BOS_ID, *item.prompt_ids] for item in items], engine, items, sampling)


class TrainerReadsRawPrompt(Bug):
    id = "prime-rl.trainer-reads-raw-prompt"
    source = "prime-rl beb12f03e, #503, survey P12"
    effect = "the sampler sees the chat template, the trainer scores after the bare prompt"

    def rollout(self, engine: Any, items: list[Item], sampling: Sampling) -> list[Group]:
        groups = super().rollout(engine, items, sampling)
        return [replace(group, prompt_ids=[token for token in group.prompt_ids if token > 3]) for group in groups]


class VersionReadAfterwards(Bug):
    id = "rlvr.version-read-afterwards"
    source = "rlvr-experiments train_grpo.py, measured"
    effect = "a group sampled across a weight sync is tagged with the later version and counts as fresh"

    def rollout(self, engine: Any, items: list[Item], sampling: Sampling) -> list[Group]:
        groups = super().rollout(engine, items, sampling)
        return [replace(group, policy_version=engine.version) for group in groups]


class VersionAfterTheReply(Bug):
    id = "areal.version-after-the-reply"
    source = "AReaL 62f955c5e, #1569"
    effect = "the version is read when the reply is there: tokens of older weights count as new"

    def rollout(self, engine: Any, items: list[Item], sampling: Sampling) -> list[Group]:
        return [replace(group, policy_version=engine.version) for group in super().rollout(engine, items, sampling)]


class LogprobsDropped(Bug):
    id = "slime.logprobs-dropped"
    source = "slime d719f0361, #1995"
    effect = "only the ids of the reply are kept: there is nothing to correct the mismatch with"

    def rollout(self, engine: Any, items: list[Item], sampling: Sampling) -> list[Group]:
        return [
            replace(group, completions=[replace(completion, logprobs=None) for completion in group.completions])
            for group in super().rollout(engine, items, sampling)
        ]


class ShortLogprobsFilledUp(Bug):
    id = "areal.short-logprobs-filled-up"
    source = "AReaL 69af1105a, #1554"
    effect = "where the reply has a logprob too few, 0 is put in: the ratio calls that token certain"

    def rollout(self, engine: Any, items: list[Item], sampling: Sampling) -> list[Group]:
        return [
            replace(
                group,
                completions=[
                    replace(completion, logprobs=[*list(completion.logprobs or ())[1:], 0.0])
                    for completion in group.completions
                ],
            )
            for group in super().rollout(engine, items, sampling)
        ]


class Continuing:
    """An engine that goes on where its completions were interrupted.

    Attributes:
        version: that of the engine within.
    """

    def __init__(self, engine: Any, left: Callable[[int, int], int]) -> None:
        """Take the engine, and what a request may sample, given the limit and the number of tokens that are there."""
        self.engine, self.left = engine, left

    @property
    def version(self) -> int:
        version: int = self.engine.version
        return version

    async def agenerate(self, prompt: Sequence[int], sampling: Sampling) -> list[Completion]:
        return [
            await self._whole(prompt, completion, sampling)
            for completion in await self.engine.agenerate(prompt, sampling)
        ]

    async def _whole(self, prompt: Sequence[int], completion: Completion, sampling: Sampling) -> Completion:
        while completion.finish_reason == "abort":
            left = self.left(sampling["max_new_tokens"], len(completion.token_ids))
            if left <= 0:
                return replace(completion, finish_reason="length")
            request = {**sampling, "n": 1, "max_new_tokens": left}
            (rest,) = await self.engine.agenerate([*prompt, *completion.token_ids], request)
            completion = Completion(
                [*completion.token_ids, *rest.token_ids],
                [*(completion.logprobs or ()), *(rest.logprobs or ())],
                rest.finish_reason,
                text=(completion.text or "") + (rest.text or ""),
            )
        return completion


class FullBudgetAgain(Bug):
    id = "slime.full-budget-again"
    source = "slime 26e859afc, #2261, survey L15"
    effect = "a completion that is continued gets its whole budget again: it grows longer than the limit"

    def rollout(self, engine: Any, items: list[Item], sampling: Sampling) -> list[Group]:
        return super().rollout(Continuing(engine, lambda limit, _: limit), items, sampling)


class BoundLoweredInItsLoop(Bug):
    id = "areal.bound-lowered-in-its-loop"
    source = "AReaL a4d01ecfe, #858, survey A17"
    effect = "the loop that continues a completion lowers its own bound: at half of the budget it counts as complete"

    def rollout(self, engine: Any, items: list[Item], sampling: Sampling) -> list[Group]:
        def left(limit: int, sampled: int) -> int:
            lowered = limit - sampled
            return lowered if sampled < lowered else 0

        return super().rollout(Continuing(engine, left), items, sampling)


class ContinuedPastTheLimit(Bug):
    id = "verl.continued-past-the-limit"
    source = "verl e9618406d, #7207"
    effect = "what is continued past the limit is cut, and counts as ended by itself where its end lay behind the limit"

    def rollout(self, engine: Any, items: list[Item], sampling: Sampling) -> list[Group]:
        limit = sampling["max_new_tokens"]
        groups = super().rollout(Continuing(engine, lambda limit, _: limit), items, sampling)
        return [replace(group, completions=[_cut(each, limit) for each in group.completions]) for group in groups]


def _cut(completion: Completion, limit: int) -> Completion:
    def first(values: Sequence[Any] | None) -> Any:
        return None if values is None else list(values)[:limit]

    logprobs, versions = first(completion.logprobs), first(completion.token_versions)
    return replace(completion, token_ids=first(completion.token_ids), logprobs=logprobs, token_versions=versions)
