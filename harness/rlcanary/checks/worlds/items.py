"""Items for evaluations, whose reward functions tell texts apart."""

import math
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rlcanary.checks.asserts import assert_true
from rlcanary.contract.adapter import Item


def with_items(state: Any) -> Any:
    """Give the state prompts to evaluate on, whose rewards differ for almost any two texts.

    One has several whole blocks of a prefix cache.
    """
    prompts = ([5, 6, 7], [8, 9, 10, 11, 12], list(range(3, 51)))
    return _evaluating(state, [Item(index, prompt, _fingerprint) for index, prompt in enumerate(prompts)])


def with_graded_items(state: Any, *chosen: int) -> Any:
    """Give the state seven prompts to evaluate on, or some of them, whose rewards depend on prompt and text.

    Each item's rewards lie in an interval of length 1 of its own, from -3 to 4; hardly any is 0 or 1. No batch size
    between 1 and 7 divides them.
    """
    prompts = ([5, 6, 7], [8, 9, 10, 11, 12], [13, 14], [15], [16, 17], [18], [19, 20, 21])
    starts = (0.5, -1.0, 0.0, 2.0, -3.0, 3.0, 1.25)
    items = [
        Item(index, prompt, Graded(start)) for index, (prompt, start) in enumerate(zip(prompts, starts, strict=True))
    ]
    return _evaluating(state, [items[index] for index in chosen or range(len(items))])


def with_tossed_items(state: Any, count: int) -> Any:
    """Give the state this many prompts to evaluate on, with a shared reward function that keeps the texts."""
    reward = Kept()
    return _evaluating(state, [Item(index, [5, 6, 7], reward) for index in range(count)])


class Graded:
    """A reward function that differs for almost any two texts, and from that of other starts.

    Attributes:
        start: the least reward.
        given: the rewards returned so far.
    """

    def __init__(self, start: float) -> None:
        self.start = start
        self.given: list[float] = []

    def __call__(self, text: str) -> float:
        self.given.append(self.start + _fingerprint(f"{self.start} {text}"))
        return self.given[-1]


class Kept:
    """A reward function that returns 0 for every text and keeps the texts.

    Attributes:
        texts: the texts scored so far.
    """

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(self, text: str) -> float:
        self.texts.append(text)
        return 0.0


def assert_tossed(texts: Sequence[str], temperature: float) -> None:
    """Assert that half of the texts may be one and the same, as those of a `coin` that is fair at this temperature.

    A correct sampler is accused once in a million times.

    Raises:
        Finding: they come from another temperature.
    """
    count = len(texts)
    heads = max(Counter(texts).values(), default=0)
    chances = [math.comb(count, k) / 2**count for k in range(count + 1)]
    told = (
        f"of {count} completions {heads} are the likeliest one, where about {count / 2:.0f} are at the declared "
        f"evaluation_temperature {temperature:g}"
    )
    assert_true(2 * min(sum(chances[heads:]), sum(chances[: heads + 1])) > 1e-6, told, compared=count)


def _evaluating(state: Any, items: list[Item]) -> Any:
    if hasattr(state, "eval_items"):
        state.eval_items = items
    return state


def _fingerprint(text: str) -> float:
    return zlib.crc32(text.encode()) / 2**32
