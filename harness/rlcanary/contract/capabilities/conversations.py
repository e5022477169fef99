"""Conversations: rollouts of several turns with tools or another environment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlcanary.contract.declining import NotProvided

if TYPE_CHECKING:
    from rlcanary.contract.records.conversations import ConversationOptions, Environment, Episode, Task


class Conversations:
    """Rollouts in which an environment replies to the policy."""

    def converse(
        self, engine: Any, tokenizer: Any, tasks: list[Task], environment: Environment, options: ConversationOptions
    ) -> list[list[Episode]]:
        """Have `n` conversations about each task, concurrently -> the episodes of each task, in order.

        The engine is a `rlcanary.contract.engine.Engine`, whose completions come with their text. Each conversation starts a
        session of the environment, which takes the place of your tools, user or game. A prompt is the conversation so far
        under the tokenizer's chat template, with the header of the assistant's turn. A conversation ends when the session
        says so, after `max_turns` answers, where an answer was truncated or where `max_tokens` leaves no room. Code that
        cannot take some replies, such as several messages at once, declines with `NotProvided`.
        """
        raise NotProvided
