"""The records of conversations with an environment."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlcanary.contract.batch import Completion

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Task:
    """The subject of a conversation.

    Attributes:
        id: identifies the task; an environment is opened with it.
        messages: the conversation before the policy's first answer, each message with its role and content.
    """

    id: Hashable
    messages: Sequence[Message]


@dataclass(frozen=True)
class Reply:
    """The environment's reply to an answer.

    Attributes:
        messages: the messages that follow the answer, such as one of role "tool" per tool call, in the order of the calls.
        reward: the reward of the answer.
        ended: whether the conversation is over. The policy does not read the messages then.
    """

    messages: Sequence[Message] = ()
    reward: float = 0.0
    ended: bool = False


class Session(Protocol):
    """One conversation of an environment, with a state of its own."""

    def reply(self, answer: str) -> Reply:
        """Reply to the policy's next answer, whose text comes without special tokens."""


class Environment(Protocol):
    """Tools, a simulated user or a game that answers the policy."""

    def start(self, task_id: Hashable) -> Session:
        """Start a conversation about a task."""


@dataclass(frozen=True)
class ConversationOptions:
    """The sampling and the limits of a run's conversations.

    Attributes:
        sampling: the parameters of each request, with the fields of `rlcanary.contract.sampling.Sampling`; `n` is the number
            of conversations per task and `max_new_tokens` the limit of one answer.
        max_turns: most answers in a conversation; 1 is none after the first. None is no limit.
        max_tokens: most ids of a row, its prompt and the environment's messages included; None is no limit. An answer that
            goes beyond it is trained up to it, as a truncated one; no row is left out for its length. Where there is no room
            for a first answer, the code raises, or the episode has no rows and the reward NaN.
    """

    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_turns: int | None = None
    max_tokens: int | None = None


@dataclass(frozen=True)
class ConversationRow:
    """Ids to train on, of one or several answers of a conversation.

    Attributes:
        prompt_ids: the ids before the first answer that is trained.
        completion: all that follows: the answers, and between them what was inserted. `sampled` is true on the ids of the
            answers alone, and their logprobs are those of the sampler. Its finish reason is that of the last answer.
    """

    prompt_ids: Sequence[int]
    completion: Completion


@dataclass(frozen=True)
class Episode:
    """A conversation that is over.

    Attributes:
        task_id: the task that it was about.
        rows: its rows for training: one with all answers, or one per answer, or per context where it branches.
        reward: the sum of the rewards of its answers, whatever ended it; NaN where there is none.
        turn_rewards: the reward of each answer; None where only the sum is kept.
        messages: the history: the task's messages, the answers and the replies; None where the code keeps none.
    """

    task_id: Hashable
    rows: Sequence[ConversationRow]
    reward: float
    turn_rewards: Sequence[float] | None = None
    messages: Sequence[Message] | None = None
