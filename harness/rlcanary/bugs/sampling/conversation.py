"""Bugs in conversations of several turns: their ids, their environments and their limits."""

import math
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.bugs.museum import Bug
from rlcanary.contract.records.conversations import (
    ConversationOptions,
    ConversationRow,
    Environment,
    Episode,
    Reply,
    Session,
    Task,
)
from rlcanary.reference.data.rendering import render
from rlcanary.tiny_models import EOS_ID, tiny_chat_tokenizer

Episodes = list[list[Episode]]


class EpisodesChanged(ReferenceAdapter):
    """The reference's conversations with a change to each episode, or to each of its rows."""

    def converse(self, *arguments: Any) -> Episodes:
        return [[self.changed(episode) for episode in of_task] for of_task in super().converse(*arguments)]

    def changed(self, episode: Episode) -> Episode:
        return replace(episode, rows=[self.changed_row(row) for row in episode.rows])

    def changed_row(self, row: ConversationRow) -> ConversationRow:
        return row


class TurnsEncodedAgain(EpisodesChanged, Bug):
    id = "trl.turns-encoded-again"
    source = "TRL ebdfe826f, #5242, survey T28"
    effect = "each turn encodes the whole text again, so that answers get ids that were not sampled"

    def changed(self, episode: Episode) -> Episode:
        messages, answers = list(episode.messages or ()), len(episode.turn_rewards or ())
        of_policy = [index for index, message in enumerate(messages) if message["role"] == "assistant"][-answers:]
        marked = [{**message, "sampled": index in of_policy} for index, message in enumerate(messages)]
        ids, sampled = render(marked, tiny_chat_tokenizer())
        start = sampled.index(True)
        (row,) = episode.rows
        told = (list(row.completion.logprobs or ()) + [0.0] * len(ids))[: len(ids) - start]
        completion = replace(row.completion, token_ids=ids[start:], logprobs=told, sampled=sampled[start:])
        return replace(episode, rows=[ConversationRow(ids[:start], completion)])


class OneTurnIsNoLimit(Bug):
    id = "trl.no-tool-calls-is-no-limit"
    source = "TRL c24964d0a, #6423, survey T34"
    effect = "`limit or sys.maxsize` makes no limit of an explicit 0"

    def converse(self, *arguments: Any) -> Episodes:
        *others, options = arguments
        calls = None if options.max_turns is None else options.max_turns - 1
        arguments = (*others, replace(options, max_turns=calls + 1 if calls else None))
        return super().converse(*arguments)


class EnvironmentsRepeatedOtherwise(Bug):
    id = "skyrl.environment-of-another-item"
    source = "SkyRL 5c97cd22b, #335"
    effect = "environments are repeated by another number of samples than prompts"

    def converse(
        self, engine: Any, tokenizer: Any, tasks: list[Task], environment: Environment, options: ConversationOptions
    ) -> Episodes:
        tiled = iter([task.id for task in tasks] * int(options.sampling.get("n", 1)))

        class Tiled:
            def start(self, task_id: Hashable) -> Session:
                return environment.start(next(tiled))

        return super().converse(engine, tokenizer, tasks, Tiled(), options)


class TaskGrows(Bug):
    id = "areal.task-grows-with-each-episode"
    source = "AReaL 1e65d9aa0, #436"
    effect = "an episode extends the dataset's own list of messages, with which the next one begins"

    def converse(self, *arguments: Any) -> Episodes:
        _, _, tasks, *_ = arguments
        episodes = super().converse(*arguments)
        for task, of_task in zip(tasks, episodes, strict=True):
            assert isinstance(task.messages, list)
            task.messages.extend(list(of_task[0].messages or ())[len(task.messages) :])
        return episodes


class PromptTrained(EpisodesChanged, Bug):
    id = "skyrl.prompt-of-the-environment-trained"
    source = "SkyRL dabf1eefb, #214"
    effect = "the response begins where the dataset's prompt ends, although the environment wrote more in front of it"

    def changed_row(self, row: ConversationRow) -> ConversationRow:
        told, header = row.completion, list(row.prompt_ids)[-3:]
        completion = replace(
            told,
            token_ids=[*header, *told.token_ids],
            logprobs=[0.0] * 3 + list(told.logprobs or ()),
            sampled=[True] * 3 + list(told.sampled or ()),
        )
        return ConversationRow(list(row.prompt_ids)[:-3], completion)


class EveryPrefix(EpisodesChanged, Bug):
    id = "open-instruct.every-prefix-is-an-example"
    source = "open-instruct 853377e82"
    effect = "a conversation is added once for each of its turns, so that early turns are trained many times"

    def changed(self, episode: Episode) -> Episode:
        (row,) = episode.rows
        told, flags = row.completion, list(row.completion.sampled or ())
        ends = [at for at in range(1, len(flags) + 1) if flags[at - 1] and (at == len(flags) or not flags[at])]
        rows = [
            replace(
                row,
                completion=replace(
                    told, token_ids=told.token_ids[:end], logprobs=(told.logprobs or ())[:end], sampled=flags[:end]
                ),
            )
            for end in ends
        ]
        return replace(episode, rows=rows)


class FailureIsAResult(Bug):
    id = "areal.failed-tool-call-is-a-result"
    source = "AReaL 8eaf9e45b, #1332"
    effect = "what the environment raised becomes an ordinary end, with a reward of 0"

    def converse(
        self, engine: Any, tokenizer: Any, tasks: list[Task], environment: Environment, options: ConversationOptions
    ) -> Episodes:
        class Swallowing:
            def __init__(self, session: Session) -> None:
                self.session = session

            def reply(self, answer: str) -> Reply:
                try:
                    return self.session.reply(answer)
                except RuntimeError as error:
                    return Reply([{"role": "tool", "content": repr((error, "SUCCESS"))}], ended=True)

        class Environments:
            def start(self, task_id: Hashable) -> Session:
                return Swallowing(environment.start(task_id))

        return super().converse(engine, tokenizer, tasks, Environments(), options)


class OverflowOfAFinishedConversation(Bug):
    id = "tinker-cookbook.overflow-of-finished-conversation"
    source = "tinker-cookbook c53f137e7, #506"
    effect = (
        "where a further answer would not fit, the reward of a finished conversation becomes that of an overflow, 0"
    )

    def converse(self, *arguments: Any) -> Episodes:
        *_, options = arguments

        def judged(episode: Episode) -> Episode:
            rewards, budget = list(episode.turn_rewards or ()), options.sampling["max_new_tokens"]
            lengths = [len(row.prompt_ids) + len(row.completion.token_ids) for row in episode.rows]
            if all(length + budget <= (options.max_tokens or math.inf) for length in lengths):
                return episode
            return replace(episode, reward=sum(rewards[:-1]), turn_rewards=[*rewards[:-1], 0.0])

        return [[judged(episode) for episode in of_task] for of_task in super().converse(*arguments)]


class FullRowsLeftOut(Bug):
    id = "slime.overlong-sample-dropped"
    source = "slime cc50ea51d, #1982"
    effect = "a row that reaches the limit of the context is left out, in place of trained as a truncated one"

    def converse(self, *arguments: Any) -> Episodes:
        *_, options = arguments

        def fits(row: ConversationRow) -> bool:
            return len(row.prompt_ids) + len(row.completion.token_ids) < (options.max_tokens or math.inf)

        return [
            [replace(episode, rows=list(filter(fits, episode.rows))) for episode in of_task]
            for of_task in super().converse(*arguments)
        ]


class TrainedUnderAnotherPrompt(EpisodesChanged, Bug):
    id = "pipelinerl.training-prompt-without-tools"
    source = "PipelineRL 8a9a9b7e2"
    effect = "the training prompt is rendered without what the server had rendered in front of it"

    def changed_row(self, row: ConversationRow) -> ConversationRow:
        # The first turn, up to its end: the system prompt where there is one.
        ids = list(row.prompt_ids)
        return replace(row, prompt_ids=ids[:1] + ids[ids.index(EOS_ID) + 2 :])
