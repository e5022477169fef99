"""Conversations with an environment: ids in, ids out, over any number of turns."""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

from rlcanary.contract.batch import Completion
from rlcanary.contract.records.conversations import (
    ConversationOptions,
    ConversationRow,
    Environment,
    Episode,
    Message,
    Task,
)
from rlcanary.reference.buffering import rollout_seed
from rlcanary.reference.data.rendering import prompt_ids, render
from rlcanary.reference.rollout import AsyncEngine


def converse(
    engine: AsyncEngine, tokenizer: Any, tasks: Sequence[Task], environment: Environment, options: ConversationOptions
) -> list[list[Episode]]:
    """Have conversations about tasks -> `sampling["n"]` episodes per task, in the order of the tasks.

    All are under way at once. The ids of an answer stand in every later prompt as they were sampled, so that one row holds
    the whole conversation. Requests have seeds of their own if the run has one. An episode whose prompt leaves no room has
    no rows and the reward NaN.

    Args:
        engine: its completions carry their text.
        tokenizer: with a chat template.
        tasks: the tasks, in the order of the result.
        environment: replies to the answers.
        options: `rlcanary.contract.records.conversations.ConversationOptions`.

    Raises:
        Exception: the engine or the environment raised it; a failed conversation never yields an episode.
    """

    async def all_episodes() -> list[list[Episode]]:
        count = int(options.sampling.get("n", 1))
        return [
            list(of_task)
            for of_task in await asyncio.gather(
                *(
                    asyncio.gather(
                        *(_episode(engine, tokenizer, task, environment, options, (at, n)) for n in range(count))
                    )
                    for at, task in enumerate(tasks)
                )
            )
        ]

    return asyncio.run(all_episodes())


async def _episode(
    engine: AsyncEngine,
    tokenizer: Any,
    task: Task,
    environment: Environment,
    options: ConversationOptions,
    place: tuple[int, int],
) -> Episode:
    session, messages = environment.start(task.id), list(task.messages)
    answers: list[Completion] = []
    rewards: list[float] = []
    while True:
        prompt = prompt_ids(messages, tokenizer)
        completion = await _answer(engine, prompt, options, (*place, len(rewards)))
        if completion is None:
            break
        answers.append(completion)
        message = {"role": "assistant", "content": completion.text, "sampled": True, "token_ids": completion.token_ids}
        messages.append(message)
        reply = session.reply(completion.text or "")
        rewards.append(reply.reward)
        if reply.ended or completion.finish_reason == "length" or len(rewards) == options.max_turns:
            break
        messages += reply.messages
    history = [{name: message[name] for name in ("role", "content")} for message in messages]
    if not answers:
        return Episode(task.id, [], math.nan, [], history)
    return Episode(task.id, [_row(messages, answers, tokenizer)], sum(rewards), rewards, history)


async def _answer(
    engine: AsyncEngine, prompt: list[int], options: ConversationOptions, place: tuple[int, int, int]
) -> Completion | None:
    """Sample the next answer; None where the row has no room for one."""
    sampling = {**options.sampling, "n": 1}
    if options.max_tokens is not None:
        sampling["max_new_tokens"] = min(sampling["max_new_tokens"], options.max_tokens - len(prompt))
        if sampling["max_new_tokens"] < 1:
            return None
    if sampling.get("seed") is not None:
        task, number, turn = place
        sampling["seed"] = rollout_seed(sampling["seed"], task, turn, number)
    (completion,) = await engine.agenerate(prompt, sampling)
    return completion


def _row(messages: Sequence[Message], answers: Sequence[Completion], tokenizer: Any) -> ConversationRow:
    """Return the ids up to the last answer, with the sampler's logprobs where they were sampled."""
    ids, sampled = render(messages, tokenizer)
    start, end = sampled.index(True), len(sampled) - sampled[::-1].index(True)
    told = iter([logprob for answer in answers for logprob in answer.logprobs or [math.nan] * len(answer.token_ids)])
    logprobs = [next(told) if is_sampled else math.nan for is_sampled in sampled[start:end]]
    completion = Completion(ids[start:end], logprobs, answers[-1].finish_reason, sampled=sampled[start:end])
    return ConversationRow(ids[:start], completion)
