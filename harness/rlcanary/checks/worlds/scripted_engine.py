"""An inference engine without a model that answers from a script, and items with scripted answers."""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from rlcanary.checks.worlds.samples import sampling
from rlcanary.contract.adapter import Item
from rlcanary.contract.batch import Completion, Group
from rlcanary.tiny_models import BOS_ID, EOS_ID, PAD_ID, tiny_chat_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

START_ID = 3  # of a turn, in the tokenizer's ids

Prompt = tuple[int, ...]

# Completion of a prompt that is in no script.
UNSCRIPTED = Completion([4, 2], [-1.0, -1.0], text="!")
UNSCRIPTED_REWARD = -77.0

# Turns of the event loop between the ends of requests for successive prompts of the script.
TURNS = 10


@dataclass(frozen=True)
class Request:
    """One request to the engine, and the policy version at that moment."""

    prompt: Prompt
    sampling: dict[str, Any]
    version: int


class ScriptedEngine:
    """A `rlcanary.contract.engine.Engine` that hands out given completions.

    Concurrent requests finish in the reverse of the script's order, the first prompt last, or after given delays.
    Completions of a prompt are handed out in the order of the script, over any number of requests.

    Attributes:
        script: the completions of each prompt.
        fails: prompts for which a request raises RuntimeError.
        version: policy version; with `syncing` a weight sync falls into each request, so that it grows.
        delays: turns of the event loop that each request takes, in the order of the requests, over and over.
        requests: the requests, in order.
        served: the completions handed out, by prompt.
        tokenizer: the tokenizer that made the texts, for code that decodes itself.
    """

    def __init__(
        self,
        script: Mapping[Prompt, Sequence[Completion]],
        *,
        fails: Sequence[Prompt] = (),
        version: int = 0,
        syncing: bool = False,
        delays: Sequence[int] = (),
    ) -> None:
        self.script = script
        self.fails = fails
        self.version = version
        self.syncing = syncing
        self.delays = delays
        self.requests: list[Request] = []
        self.served: dict[Prompt, list[Completion]] = {prompt: [] for prompt in script}

    @property
    def tokenizer(self) -> Any:
        return tiny_chat_tokenizer()

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Mapping[str, Any]) -> list[list[Completion]]:
        requests = [self._request(prompt, sampling) for prompt in prompts]
        self._sync()
        return [self._serve(request) for request in requests]

    async def agenerate(self, prompt: Sequence[int], sampling: Mapping[str, Any]) -> list[Completion]:
        request = self._request(prompt, sampling)
        place = list(self.script).index(request.prompt) if request.prompt in self.script else len(self.script)
        turns = TURNS * (len(self.script) - place)
        if self.delays:
            turns = self.delays[(len(self.requests) - 1) % len(self.delays)]
        for turn in range(1 + turns):
            await asyncio.sleep(0)
            if turn == 0:
                self._sync()
        return self._serve(request)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        raise RuntimeError("a scripted engine has no weights")

    def reset_prefix_cache(self) -> None:
        """Do nothing: there is no cache."""

    def _request(self, prompt: Sequence[int], sampling: Mapping[str, Any]) -> Request:
        request = Request(tuple(int(token) for token in prompt), dict(sampling), self.version)
        self.requests.append(request)
        return request

    def _sync(self) -> None:
        self.version += self.syncing

    def _serve(self, request: Request) -> list[Completion]:
        if request.prompt in self.fails:
            raise RuntimeError(f"the engine died on the prompt {list(request.prompt)}")
        count = int(request.sampling.get("n", 1))
        if request.prompt not in self.script:
            return [UNSCRIPTED] * count
        served = self.served[request.prompt]
        chosen = self.script[request.prompt][len(served) : len(served) + count]
        if len(chosen) < count:
            raise RuntimeError(f"more completions of the prompt {list(request.prompt)} were asked for than were wanted")
        if self.syncing:
            chosen = [_straddling(completion, request.version) for completion in chosen]
        served += chosen
        return list(chosen)


class InterruptingEngine(ScriptedEngine):
    """A `ScriptedEngine` that breaks off its first requests, and has a weight sync behind each of them.

    A completion that is broken off has the finish reason "abort". A request for a prompt of the script followed by the first
    tokens of its completion is answered with those that come next, and with the end only where its limit leaves room.

    Attributes:
        pieces: the tokens after which each request is broken off; later requests are not.
        sampled_by: the version that sampled each token of the completion, the last time that it was sampled.
    """

    def __init__(self, script: Mapping[Prompt, Sequence[Completion]], pieces: Sequence[int]) -> None:
        super().__init__(script)
        self.pieces = list(pieces)
        self.sampled_by: dict[int, int] = {}

    def _serve(self, request: Request) -> list[Completion]:
        for prompt, (whole,) in self.script.items():
            start = len(request.prompt) - len(prompt)
            if start >= 0 and request.prompt == (*prompt, *whole.token_ids[:start]):
                rest = len(whole.token_ids) - start
                room = min(rest, int(request.sampling.get("max_new_tokens", rest)))
                end = start + min(room, self.pieces.pop(0) if self.pieces else room)
                self.sampled_by |= dict.fromkeys(range(start, end), self.version)
                if end < start + room:
                    self.version += 1
                    return [_piece(whole, start, end, "abort")]
                return [_piece(whole, start, end, whole.finish_reason if room == rest else "length")]
        return [UNSCRIPTED]


def _piece(whole: Completion, start: int, end: int, finish_reason: str) -> Completion:
    """Cut a piece out of a completion with one token per letter."""
    logprobs, text = list(whole.logprobs or ()), whole.text or ""
    return Completion(whole.token_ids[start:end], logprobs[start:end], finish_reason, text=text[start:end])


def _straddling(completion: Completion, version: int) -> Completion:
    """Copy the completion with its first token from one policy version and the others from the next."""
    later = [version + 1] * (len(completion.token_ids) - 1)
    return replace(completion, token_versions=[version, *later])


@dataclass(frozen=True)
class ScriptedItem:
    """An item, the completions that the engine has for its prompt, and the reward of each text."""

    id: str
    prompt_ids: list[int]
    completions: list[Completion]
    rewards: dict[str, float | None]

    @property
    def prompt(self) -> Prompt:
        return tuple(self.prompt_ids)


def spelled(text: str) -> list[int]:
    """One id per byte, which is not how the tokenizer encodes the text."""
    return [token_id for character in text for token_id in _ids_of(character)]


@cache
def _ids_of(character: str) -> list[int]:
    tokenizer = tiny_chat_tokenizer()
    return [tokenizer.convert_tokens_to_ids(token) for token in tokenizer.tokenize(character)]


def prompt_of(text: str) -> list[int]:
    """Return the ids of a prompt: the spelled text with special tokens around it."""
    return [BOS_ID, START_ID, *spelled(text), EOS_ID]


def completion_of(text: str, offset: float, finish_reason: str = "stop") -> Completion:
    """Return the spelled text as a completion, with an EOS if it stopped; logprobs start at -offset and all differ."""
    ids = spelled(text) + [EOS_ID] * (finish_reason == "stop")
    return Completion(
        ids, [round(-offset - position / 10, 2) for position in range(len(ids))], finish_reason, text=text
    )


def unusual_completions() -> dict[str, dict[str, Any]]:
    """Return the inputs of cases of one completion with unusual ids or an unusual end, by what it is.

    They are the item, `scripted`, and the sampling parameters that such an end takes, `ends`.
    """
    a, b = spelled("a"), spelled("b")
    sampled = {
        "a word spelled out": completion_of("hello", 1),
        "a truncated word": completion_of("yes", 1, "length"),
        "an id that equals the padding": Completion([*a, PAD_ID, *b, EOS_ID], [-1.0] * 4, text="ab"),
        "an id that equals the padding, at its end": Completion([*a, PAD_ID], [-1.0] * 2, "length", text="a"),
        "an end of turn within": Completion([*a, EOS_ID, *b], [-1.0] * 3, "length", text="ab"),
        "an end at a stop string": Completion([*a, *a], [-1.0] * 2, text="aa"),
        "an end at the limit": Completion([*a, *b, EOS_ID], [-1.0] * 3, text="ab"),
        "an end at the second EOS id": Completion([*a, START_ID], [-1.0] * 2, text="a"),
    }
    ends: dict[str, dict[str, Any]] = {
        "an end at a stop string": {"stop_sequences": ("aa",)},
        "an end at the limit": {"max_new_tokens": 3},
        "an end at the second EOS id": {"eos_token_ids": (EOS_ID, START_ID)},
    }
    return {told: {"scripted": alone(each), "ends": ends.get(told, {})} for told, each in sampled.items()}


def alone(*completions: Completion) -> list[ScriptedItem]:
    """Return one item with these completions, of which the first earns 1 and the others 0."""
    rewards: dict[str, float | None] = {each.text or "": float(each is completions[0]) for each in completions}
    return [ScriptedItem("a", prompt_of("a"), list(completions), rewards)]


def scripted_items(n_items: int, n: int) -> list[ScriptedItem]:
    """Items a, b, …, aa, … with the completions a0, a1, …: every odd one truncated, the third of a group like its first."""
    items = []
    for index in range(n_items):
        name = "abcdefghijkl"[index % 12] * (1 + index // 12)
        texts = [f"{name}{0 if sample == 2 else sample}" for sample in range(n)]
        completions = [
            completion_of(text, index + sample + 1, "length" if sample % 2 else "stop")
            for sample, text in enumerate(texts)
        ]
        rewards: dict[str, float | None] = {text: (index * n + sample) / 2 - 1 for sample, text in enumerate(texts)}
        # Prompts of unequal length, the first of them a word that is one id where text is encoded.
        items.append(ScriptedItem(name, prompt_of("hello" if index == 0 else name * index), completions, rewards))
    return items


def sampling_of(**changes: Any) -> dict[str, Any]:
    """Return the sampling parameters of a rollout, with these changes."""
    return sampling(**{"max_new_tokens": 16, "eos_token_ids": (EOS_ID,), **changes})


def engine_of(scripted: Sequence[ScriptedItem], **options: Any) -> ScriptedEngine:
    """Make an engine that hands out copies of the items' completions; the options are those of the engine."""
    script: dict[Prompt, list[Completion]] = {}
    for item in copy.deepcopy(scripted):
        script[item.prompt] = script.get(item.prompt, []) + item.completions
    return ScriptedEngine(script, **options)


def items_of(scripted: Sequence[ScriptedItem]) -> list[Item]:
    """Make the items as a rollout takes them. A text that is not in the script has a reward that no other has."""
    return [Item(item.id, list(item.prompt_ids), partial(_reward_of, item.rewards)) for item in scripted]


def _reward_of(rewards: Mapping[str, float | None], text: str) -> float | None:
    return rewards.get(text, UNSCRIPTED_REWARD)


def groups_of(scripted: Sequence[ScriptedItem]) -> list[Group]:
    """Return the groups that a rollout of the items has to give, with NaN where a reward is None."""
    groups = []
    for item in scripted:
        rewards = (item.rewards[completion.text or ""] for completion in item.completions)
        known = [math.nan if reward is None else reward for reward in rewards]
        groups.append(Group(item.prompt_ids, item.completions, known, item_id=item.id))
    return groups
