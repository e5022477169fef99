"""Bugs in conversations of several turns: their ids, their environments and their limits."""

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

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

Episodes = list[list[Episode]]


def changed(episodes: Episodes, change: Callable[[Episode], Episode]) -> Episodes:
    """Return the episodes with this change to each."""
    return [[change(episode) for episode in of_task] for of_task in episodes]


def with_row(episode: Episode, change: Callable[[ConversationRow], ConversationRow]) -> Episode:
    """Return the episode with this change to each of its rows."""
    return replace(episode, rows=[change(row) for row in episode.rows])


class TurnsEncodedAgain(Bug):
    id = "trl.turns-encoded-again"
    source = "TRL ebdfe826f, #5242, survey T28"
    effect = "each turn encodes the whole text again, so that answers get ids that were not sampled"

    def converse(
        self, engine: Any, tokenizer: Any, tasks: list[Task], environment: Environment, options: ConversationOptions
    ) -> Episodes:
        before = {task.id: len(task.messages) for task in tasks}

        def encoded(episode: Episode) -> Episode:
            messages = [
                {**message, "sampled": index >= before[episode.task_id] and message["role"] == "assistant"}
                for index, message in enumerate(episode.messages or ())
            ]
            ids, sampled = render(messages, tokenizer)
            start = sampled.index(True)
            (row,) = episode.rows
            told = (list(row.completion.logprobs or ()) + [0.0] * len(ids))[: len(ids) - start]
            completion = replace(row.completion, token_ids=ids[start:], logprobs=told, sampled=sampled[start:])
            return replace(episode, rows=[ConversationRow(ids[:start], completion)])

        return changed(super().converse(engine, tokenizer, tasks, environment, options), encoded)


class OneTurnIsNoLimit(Bug):
    id = "trl.no-tool-calls-is-no-limit"
    source = "TRL c24964d0a, #6423, survey T34"
    effect = "`limit or sys.maxsize` makes no limit of an explicit 0"

    def converse(
        self, engine: Any, tokenizer: Any, tasks: list[Task], environment: Environment, options: ConversationOptions
    ) -> Episodes:
        calls = None if options.max_turns is None else options.max_turns - 1
        options = replace(options, max_turns=calls + 1 if calls else None)
        return super().converse(engine, tokenizer, tasks, environment, options)


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

    def converse(
        self, engine: Any, tokenizer: Any, tasks: list[Task], environment: Environment, options: ConversationOptions
    ) -> Episodes:
        episodes = super().converse(engine, tokenizer, tasks, environment, options)
        for task, of_task in zip(tasks, episodes, strict=True):
            assert isinstance(task.messages, list)
            task.messages.extend(list(of_task[0].messages or ())[len(task.messages) :])
        return episodes


class PromptTrained(Bug):
    id = "skyrl.prompt-of-the-environment-trained"
    source = "SkyRL dabf1eefb, #214"
    effect = "the response begins where the dataset's prompt ends, although the environment wrote more in front of it"

    def converse(
        self, engine: Any, tokenizer: Any, tasks: list[Task], environment: Environment, options: ConversationOptions
    ) -> Episodes:
        def moved(row: ConversationRow) -> ConversationRow:
            told, header = row.completion, list(row.prompt_ids)[-3:]
            completion = replace(
                told,
                token_ids=[*header, *told.token_ids],
                logprobs=[0.0] * 3 + list(told.logprobs or ()),
                sampled=[True] * 3 + list(told.sampled or ()),
            )
            return ConversationRow(list(row.prompt_ids)[:-3], completion)

        episodes = super().converse(engine, tokenizer, tasks, environment, options)
        return changed(episodes, lambda episode: with_row(episode, moved))


class EveryPrefix(Bug):
    id = "open-instruct.every-prefix-is-an-example"
    source = "open-instruct 853377e82"
    effect = "a conversation is added once for each of its turns, so that early turns are trained many times"

    def converse(
        self, engine: Any, tokenizer: Any, tasks: list[Task], environment: Environment, options: ConversationOptions
    ) -> Episodes:
        def prefixes(episode: Episode) -> Episode:
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

        return changed(super().converse(engine, tokenizer, tasks, environment, options), prefixes)


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


class TrainedUnderAnotherPrompt(Bug):
    id = "pipelinerl.training-prompt-without-tools"
    source = "PipelineRL 8a9a9b7e2"
    effect = "the training prompt is rendered without what the server had rendered in front of it"

    def converse(
        self, engine: Any, tokenizer: Any, tasks: list[Task], environment: Environment, options: ConversationOptions
    ) -> Episodes:
        def shortened(row: ConversationRow) -> ConversationRow:
            # The first turn, up to its end: the system prompt where there is one.
            ids = list(row.prompt_ids)
            return replace(row, prompt_ids=ids[:1] + ids[ids.index(tokenizer.eos_token_id) + 2 :])

        episodes = super().converse(engine, tokenizer, tasks, environment, options)
        return changed(episodes, lambda episode: with_row(episode, shortened))
