"""Conversations without a model: an engine whose answers all differ, and an environment that replies by a script."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlcanary.checks.asserts import Finding, assert_equal
from rlcanary.checks.worlds.scripted_engine import Prompt, sampling_of, spelled
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.batch import Completion
from rlcanary.contract.records.conversations import ConversationOptions, Episode, Message, Reply, Task
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

    So no two answers are alike, and none has the ids that its text is encoded as, or can be stripped. An answer that is
    longer than `max_new_tokens` is truncated.

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


def tasks_of(n_tasks: int) -> list[Task]:
    """Tasks a, b, …: every other one with a system prompt and a turn of history."""
    tasks = []
    for index, name in enumerate(NAMES[:n_tasks]):
        question = {"role": "user", "content": f"yes {name * (index + 1)}"}
        history = [{"role": "system", "content": "be brief"}, question, {"role": "assistant", "content": "hello"}]
        tasks.append(Task(name, [*history, {"role": "user", "content": "sure?"}] if index % 2 else [question]))
    return tasks


@dataclass(frozen=True)
class Talk:
    """Conversations that an adapter has had.

    Attributes:
        tasks: as they were given, before anything happened to them.
        engine: the engine, with all that was asked of it.
        environment: the environment, with its sessions.
        episodes: what the adapter returned, by task.
    """

    tasks: list[Task]
    engine: AnsweringEngine
    environment: ScriptedEnvironment
    episodes: list[list[Episode]]

    @property
    def flat(self) -> list[Episode]:
        """All episodes, those of a task beside each other."""
        return [episode for of_task in self.episodes for episode in of_task]

    def session_of(self, episode: Episode) -> ScriptedSession | None:
        """Find the session that got this episode's first trained answer; None if none did."""
        texts = spoken(episode)
        return next((each for each in self.environment.sessions if each.answers[:1] == texts[:1]), None)


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
    return Talk(tasks_of(len(turns)), engine, environment, episodes)


@dataclass(frozen=True)
class Run:
    """Ids of a row that were trained beside each other, their logprobs, and the ids before them."""

    context: list[int]
    ids: list[int]
    logprobs: list[float]


def trained_runs(episode: Episode) -> list[Run]:
    """Return the runs of trained ids of all rows of an episode, in order."""
    runs: list[Run] = []
    for row in episode.rows:
        prompt, completion = [int(token) for token in row.prompt_ids], row.completion
        ids = [int(token) for token in completion.token_ids]
        flags = [True] * len(ids) if completion.sampled is None else [bool(flag) for flag in completion.sampled]
        told = f"a row of task {episode.task_id!r} has not one flag per id for whether it was sampled"
        assert_equal(len(flags), len(ids), told, quantity="number of flags")
        logprobs = [float("nan")] * len(ids) if completion.logprobs is None else list(map(float, completion.logprobs))
        starts = [at for at, flag in enumerate(flags) if flag and (at == 0 or not flags[at - 1])]
        for start in starts:
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
