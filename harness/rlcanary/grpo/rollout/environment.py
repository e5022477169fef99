"""A chat environment: rows open conversations, completions and tools continue them, a verifier scores their end.

The environment holds no conversation: records go in and come out, so that any number of them are under way at once.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import Any, Literal, Protocol

from rlcanary.contract.batch import Completion, Group
from rlcanary.errors import UserError
from rlcanary.grpo.data import datasets
from rlcanary.grpo.data.datasets import Row
from rlcanary.grpo.data.templates import end_of_turn, prompt_ids, require_chat_template, require_roles
from rlcanary.grpo.rewards.verifier import Score, Verifier, judge
from rlcanary.grpo.rollout.chat import render_chats, sampled_message
from rlcanary.grpo.rollout.collector import seeded
from rlcanary.grpo.rollout.group_assembler import GroupAssembler, Trajectory
from rlcanary.reference.rollout import AsyncEngine


class Tool(Protocol):
    """A tool that answers of the policy can use, such as `PythonTool`."""

    def reply(self, answer: str) -> str | None:
        """Return the tool's message; None if the answer does not use it."""


@dataclass(frozen=True)
class Conversation:
    """The state of one row's conversation.

    Attributes:
        row: the task to work on.
        opened: messages that it began with.
        added: messages since then, the sampled ones as `rlcanary.grpo.rollout.chat.sampled_message` makes them.
        ended: reason of its end: the policy used no tool ("answered"), was cut short ("truncated"), or has had all its turns
            ("turns"); None while it is under way.
        score: the verifier's score of the last answer; None while it is under way.
    """

    row: Row
    opened: Sequence[Mapping[str, Any]]
    added: Sequence[Mapping[str, Any]] = field(default=())
    ended: Literal["answered", "truncated", "turns"] | None = None
    score: Score | None = None

    @property
    def messages(self) -> list[Mapping[str, Any]]:
        """The whole conversation."""
        return [*self.opened, *self.added]

    @property
    def turns(self) -> int:
        """Number of answers of the policy."""
        return sum(message.get("sampled", False) for message in self.added)

    @property
    def step_rewards(self) -> list[float]:
        """One reward per turn: the verifier's at the last, 0 before it. NaN if the verifier could not judge.

        Raises:
            ValueError: the conversation is still under way.
        """
        if self.score is None:
            raise ValueError(f"the conversation of {self.row.id!r} is under way: it has no reward yet")
        return [0.0] * (self.turns - 1) + [math.nan if self.score.value is None else self.score.value]


class ChatEnvironment:
    """Conversations about the rows of a dataset.

    Attributes:
        rows: the dataset; `rlcanary.grpo.data.items.ItemIterator` deals them out.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        tokenizer: Any,
        verifiers: Mapping[str, Verifier],
        *,
        system_prompt: str = "",
        tools: Sequence[Tool] = (),
        max_turns: int = 1,
        tool_role: str = "tool",
    ) -> None:
        """Take the rows and the rules; nothing is sampled yet.

        Args:
            rows: tasks, see `rlcanary.grpo.data.datasets`.
            tokenizer: with a chat template.
            verifiers: verifiers by the type that rows name.
            system_prompt: stands before the prompts of rows that have none of their own.
            tools: the first that an answer uses replies to it.
            max_turns: most answers of the policy in a conversation.
            tool_role: role of the tools' messages; some chat templates know only "user".

        Raises:
            UserError: the tokenizer has no chat template, or one that ends no answer or leaves out the messages of tools; a
                verifier is missing, or tools have no turn left to be read in.
        """
        require_chat_template(tokenizer)
        if end_of_turn(tokenizer) is None:
            raise UserError("the chat template ends answers with no special token: where a turn ends cannot be told")
        require_roles(tokenizer, [tool_role] if tools else [])
        if missing := sorted({row.verifier for row in rows} - set(verifiers)):
            raise UserError(
                f"rows ask for the verifier {', '.join(missing)}; there are {', '.join(sorted(verifiers)) or 'none'}"
            )
        if max_turns < 1 or (tools and max_turns < 2):
            raise UserError(f"max_turns={max_turns}: at least 1 is needed, and 2 for a tool's reply to be read")
        self.rows = rows
        self._tokenizer, self._verifiers, self._system_prompt = tokenizer, verifiers, system_prompt
        self._tools, self._max_turns, self._tool_role = tools, max_turns, tool_role

    @classmethod
    def from_dataset(
        cls,
        name: str,
        tokenizer: Any,
        verifiers: Mapping[str, Verifier],
        *,
        dataset_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> ChatEnvironment:
        """Open an environment on a generated dataset or a `.jsonl` file, see `rlcanary.grpo.data.datasets.load`."""
        return cls(datasets.load(name, **(dataset_options or {})), tokenizer, verifiers, **options)

    def reset(self, row: Row) -> Conversation:
        """Open the conversation of a row."""
        return Conversation(row, row.messages(self._system_prompt))

    def prompt_ids(self, conversation: Conversation) -> list[int]:
        """Encode the policy's prompt for its next turn."""
        return prompt_ids(conversation.messages, self._tokenizer)

    def step(self, conversation: Conversation, completion: Completion) -> Conversation:
        """Return the conversation after this answer, and after a tool's reply to it or the verifier's judgement.

        Raises:
            ValueError: the conversation is over, or the completion is no answer (aborted, or without its text).
        """
        if conversation.ended:
            raise ValueError(f"the conversation of {conversation.row.id!r} is over: {conversation.ended}")
        message = sampled_message(completion)
        conversation = replace(conversation, added=[*conversation.added, message])
        answer: str = message["content"]
        if completion.finish_reason == "length":
            # Half a block of code is no code.
            return self._ended(conversation, "truncated", answer)
        # A tool whose reply would not be read is not run.
        if self._tools and conversation.turns == self._max_turns:
            return self._ended(conversation, "turns", answer)
        for tool in self._tools:
            reply = tool.reply(answer)
            if reply is not None:
                added = [*conversation.added, {"role": self._tool_role, "content": reply}]
                return replace(conversation, added=added)
        return self._ended(conversation, "answered", answer)

    async def play(self, engine: AsyncEngine, row: Row, sampling: Mapping[str, Any]) -> Conversation:
        """Play a whole conversation with a policy. Tools and verifiers run in threads, so that others go on meanwhile.

        Args:
            engine: the policy; requests ask for one completion.
            row: the task.
            sampling: with one completion per prompt. Of a seed each turn gets one of its own.
        """
        conversation = self.reset(row)
        while not conversation.ended:
            asked = seeded(sampling, conversation.turns)
            (completion,) = await engine.agenerate(self.prompt_ids(conversation), asked)
            conversation = await asyncio.to_thread(self.step, conversation, completion)
        return conversation

    def group(self, conversations: Sequence[Conversation], epoch: int) -> Group:
        """Join all conversations about a row, which must be over, into one group; one row each, in order."""
        assembler = GroupAssembler(len(conversations))
        assembled = [assembler.add(trajectory(each, self._tokenizer, epoch)) for each in conversations][-1]
        assert assembled is not None
        return assembled

    def _ended(
        self, conversation: Conversation, why: Literal["answered", "truncated", "turns"], answer: str
    ) -> Conversation:
        row = conversation.row
        return replace(conversation, ended=why, score=judge(self._verifiers[row.verifier], answer, row.target))


def trajectory(conversation: Conversation, tokenizer: Any, epoch: int = 0, policy_version: int = 0) -> Trajectory:
    """Convert a conversation that is over for `GroupAssembler`: a step is a turn of the policy and its reply.

    The completion is all that follows the first prompt. Tokens that the policy did not write are marked as such and have no
    logprob (NaN), so that a loss which forgets the mask raises instead of training on them. They count as old as the token
    before them.

    Args:
        conversation: one that is over.
        tokenizer: the one that rendered its prompts.
        epoch: the epoch in which its row was dealt out.
        policy_version: version of the turns whose engine reports none.

    Raises:
        ValueError: the conversation is still under way.
    """
    rewards = conversation.step_rewards
    chats = render_chats([conversation.messages], tokenizer)
    response, logprobs = chats.tokens.response[0], chats.logprobs.response[0]
    written = chats.masks.response[0].nonzero().squeeze(1).tolist()
    sampled = [message for message in conversation.added if message.get("sampled")]
    turns = [len(message["token_ids"]) for message in sampled]
    told = [message.get("token_versions") or [policy_version] * len(message["token_ids"]) for message in sampled]
    version_of = dict(zip(written, chain.from_iterable(told), strict=True))
    versions = list(accumulate(range(len(response)), lambda last, at: version_of.get(at, last), initial=told[0][0]))[1:]
    starts = [written[sum(turns[:turn])] for turn in range(len(turns))]
    ends = [*starts[1:], len(response)]
    return Trajectory(
        conversation.row.id,
        chats.tokens.prompt[0].tolist(),
        Completion(
            response.tolist(),
            logprobs.tolist(),
            "length" if conversation.ended == "truncated" else "stop",
            versions,
            sampled=chats.masks.response[0].tolist(),
        ),
        rewards,
        [end - start for start, end in zip(starts, ends, strict=True)],
        epoch,
        conversation.row.dataset,
        min(versions),
    )
