"""Mistakes for the checks of conversations that no shipped bug in the museum trips."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.bugs.sampling.conversation import Episodes, EpisodesChanged
from rlcanary.contract.batch import Completion
from rlcanary.contract.records.conversations import ConversationRow, Episode
from rlcanary.tiny_models import EOS_ID


class Between:
    """An engine through which requests go to another one."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.version = engine, engine.version

    async def agenerate(self, prompt: Sequence[int], sampling: Mapping[str, Any]) -> list[Completion]:
        completions: list[Completion] = await self.engine.agenerate(prompt, sampling)
        return completions


class EpisodesAsTheyEnd(ReferenceAdapter):
    def converse(self, *arguments: Any) -> Episodes:
        episodes = super().converse(*arguments)
        return sorted(episodes, key=lambda of_task: len(of_task[0].messages or ()))


class LogprobsOneLate(EpisodesChanged):
    def changed_row(self, row: ConversationRow) -> ConversationRow:
        logprobs = [0.0, *(row.completion.logprobs or ())][:-1]
        return replace(row, completion=replace(row.completion, logprobs=logprobs))


class SystemPromptInEachTurn(ReferenceAdapter):
    def converse(self, engine: Any, tokenizer: Any, *others: Any) -> Episodes:
        class Prefixing(Between):
            async def agenerate(self, prompt: Sequence[int], sampling: Mapping[str, Any]) -> list[Completion]:
                system = tokenizer.apply_chat_template([{"role": "system", "content": "yes"}], return_dict=False)
                return await super().agenerate([*system, *prompt[1:]], sampling)

        return super().converse(Prefixing(engine), tokenizer, *others)


class HistoryWithoutReplies(EpisodesChanged):
    def changed(self, episode: Episode) -> Episode:
        return replace(episode, messages=[each for each in episode.messages or () if each["role"] != "tool"])


class RewardOfTheLastTurn(EpisodesChanged):
    def changed(self, episode: Episode) -> Episode:
        return replace(episode, reward=(episode.turn_rewards or [0.0])[-1], turn_rewards=None)


class LimitOfThePrompt(ReferenceAdapter):
    """The prompt may be as long as a row, and an answer comes on top of it."""

    def converse(self, *arguments: Any) -> Episodes:
        *others, options = arguments
        if options.max_tokens is not None:
            options = replace(options, max_tokens=options.max_tokens + int(options.sampling["max_new_tokens"]))
        return super().converse(*others, options)


class GoesOnBehindATruncatedAnswer(ReferenceAdapter):
    """The loop is told that every answer ended; the rows say what happened."""

    def converse(self, engine: Any, *others: Any) -> Episodes:
        class Unworried(Between):
            async def agenerate(self, prompt: Sequence[int], sampling: Mapping[str, Any]) -> list[Completion]:
                completions = await super().agenerate(prompt, sampling)
                return [replace(each, finish_reason="stop") for each in completions]

        limit = int(others[-1].sampling["max_new_tokens"])

        def told(row: ConversationRow) -> ConversationRow:
            flags = row.completion.sampled or [True] * len(row.completion.token_ids)
            last = flags[::-1].index(False) if False in flags else len(flags)
            was_cut = last == limit and row.completion.token_ids[-1] != EOS_ID
            return replace(row, completion=replace(row.completion, finish_reason="length" if was_cut else "stop"))

        episodes = super().converse(Unworried(engine), *others)
        return [[replace(each, rows=[*map(told, each.rows)]) for each in of_task] for of_task in episodes]


class EndPutBehindEveryAnswer(EpisodesChanged):
    def changed_row(self, row: ConversationRow) -> ConversationRow:
        told = row.completion
        if told.token_ids[-1] == EOS_ID:
            return row
        ids, logprobs = [*told.token_ids, EOS_ID], [*(told.logprobs or ()), 0.0]
        completion = replace(told, token_ids=ids, logprobs=logprobs, sampled=[*(told.sampled or ()), True])
        return replace(row, completion=completion)


class DefaultsAfterTheFirstTurn(ReferenceAdapter):
    def converse(self, engine: Any, *others: Any) -> Episodes:
        class Forgetting(Between):
            seen = 0

            async def agenerate(self, prompt: Sequence[int], sampling: Mapping[str, Any]) -> list[Completion]:
                self.seen += 1
                later = {"max_new_tokens": 16, "n": 1} if self.seen > 1 else {}
                return await super().agenerate(prompt, {**sampling, "temperature": 1.0, **later} if later else sampling)

        return super().converse(Forgetting(engine), *others)


class OneSeed(ReferenceAdapter):
    def converse(self, engine: Any, *others: Any) -> Episodes:
        options = others[-1]

        class Seeding(Between):
            async def agenerate(self, prompt: Sequence[int], sampling: Mapping[str, Any]) -> list[Completion]:
                await asyncio.sleep(0)
                return await super().agenerate(prompt, {**sampling, "seed": options.sampling.get("seed")})

        return super().converse(Seeding(engine), *others)


class SeedPerConversation(ReferenceAdapter):
    """Each conversation has a seed of its own, which all its turns share."""

    def converse(self, engine: Any, tokenizer: Any, tasks: Any, environment: Any, options: Any) -> Episodes:
        count = int(options.sampling.get("n", 1))
        alone = replace(options, sampling={**options.sampling, "n": 1})

        def episode(at: int) -> Episode:
            class Seeding(Between):
                async def agenerate(self, prompt: Sequence[int], sampling: Mapping[str, Any]) -> list[Completion]:
                    if sampling.get("seed") is not None:
                        sampling = {**sampling, "seed": options.sampling["seed"] + at}
                    return await super().agenerate(prompt, sampling)

            ((found,),) = ReferenceAdapter.converse(
                self, Seeding(engine), tokenizer, [tasks[at // count]], environment, alone
            )
            return found

        return [[episode(number * count + each) for each in range(count)] for number in range(len(tasks))]


CONVERSATION_MUTANTS = (
    GoesOnBehindATruncatedAnswer,
    EpisodesAsTheyEnd,
    LogprobsOneLate,
    SystemPromptInEachTurn,
    HistoryWithoutReplies,
    RewardOfTheLastTurn,
    LimitOfThePrompt,
    EndPutBehindEveryAnswer,
    DefaultsAfterTheFirstTurn,
    OneSeed,
    SeedPerConversation,
)
