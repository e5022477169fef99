"""Rewards: each completion is scored by its own item's function, and a missing reward is not zero."""

import builtins
import copy
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import cycle
from time import sleep

import torch
from torch import Tensor

from rlcanary.checks.asserts import assert_equal, assert_true, assert_unchanged, unless_raised
from rlcanary.checks.case import Case
from rlcanary.checks.check import Cases, check
from rlcanary.contract.adapter import Adapter, Item
from rlcanary.contract.records.reward_parts import RewardParts


def _score(adapter: Adapter, texts: list[str], *functions: Callable[[str], float | None], ids: str = "") -> Tensor:
    names: Iterable[str | int] = ids or range(len(texts))
    items = [Item(name, [11], function) for name, _, function in zip(names, texts, cycle(functions), strict=False)]
    return adapter.score(items, list(texts))


def _assert_rewards(got: Iterable[float], expected: Iterable[float | str], told: str) -> None:
    """Assert that rewards agree to four decimals, where NaN equals NaN."""
    found, wanted = ([str(round(float(reward), 4)) for reward in rewards] for rewards in (got, expected))
    assert_equal(found, wanted, told)


def _cases(*given: list[str]) -> Cases:
    return lambda: [Case(*texts, texts=texts) for texts in given]


def _numbers() -> Iterator[Case]:
    for values in ([1.0], [0.5, 1.0], [-3.5, 0.25, 1000000.0, 0.0, 0.9, -0.001]):
        yield Case(f"{len(values)} completions", rewards={str(value): value for value in values})
    yield Case(rewards={"all": 3, "yes": True, "half": 0.5})
    yield Case("70 completions", rewards={str(number): number / 8 for number in range(70)})


@check("reward.one_per_completion", needs=("score",), cases=_numbers)
def one_per_completion(adapter: Adapter, rewards: dict[str, float]) -> None:
    """Each completion gets one reward, in order, with the value that the reward function returned.

    Silent because rewards that are rounded to 0 and 1, cut off below zero or cast to integers still rank some completions
    above others. Look at the dtype of the tensor that collects them, at clamps, and at comparisons such as `reward == 1`.
    """
    told = "the rewards are not the numbers that the reward function returned"
    _assert_rewards(_score(adapter, list(rewards), rewards.get), rewards.values(), told)


_VERDICTS = ["wrong"], ["not a verdict"], ["wrong", "right"], ["right", "not a verdict", "wrong", "harmful", "wrong"]


@check("reward.zero_is_not_none", needs=("score",), cases=_cases(*_VERDICTS))
def zero_is_not_none(adapter: Adapter, texts: list[str]) -> None:
    """A reward of 0.0 stays 0.0 and a reward of None becomes NaN.

    Silent because both are falsy: under `or`, a wrong answer gets the default or another completion's reward, and with
    None as zero a completion that could not be scored counts as wrong. Look for `reward or …`, `if reward`, and for
    lists that leave out None.
    """
    rewards = {"right": 1.0, "wrong": 0.0, "harmful": -1.0}
    expected = [rewards.get(text, math.nan) for text in texts]
    told = "rewards of 0.0, negative rewards or None were changed"
    _assert_rewards(_score(adapter, texts, rewards.get), expected, told)


def _failing() -> Iterator[Case]:
    for texts in (["oops"], ["1.0", "oops", "0.5"], ["oops", "1.0", "oops", "0.25", "0.75"]):
        yield Case(*texts, texts=texts)
    for error in ("TimeoutError", "KeyError", "AssertionError", "RuntimeError", "ImportError", "RecursionError"):
        yield Case(error, texts=["1.0", "oops", "0.5"], error=error)


def _raise(error: str, text: str) -> float:
    if text == "oops":
        raise getattr(builtins, error)(text)
    return float(text)


@check("reward.failure_is_not_zero", needs=("score",), cases=_failing)
def failure_is_not_zero(adapter: Adapter, texts: list[str], error: str = "ValueError") -> None:
    """If the reward function raises, the reward is NaN or the whole call raises; other rewards are not affected.

    Silent because an exception counted as 0 is indistinguishable from a wrong answer: a parser that fails on every long
    completion teaches the policy to be short. And a failure that appends twice, or not at all, hands every later
    completion its neighbour's reward. Look for `except: return 0.0`, and for an append in both `try` and `except`.
    """
    rewards = unless_raised(_score, adapter, texts, partial(_raise, error))
    if rewards is not None:
        told = f"the reward function raised {error} on 'oops', which is neither a reward nor another's"
        _assert_rewards(rewards, ["nan" if text == "oops" else text for text in texts], told)


@check("reward.own_function", needs=("score",))
def own_function(adapter: Adapter) -> None:
    """Equal completions of different items are each scored by their own item's function.

    Silent because "4" is right for one prompt and wrong for the next, and short answers repeat all the time. Look for
    caches and dictionaries keyed by the text, and for a reward function that is taken from the first item of a batch.
    """
    rewards = [1.0, 0.25, 1.0, -1.0]
    got = _score(adapter, ["4"] * 4, *({"4": reward}.get for reward in rewards))
    _assert_rewards(got, rewards, "equal texts of different items got each other's reward")
    # The completions of a group share one item.
    texts = ["1.0", "0.0", "0.5", "0.25"]
    told = "completions of one item got each other's reward"
    _assert_rewards(_score(adapter, texts, float, ids="aabb"), texts, told)


def _slow(seconds: float, text: str) -> float:
    sleep(seconds)
    return float(text)


@check(
    "reward.slow_functions",
    needs=("score",),
    # On a busy machine the others take longer than the first of these.
    cases=lambda: [Case(f"{seconds} s", seconds=seconds) for seconds in (0.03, 0.5)],
)
def slow_functions(adapter: Adapter, seconds: float) -> None:
    """A slow reward function does not change the order of the rewards.

    Silent because every reward arrives, only in another order: a completion that is slow to verify gets the reward of a
    quick one. Look for `as_completed`, `imap_unordered` and queues in the pool that runs the verifiers.
    """
    texts = ["1.0", "0.5", "0.25"]
    told = f"the first reward took {seconds:g} s, and rewards changed places"
    _assert_rewards(_score(adapter, texts, partial(_slow, seconds), float, float), texts, told)


def _odd_texts() -> Iterator[Case]:
    for text in ("4", " 4\n", "a\n\nb", "", "<|end|>4", "e\N{COMBINING ACUTE ACCENT}", "Yes", "a" * 300):
        yield Case(repr(text)[:20], text=text)


@check("reward.text_as_sampled", needs=("score",), cases=_odd_texts)
def text_as_sampled(adapter: Adapter, text: str) -> None:
    """The reward function sees each completion once, in full, exactly as sampled.

    Silent because most answers survive being stripped, split or lowercased, but formats do not: a leading line break, a
    tag, an accent is lost. A reward summed over lines or parts grows with their number, so that a long wrong answer
    beats a short right one. Look for `strip()`, `splitlines()`, and for the prompt put in front.
    """
    told = "the reward function knows this text and was given another one"
    _assert_rewards(_score(adapter, [text], {text: 1.0}.get), [1.0], told)
    told = "the reward is the length of the text, another one came back"
    _assert_rewards(_score(adapter, [text], len), [len(text)], told)


@check("reward.no_memory", needs=("score",), cases=_cases(["1.0"], ["0.0"], ["0.5"]))
def no_memory(adapter: Adapter, texts: list[str]) -> None:
    """A completion's reward is the same alone, among others, and on a second call.

    Silent because a running mean, a normalisation over the batch or a list that keeps the rewards of the last call all
    give numbers of the right size. Look for state that outlives the call and for default arguments that collect.
    """
    several = ["1.0", "0.0", "0.5"]
    told = "among others, a completion has another reward than its function gives"
    _assert_rewards(_score(adapter, several, float), several, told)
    told = "after other completions were scored, a completion has another reward"
    _assert_rewards(_score(adapter, texts, float), texts, told)
    _assert_rewards(_score(adapter, several, float), several, "asked for again, the rewards are others")


@check("reward.inputs_untouched", severity="hardening", needs=("score",))
def inputs_untouched(adapter: Adapter) -> None:
    """Scoring does not modify the lists of items and completions.

    Silent because the rewards are right, but the logger and the trainer use the lists afterwards: popped, sorted or
    filtered, they no longer match the rewards. Look for `pop`, `sort` and `remove`.
    """
    items, texts = [Item(name, [11], float) for name in "abc"], [" 0.5\n", "oops", "1.0"]
    unless_raised(adapter.score, items, texts)
    assert_equal(texts, [" 0.5\n", "oops", "1.0"], "the list of completions changed")
    assert_equal([item.id for item in items], ["a", "b", "c"], "the list of items changed")


def _parts(*rows: list[float], weights: list[float]) -> RewardParts:
    return RewardParts(torch.tensor(rows), weights, ["task", "format", "length"][: len(weights)])


def _rewarded_by_several() -> Iterator[Case]:
    yield Case("one function", parts=_parts([1.0], [0.0], [0.25], weights=[1.0]))
    yield Case("equal weights", parts=_parts([1.0, 0.5, 0.0], [0.0, 1.0, -0.5], weights=[1.0, 1.0, 1.0]))
    yield Case(
        "a penalty", parts=_parts([1.0, 1.0, 3.0], [0.0, 0.5, 2.0], [1.0, 0.0, 0.5], weights=[2.0, 0.25, -0.125])
    )
    yield Case("a weight of 0", parts=_parts([0.25, 9.0], [1.0, -9.0], [0.0, 0.0], weights=[1.0, 0.0]))
    yield Case("far from 1", parts=_parts([1000.0, -3.5], [-0.25, 40.0], weights=[0.5, 3.0]))


@check("reward.parts_add_up", needs=("combine_rewards",), cases=_rewarded_by_several)
def parts_add_up(adapter: Adapter, parts: RewardParts) -> None:
    """A completion's reward is the sum of what the reward functions gave it, each times its own weight.

    Silent because every weighting trains something: a function with another's weight, a mean instead of a sum, or a
    penalty that is added still ranks completions. Look at the order of functions and weights, and at weights that are
    applied twice or to the logged reward only.
    """
    expected = [
        sum(weight * value for weight, value in zip(parts.weights, row, strict=True)) for row in parts.values.tolist()
    ]
    before = copy.deepcopy(parts)
    _assert_rewards(adapter.combine_rewards(parts), expected, "the rewards are not the weighted sums of their parts")
    assert_unchanged(parts, before, "combine_rewards changed the parts")


def _with_gaps() -> Iterator[Case]:
    nothing = math.nan
    yield Case("nothing at all", parts=_parts([nothing], [1.0], [nothing], weights=[1.0]))
    yield Case("nothing from the task", parts=_parts([nothing, 0.5], [1.0, 0.5], weights=[1.0, 2.0]))
    rows = [nothing, nothing, nothing], [0.0, nothing, 1.0], [nothing, 0.25, nothing], [1.0, 0.0, 0.5]
    yield Case("any of three", parts=_parts(*rows, weights=[1.0, 0.5, -0.25]))


@check("reward.nothing_given_is_not_zero", needs=("combine_rewards",), cases=_with_gaps)
def nothing_given_is_not_zero(adapter: Adapter, parts: RewardParts) -> None:
    """A completion to which no function gave anything has the reward NaN, and what some left out adds nothing.

    Silent because 0 is a reward: a completion that nobody judged then counts as wrong, and moves the mean of its group.
    Where only some functions gave nothing, the reward is the sum of the others, or NaN. Look at `nansum`, which is 0 of
    nothing, and at defaults for missing keys.
    """
    rewards = unless_raised(adapter.combine_rewards, parts)
    if rewards is None:
        return
    for row, (reward, values) in enumerate(zip(map(float, rewards), parts.values.tolist(), strict=True)):
        given = [weight * value for weight, value in zip(parts.weights, values, strict=True) if not math.isnan(value)]
        told = (
            f"the functions gave {values} with weights {list(parts.weights)}, and the reward of row {row} is {reward:g}"
        )
        if not given:
            assert_true(math.isnan(reward), told, quantity="rewards", magnitude=1.0)
        elif len(given) == len(values) or not math.isnan(reward):
            off = abs(reward - sum(given))
            assert_true(off <= 1e-4, told, quantity="rewards", magnitude=off)


@check("reward.parts_of_a_row_are_its_own", needs=("combine_rewards",), cases=_rewarded_by_several)
def parts_of_a_row_are_its_own(adapter: Adapter, parts: RewardParts) -> None:
    """A completion's reward is the same alone as in a batch, and does not depend on the order of the functions.

    Silent because a reward that is scaled by the batch's largest, or by its deviation, still looks like a reward: the same
    answer then earns something else in each batch. Look for normalisation of parts over the batch.
    """
    together = adapter.combine_rewards(parts)
    alone = [float(adapter.combine_rewards(parts.rows(row))) for row in torch.arange(len(parts.values)).split(1)]
    _assert_rewards(alone, together, "completions that are rewarded alone earn something else than in a batch")
    turned = RewardParts(parts.values.flip(1), parts.weights[::-1], parts.names[::-1])
    _assert_rewards(adapter.combine_rewards(turned), together, "with the functions in another order rewards differ")
