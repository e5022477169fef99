"""The trainer's tool loop: conversations with an environment, and the ids of a conversation that is known.

What an answer asks of its tools depends on the policy's format, which the checks' policies have none of. So each answer
stands for the tool calls that its replies answer; the loop, its ids, masks and limits are the trainer's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from rlcanary.adapters.frameworks import quiet
from rlcanary.adapters.trl import releases
from rlcanary.adapters.trl.base import TrlBase
from rlcanary.adapters.trl.engines import generation_of
from rlcanary.adapters.trl.sampling import finish_reasons
from rlcanary.contract.declining import NotProvided

if TYPE_CHECKING:
    from rlcanary.contract.records.conversations import ConversationOptions, Environment, Episode, Session, Task

# The limit of a row. The trainer has one for a row and an answer; the checks limit answers.
ROOM = 2000


class TrlConversations(TrlBase):
    """Rollouts in which tools reply to the policy."""

    def converse(
        self, engine: Any, tokenizer: Any, tasks: list[Task], environment: Environment, options: ConversationOptions
    ) -> list[list[Episode]]:
        from rlcanary.contract.batch import Completion
        from rlcanary.contract.records.conversations import ConversationRow, Episode

        if options.max_tokens is not None:
            raise NotProvided("the only limit of a whole row is that of the model")
        count = options.sampling.get("n", 1)
        rows = [task for task in tasks for _ in range(count)]
        players = [_Player(environment.start(task.id)) for task in rows]
        trainer = self._limited(options.max_turns)
        releases.use_tokenizer(trainer, tokenizer)
        trainer.use_vllm, trainer.vllm_mode = True, "server"
        trainer.vllm_generation = generation_of(engine, trainer, options.sampling)
        trainer._last_loaded_step = trainer.state.global_step
        loop = _Loop(trainer, [player.calls for player in players])
        ends = tuple(options.sampling.get("eos_token_ids") or ())
        loop.is_cut = lambda ids: not ids or ids[-1] not in ends
        with quiet():
            output = loop.run([copy.deepcopy(list(task.messages)) for task in rows], count)
        episodes = []
        finished = finish_reasons(trainer, output[1], options.sampling)
        for task, player, end, prompt, ids, mask, logprobs, messages in zip(
            rows, players, finished, *output, strict=True
        ):
            completion = Completion(ids, logprobs, end, sampled=[bool(flag) for flag in mask])
            history = [*task.messages, *_plain(messages)]
            episodes.append(Episode(task.id, [ConversationRow(prompt, completion)], player.reward, messages=history))
        return [episodes[first : first + count] for first in range(0, len(rows), count)]

    def _limited(self, max_turns: int | None) -> Any:
        """Return a trainer that was told how often its tools may be called: between two answers.

        Raises:
            NotProvided: the trainer of this release has no such setting.
        """
        if "max_tool_calling_iterations" not in releases.parameters(releases.part("trl:GRPOConfig")):
            raise NotProvided("this release of TRL has no tool loop")
        calls = None if max_turns is None else max_turns - 1
        return type(self)(**{**self._all_settings, "max_tool_calling_iterations": calls})._trainer

    def render(
        self, messages: list[Mapping[str, Any]], tokenizer: Any, tools: list[Mapping[str, Any]] | None = None
    ) -> tuple[list[int], list[bool]]:
        """Have the tool loop over these messages, in which the sampled ones are the answers."""
        first = next((place for place, each in enumerate(messages) if each.get("sampled")), len(messages))
        answers: list[list[int]] = []
        replies: list[list[str]] = []
        for message in messages[first:]:
            if message.get("sampled"):
                answers.append(_ids_of(message, tokenizer))
                replies.append([])
            elif message["role"] == "tool":
                replies[-1].append(message["content"])
            else:
                raise NotProvided("behind the first answer come tools and further answers")
        if not answers or replies[-1] or not all(replies[:-1]):
            raise NotProvided("a row ends with an answer, and between answers come tools")
        trainer = self._limited(None)
        releases.use_tokenizer(trainer, tokenizer)
        trainer.tools = [dict(tool) for tool in tools or ()]
        given = iter(answers)
        trainer._generate_single_turn = lambda *_, **__: ([list(next(given))], None)
        told = iter(replies)
        loop = _Loop(trainer, [lambda _: _returning(next(told))])
        with quiet():
            (prompt,), (ids,), (mask,), *_ = loop.run([_plain(messages[:first])], 1)
        return [*prompt, *ids], [False] * len(prompt) + [bool(flag) for flag in mask]


class _Player:
    """A session of the environment whose replies are the results of tool calls."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.reward = float("nan")

    def calls(self, answer: str) -> Sequence[Callable[[], str]]:
        """Give the session an answer -> the calls that return its messages; none when the conversation is over."""
        try:
            reply = self.session.reply(answer)
        except Exception as error:  # noqa: BLE001  # the trainer tells the policy of whatever a tool raises
            return [_raising(error)]
        self.reward = reply.reward if self.reward != self.reward else self.reward + reply.reward
        if any(message["role"] != "tool" for message in reply.messages):
            raise NotProvided("only tools reply to the policy")
        contents = [] if reply.ended else [str(message["content"]) for message in reply.messages]
        return _returning(contents)


class _Loop:
    """The trainer's tool loop over conversations, each with a function from an answer to the calls of tools."""

    def __init__(self, trainer: Any, calls: list[Callable[[str], Sequence[Callable[[], str]]]]) -> None:
        self.trainer, self.calls = trainer, calls
        self.is_cut: Callable[[list[int]], bool] = lambda _: False
        # The conversations whose tools were called, and those whose answers come to be parsed.
        self._open: list[int] = []
        self._asked: Iterator[int] = iter(())
        trainer.max_completion_length = ROOM
        trainer.model.config = copy.copy(trainer.model.config)
        trainer.model.config.max_position_embeddings = ROOM
        trainer._sync_tool_dicts, trainer._async_tool_dicts = ([{} for _ in calls] for _ in range(2))
        # Each conversation has tools of its own, as under an environment.
        trainer._env_tools, trainer._batch_environments = dict(enumerate(calls)), range(len(calls))

    def run(self, prompts: list[list[Any]], count: int) -> tuple[list[Any], ...]:
        """Have the conversations -> prompt ids, completion ids, masks of what was sampled, logprobs and messages."""
        trainer = self.trainer
        if not hasattr(trainer, "_tokenize_prompts"):
            raise NotProvided("this release of TRL has no tool loop")
        prompt_ids, images, fields = trainer._tokenize_prompts(prompts)
        ids, logprobs = releases.single_turn(trainer, prompt_ids, count, images, fields)
        generate = trainer._generate_single_turn

        def turn(*arguments: Any, **options: Any) -> Any:
            """Answer the open conversations, and note in which order their answers will be parsed."""
            answered = generate(*arguments, **options)
            self._asked = iter([place for place, own in zip(self._open, answered[0], strict=True) if own])
            self._open = []
            return answered

        trainer._generate_single_turn = turn
        answers = [[self._parsed(own, place)] for place, own in enumerate(ids)]
        trainer.environment_factories = {}
        module = "trl.trainer.grpo_trainer.parse_response"
        with patch(module, lambda _, ids, *__, **___: self._parsed(ids, next(self._asked))):
            mask, messages, ids, logprobs, *_ = trainer._tool_call_loop(
                prompts, prompt_ids, ids, answers, logprobs, images, fields
            )
        return prompt_ids, ids, mask, [None] * len(ids) if logprobs is None else logprobs, messages

    def _parsed(self, ids: list[int], place: int) -> dict[str, Any]:
        """Read an answer as the calls of the tools that reply to it. One that was cut off calls none."""
        text = self.trainer.processing_class.decode(ids, skip_special_tokens=True)
        message = {"role": "assistant", "content": text}
        calls = () if self.is_cut(ids) else self.calls[place](text)
        if not calls:
            return message
        self._open.append(place)
        self.trainer._sync_tool_dicts[place] = tools = {f"tool{number}": call for number, call in enumerate(calls)}
        asked = [{"type": "function", "function": {"name": name, "arguments": {}}} for name in tools]
        return {**message, "tool_calls": asked}


def _returning(contents: Sequence[str]) -> list[Callable[[], str]]:
    return [partial(str, content) for content in contents]


def _raising(error: Exception) -> Callable[[], str]:
    def call() -> str:
        raise error

    return call


def _ids_of(message: Mapping[str, Any], tokenizer: Any) -> list[int]:
    """Return the ids of a sampled message; where they are not known, those of its text and the end of turn."""
    if message.get("token_ids") is not None:
        return list(message["token_ids"])
    return [*tokenizer.encode(message["content"], add_special_tokens=False), tokenizer.eos_token_id]


def _plain(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{name: message[name] for name in ("role", "content")} for message in messages]
