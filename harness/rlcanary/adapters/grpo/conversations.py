"""Conversations with an environment of the adapter contract in the place of the trainer's own tools and verifiers."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Hashable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.records.conversations import (
    ConversationOptions,
    ConversationRow,
    Environment,
    Episode,
    Reply,
    Session,
    Task,
)
from rlcanary.grpo.data.datasets import Row
from rlcanary.grpo.data.items import ItemIterator
from rlcanary.grpo.engines.engine_pool import EnginePool
from rlcanary.grpo.rewards.verifier import Score
from rlcanary.grpo.rollout.conversations import conversations
from rlcanary.grpo.rollout.environment import ChatEnvironment, Conversation, trajectory


class _Outside:
    """A tool and a verifier of the trainer that ask one session of the contract."""

    bounds = (-math.inf, math.inf)

    def __init__(self, session: Session) -> None:
        self._session = session
        self._last: Reply | None = None

    def reply(self, answer: str) -> str | None:
        self._last = self._session.reply(answer)
        if self._last.ended:
            return None
        if [message["role"] for message in self._last.messages] != ["tool"]:
            raise NotProvided("an answer uses one tool, which replies with one message")
        if self._last.reward:
            raise NotProvided("the verifier judges the last answer alone")
        return str(self._last.messages[0]["content"])

    def verify(self, answer: str, target: Any) -> Score:
        # An answer that was cut short, or is the last one allowed, uses no tool.
        last = self._last if self._last is not None and self._last.ended else self._session.reply(answer)
        return Score(last.reward)


class _Conversing(ChatEnvironment):
    """A chat environment whose every conversation has tools and a verifier of its own."""

    def __init__(self, environment: Environment, tokenizer: Any, task_ids: Sequence[Hashable], turns: int) -> None:
        self._environment, self._tokenizer, self._task_ids, self._turns = environment, tokenizer, task_ids, turns

    async def play(self, engine: Any, row: Row, sampling: Mapping[str, Any]) -> Conversation:
        outside = _Outside(self._environment.start(self._task_ids[int(row.id)]))
        tools = [outside] if self._turns > 1 else []
        own = ChatEnvironment([row], self._tokenizer, {"session": outside}, tools=tools, max_turns=self._turns)
        return await own.play(engine, row, sampling)


def converse(
    engine: Any, tokenizer: Any, tasks: Sequence[Task], environment: Environment, options: ConversationOptions
) -> list[list[Episode]]:
    """Have the conversations by the trainer's own collection of them.

    Raises:
        NotProvided: a limit of tokens for a whole row, or replies that the trainer's tools do not give.
    """
    if options.max_tokens is not None:
        raise NotProvided(
            "the trainer limits the tokens of an answer and the number of answers, not the tokens of a row"
        )
    rows = [Row(str(number), task.messages, None, "session", system_prompt="") for number, task in enumerate(tasks)]
    turns = sys.maxsize if options.max_turns is None else options.max_turns
    played = _Conversing(environment, tokenizer, [task.id for task in tasks], turns)
    items = ItemIterator(rows, retries=0)
    items.start_epoch()

    async def by_row() -> dict[str, list[Conversation]]:
        stream = conversations(played, items, EnginePool([engine]), options.sampling)
        async with aclosing(stream):
            return {of_row[0].row.id: of_row async for of_row in stream}

    found = asyncio.run(by_row())
    return [[_episode(each, task, tokenizer) for each in found[row.id]] for row, task in zip(rows, tasks, strict=True)]


def _episode(conversation: Conversation, task: Task, tokenizer: Any) -> Episode:
    row = trajectory(conversation, tokenizer)
    rewards = conversation.step_rewards
    return Episode(
        task.id, [ConversationRow(row.prompt_ids, row.completion)], sum(rewards), rewards, conversation.messages
    )
