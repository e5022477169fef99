"""Conversations without a model: an engine whose answers all differ, and an environment that replies by a script."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rlcanary.checks.asserts import Finding, assert_equal
from rlcanary.checks.case import Case
from rlcanary.checks.worlds.scripted_engine import Prompt, sampling_of, spelled
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.batch import Completion
from rlcanary.contract.records.conversations import (
    ConversationOptions,
    ConversationRow,
    Episode,
    Message,
    Reply,
    Task,
)
from rlcanary.tiny_models import EOS_ID, tiny_chat_tokenizer

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Answered:
    """A request to the engine, and the one completion that it returned for it."""

    prompt: Prompt
    sampling: dict[str, Any]
    completion: Completion


class AnsweringEngine:
    """A `rlcanary.contract.engine.Engine` that answers each request with "hello" in letters, a number and a blank.

    So no two whole answers are alike, and none has the ids that its text is encoded as, or can be stripped. An answer that
    is longer than `max_new_tokens` is truncated.

    Attributes:
        answered: the requests and their completions, one for each completion, in the order of the requests.
        version: policy version, always 0.
    """

    version = 0

    def __init__(self, delays: Sequence[int] = (0,)) -> None:
        """Make an engine whose requests take so many turns of the event loop, over and over."""
        self.answered: list[Answered] = []
        self._delays = delays

    @property
    def tokenizer(self) -> Any:
        return tiny_chat_tokenizer()

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Mapping[str, Any]) -> list[list[Completion]]:
        return [self._answers(prompt, sampling) for prompt in prompts]

    async def agenerate(self, prompt: Sequence[int], sampling: Mapping[str, Any]) -> list[Completion]:
        completions = self._answers(prompt, sampling)
        for _ in range(1 + self._delays[len(self.answered) % len(self._delays)]):
            await asyncio.sleep(0)
        return completions

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        raise RuntimeError("an engine without a model has no weights")

    def reset_prefix_cache(self) -> None:
        """Do nothing: there is no cache."""

    def _answers(self, prompt: Sequence[int], sampling: Mapping[str, Any]) -> list[Completion]:
        completions = []
        for _ in range(int(sampling.get("n", 1))):
            number, limit = len(self.answered), int(sampling.get("max_new_tokens", 16))
            text = f"hello {number} "
            ids = [*spelled(text), EOS_ID]
            logprobs = [round(-1 - number - place / 100, 2) for place in range(len(ids))]
            if len(ids) > limit:
                completion = Completion(ids[:limit], logprobs[:limit], "length", text=text[:limit])
            else:
                completion = Completion(ids, logprobs, text=text)
            completions.append(completion)
            self.answered.append(Answered(tuple(int(token) for token in prompt), dict(sampling), completion))
        return completions


@dataclass
class ScriptedSession:
    """A conversation of a `ScriptedEnvironment`, with the answers that it was given and its replies."""

    task_id: Hashable
    number: int
    script: ScriptedEnvironment
    answers: list[str] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)

    def reply(self, answer: str) -> Reply:
        if self.replies and self.replies[-1].ended:
            self.script.asked_too_often = self.task_id
            raise RuntimeError(f"the session of task {self.task_id!r} is over")
        if self.task_id == self.script.fails:
            raise self.script.failure
        self.replies.append(self.script.reply(self, len(self.answers)))
        self.answers.append(answer)
        return self.replies[-1]


class ScriptedEnvironment:
    """An environment whose replies tell the conversation and the turn that they belong to.

    Attributes:
        turns: answers until the environment ends a conversation, by task; 0 never ends it.
        parallel: messages per reply.
        earns: whether answers before the last earn a reward as well.
        fails: the task whose sessions raise at an answer.
        failure: what they raise.
        asked_too_often: the task of a session that got a further answer after it had ended its conversation.
        sessions: the conversations that were started, in order.
    """

    def __init__(self, turns: Sequence[int], *, parallel: int = 1, earns: bool = False, fails: Hashable = None) -> None:
        self.turns, self.parallel, self.earns, self.fails = turns, parallel, earns, fails
        self.failure = RuntimeError(f"the environment of task {fails!r} died")
        self.asked_too_often: Hashable = None
        self.sessions: list[ScriptedSession] = []

    def start(self, task_id: Hashable) -> ScriptedSession:
        session = ScriptedSession(task_id, len(self.sessions), self)
        self.sessions.append(session)
        return session

    def reply(self, session: ScriptedSession, turn: int) -> Reply:
        """Return the reply to an answer of this turn, the first of which is 0."""
        last = turn + 1 == self.turns[NAMES.index(str(session.task_id))]
        messages = [
            {"role": "tool", "content": f"tool {session.number} {turn} {call}"} for call in range(self.parallel)
        ]
        reward = 0.5 + session.number + turn / 8 if last or self.earns else 0.0
        return Reply([] if last else messages, reward, ended=last)


NAMES = "abcdefgh"


def unlimited_talks() -> Iterator[Case]:
    """Conversations of one and of several answers, tasks and messages per reply."""
    yield Case("one answer", turns=[1], n=1, parallel=1)
    yield Case("two answers", turns=[2], n=1, parallel=1)
    yield Case("replies of two messages", turns=[3, 1], n=1, parallel=2)
    yield Case("several conversations per task", turns=[1, 3, 2], n=3, parallel=1)


def limited_talks() -> Iterator[Case]:
    """Conversations that end at each of the limits, and some that end by themselves close to one.

    The prompt of task a has 12 ids, that of task b 42. An answer has 9 ids (from number 10 on 10), a reply and the
    headers 16. First answers all differ, so that the session of each conversation can be told.
    """
    yield Case("two answers allowed", turns=[4, 1], n=2, limits={"max_turns": 2})
    yield Case("each answer cut", turns=[2, 1], n=2, limits={"max_new_tokens": 8})
    yield Case("later answers cut", turns=[3, 3], n=3, limits={"max_new_tokens": 9})
    yield Case("room for a part of the second answer", turns=[3], n=2, limits={"max_tokens": 45})
    yield Case("room for just two answers", turns=[2], n=2, limits={"max_tokens": 46})
    yield Case("hardly any room behind the last answer", turns=[1, 1], n=2, limits={"max_tokens": 60})
    yield Case("no room for a third answer", turns=[3], n=2, limits={"max_tokens": 60})


def talks() -> Iterator[Case]:
    """Conversations without a limit and under each."""
    yield from (Case(each.label, limits={}, **each.inputs) for each in unlimited_talks())
    yield from (Case(each.label, parallel=1, **each.inputs) for each in limited_talks())


def tasks_of(n_tasks: int) -> list[Task]:
    """Tasks a, b, …: every other one with a system prompt and a turn of history."""
    tasks = []
    for index, name in enumerate(NAMES[:n_tasks]):
        question = {"role": "user", "content": f"yes {name * (index + 1)}"}
        history = [{"role": "system", "content": "be brief"}, question, {"role": "assistant", "content": "hello"}]
        tasks.append(Task(name, [*history, {"role": "user", "content": "sure?"}] if index % 2 else [question]))
    return tasks


def talks_with_rewards() -> Iterator[Case]:
    """Conversations whose rewards come at their end, and some with one for each answer."""
    yield Case("at the end", turns=[2, 1], n=2, earns=False, limits={})
    yield Case("for each answer", turns=[3, 2], n=2, earns=True, limits={})
    for each in limited_talks():
        yield Case("at the end", each.label, earns=False, **each.inputs)
        yield Case("for each answer", each.label, earns=True, **each.inputs)


def under(limits: Mapping[str, int]) -> str:
    """Write the limits as the beginning of a message."""
    return f"with {', '.join(f'{name}={value}' for name, value in limits.items())}, " if limits else ""


@dataclass(frozen=True)
class Talk:
    """Conversations that an adapter has had.

    Attributes:
        tasks: as they were given, before anything happened to them.
        engine: the engine, with all that was asked of it.
        environment: the environment, with its sessions.
        episodes: what the adapter returned, by task.
        options: the sampling and the limits.
    """

    tasks: list[Task]
    engine: AnsweringEngine
    environment: ScriptedEnvironment
    episodes: list[list[Episode]]
    options: ConversationOptions

    @property
    def flat(self) -> list[Episode]:
        """All episodes, those of a task beside each other."""
        return [episode for of_task in self.episodes for episode in of_task]

    @property
    def answers(self) -> list[Answered]:
        """What the engine answered, each answer up to the end of its row: code may sample more than that, and cut it."""
        most, answered = self.options.max_tokens, self.engine.answered
        if most is None:
            return answered
        fit = [each for each in answered if len(each.prompt) < most]
        return [replace(each, completion=_cut(each.completion, most - len(each.prompt))) for each in fit]

    def answered_with(self, token_ids: Sequence[int]) -> list[Answered]:
        """Return the answers with these ids: several where they were cut before their numbers."""
        return [each for each in self.answers if list(each.completion.token_ids) == list(token_ids)]

    def session_of(self, episode: Episode) -> ScriptedSession | None:
        """Find the session that got this episode's first trained answer; None if none did."""
        texts = spoken(episode)[:1]
        return next((each for each in self.environment.sessions if texts and each.answers[:1] == texts), None)

    def needs_telling(self, episode: Episode) -> list[str]:
        """Return the trained answers that the session has to get: at a limit, the last one is not among them."""
        texts = spoken(episode)
        if not texts:
            return []
        row = episode.rows[-1]
        is_cut = row.completion.finish_reason == "length"
        is_last = len(texts) == self.options.max_turns
        is_full = len(row.prompt_ids) + len(row.completion.token_ids) == self.options.max_tokens
        return texts[:-1] if is_cut or is_last or is_full else texts

    def histories(self, episode: Episode, session: ScriptedSession) -> list[list[tuple[str, str]]]:
        """Return the roles and texts that an episode may keep: with and without a reply that the policy never read."""
        (task,) = (task for task in self.tasks if task.id == session.task_id)
        messages = list(task.messages)
        for answer, reply in zip(session.answers, session.replies, strict=True):
            messages += [{"role": "assistant", "content": answer}, *reply.messages]
        said = [(message["role"], message["content"]) for message in messages]
        texts = spoken(episode)
        if texts[:-1] == session.answers:
            return [[*said, ("assistant", texts[-1])]]
        unread = len(session.replies[-1].messages)
        return [said, said[: len(said) - unread]]


def talk(
    adapter: Adapter,
    turns: Sequence[int],
    *,
    n: int = 1,
    parallel: int = 1,
    earns: bool = False,
    fails: Hashable = None,
    delays: Sequence[int] = (5, 0, 2),
    max_turns: int | None = None,
    max_tokens: int | None = None,
    merges_tools: bool = False,
    **sampling: Any,
) -> Talk:
    """Have `n` conversations about as many tasks as there are turns.

    See `ScriptedEnvironment`, `AnsweringEngine`, and `tiny_chat_tokenizer` for `merges_tools`.
    """
    tokenizer = tiny_chat_tokenizer(merges_tools)
    engine = AnsweringEngine(delays)
    environment = ScriptedEnvironment(turns, parallel=parallel, earns=earns, fails=fails)
    options = ConversationOptions(sampling_of(n=n, **sampling), max_turns, max_tokens)
    try:
        episodes = adapter.converse(engine, tokenizer, tasks_of(len(turns)), environment, options)
    finally:
        if environment.asked_too_often is not None:
            told = f"a session of task {environment.asked_too_often!r} got a further answer after its conversation had ended"
            raise Finding(f"{told}: do conversations share one?", quantity="answers")
    return Talk(tasks_of(len(turns)), engine, environment, episodes, options)


def _cut(completion: Completion, size: int) -> Completion:
    """Return the beginning of an answer, whose text has one letter per id; all of it if it is no longer."""
    ids, logprobs, text = completion.token_ids, completion.logprobs or (), completion.text or ""
    return completion if len(ids) <= size else Completion(ids[:size], logprobs[:size], "length", text=text[:size])


@dataclass(frozen=True)
class Run:
    """Ids of a row that were trained beside each other, their logprobs, and the ids before them."""

    context: list[int]
    ids: list[int]
    logprobs: list[float]


def trained_runs(episode: Episode) -> list[Run]:
    """Return the runs of trained ids of all rows of an episode, in order."""
    return [run for row in episode.rows for run in runs_of(row, episode.task_id)]


def runs_of(row: ConversationRow, task_id: Hashable) -> list[Run]:
    """Return the runs of trained ids of a row, in order."""
    prompt, completion = [int(token) for token in row.prompt_ids], row.completion
    ids = [int(token) for token in completion.token_ids]
    flags = [True] * len(ids) if completion.sampled is None else [bool(flag) for flag in completion.sampled]
    told = f"a row of task {task_id!r} has not one flag per id for whether it was sampled"
    assert_equal(len(flags), len(ids), told, quantity="number of flags")
    logprobs = [float("nan")] * len(ids) if completion.logprobs is None else list(map(float, completion.logprobs))
    runs = []
    for start in (at for at, flag in enumerate(flags) if flag and (at == 0 or not flags[at - 1])):
        end = next((at for at in range(start, len(ids)) if not flags[at]), len(ids))
        runs.append(Run(prompt + ids[:start], ids[start:end], logprobs[start:end]))
    return runs


def spoken(episode: Episode) -> list[str]:
    """Return the texts of the trained answers of an episode, without special tokens."""
    return [tiny_chat_tokenizer().decode(run.ids, skip_special_tokens=True) for run in trained_runs(episode)]


def template_text(messages: Sequence[Message], merges_tools: bool = False) -> str:
    """Return the prompt of the next answer as the chat template writes it."""
    tokenizer = tiny_chat_tokenizer(merges_tools)
    text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    return text
