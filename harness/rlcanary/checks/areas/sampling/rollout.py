"""Rollout: each completion stays with its prompt, its item, its reward and its policy version."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from torch import Generator

from rlcanary.checks.asserts import NothingToCompare, assert_equal, assert_true, unless_raised
from rlcanary.checks.case import Case
from rlcanary.checks.check import check
from rlcanary.checks.worlds.rows import whole
from rlcanary.checks.worlds.scripted_engine import (
    Request,
    ScriptedEngine,
    ScriptedItem,
    alone,
    completion_of,
    engine_of,
    groups_of,
    items_of,
    prompt_of,
    sampling_of,
    scripted_items,
    spelled,
    unusual_completions,
)
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.batch import Completion, Group
from rlcanary.tiny_models import EOS_ID


def _case(scripted: list[ScriptedItem]) -> Case:
    return Case(f"{len(scripted)} items, {len(scripted[0].completions)} completions each", scripted=scripted)


def _drawn(rng: Generator, size: int) -> Case:
    delays = [whole(rng, 0, 30) for _ in range(whole(rng, 2, 5))]
    return Case(scripted=scripted_items(whole(rng, 1, size), whole(rng, 1, 4)), delays=delays)


def _scripts() -> Iterator[Case]:
    yield from map(_case, (scripted_items(2, 1), scripted_items(2, 2), scripted_items(7, 3), scripted_items(40, 2)))


def _rollout(
    adapter: Adapter,
    scripted: list[ScriptedItem],
    engine: ScriptedEngine | None = None,
    delays: Sequence[int] = (),
    **options: Any,
) -> list[Group]:
    """Sample all completions of the items with these options, from a new engine with these delays or from this one."""
    sampling = sampling_of(n=len(scripted[0].completions), **options)
    return adapter.rollout(engine or engine_of(scripted, delays=delays), items_of(scripted), sampling)


def _requests(adapter: Adapter, scripted: list[ScriptedItem], **options: Any) -> list[Request]:
    """Sample with these options -> the requests that reached the engine."""
    engine = engine_of(scripted)
    adapter.rollout(engine, items_of(scripted), sampling_of(**options))
    return engine.requests


def _ids(tokens: Iterable[int]) -> list[int]:
    return [int(token) for token in tokens]


def _identities(groups: Iterable[Group]) -> list[tuple[Any, list[int]]]:
    return [(group.item_id, _ids(group.prompt_ids)) for group in groups]


def _sampled(group: Group) -> list[list[int]]:
    return [_ids(completion.token_ids) for completion in group.completions]


def _tokens(groups: Iterable[Group]) -> list[list[list[int]]]:
    return [sorted(_sampled(group)) for group in groups]


def _rounded(numbers: Iterable[float]) -> list[str]:
    return [f"{float(number):.4f}" for number in numbers]


@check("rollout.groups_follow_items", needs=("rollout",), cases=_scripts, draws=_drawn)
def groups_follow_items(adapter: Adapter, scripted: list[ScriptedItem], delays: Sequence[int] = ()) -> None:
    """A rollout returns one group per item, in the items' order, with the item's id and its prompt's ids.

    Silent because a group of another prompt looks valid: rewards and logprobs then belong to other text, and a batch
    that lost its last group is only a little smaller. Look for `as_completed` instead of `gather`, for `zip` over
    chunks of unequal length, for a loop that stops before it has used all fetched results, and for prompts that are
    tokenised or padded again on the way to the trainer.
    """
    told = f"the groups are not those of the {len(scripted)} items, in order"
    groups = _rollout(adapter, scripted, delays=delays)
    assert_equal(_identities(groups), _identities(groups_of(scripted)), told)


@check("rollout.completions_of_their_prompt", needs=("rollout",), cases=_scripts, draws=_drawn)
def completions_of_their_prompt(adapter: Adapter, scripted: list[ScriptedItem], delays: Sequence[int] = ()) -> None:
    """Each group holds exactly the n completions that the engine returned for its prompt.

    Silent because any completion can be scored under any prompt; equal completions of one prompt count as often as they
    were sampled. Look for completions that are flattened and cut into groups again, where `repeat` and
    `repeat_interleave` differ, for dictionaries and sets keyed by text, and for padding of unequal groups.
    """
    told = "the groups do not hold the completions of their prompts"
    assert_equal(_tokens(_rollout(adapter, scripted, delays=delays)), _tokens(groups_of(scripted)), told)


def _unusual_completions() -> Iterator[Case]:
    yield from (Case(told, **given, told=told) for told, given in unusual_completions().items())


@check("rollout.tokens_in_tokens_out", needs=("rollout",), cases=_unusual_completions)
def tokens_in_tokens_out(adapter: Adapter, scripted: list[ScriptedItem], ends: dict[str, Any], told: str) -> None:
    """A completion keeps its sampled ids: not encoded again from text, not stripped, no EOS appended.

    Silent because the text is the same: "hello" sampled letter by letter encodes to one id, which has no sampled
    logprob. Truncated completions have no end of sequence and an id that equals the padding may be sampled. Look for
    `encode(decode(ids))`, for `skip_special_tokens`, and for filters on the padding id or the end of sequence.
    """
    got = _tokens(_rollout(adapter, scripted, **ends))
    assert_equal(got, _tokens(groups_of(scripted)), f"{told} did not come back as it was sampled")


def _scripts_and_missing_logprobs() -> Iterator[Case]:
    yield from _scripts()
    unscored = [
        Completion([*spelled("a0"), EOS_ID], None, text="a0"),
        Completion([*spelled("a1"), EOS_ID], [-0.5, float("nan"), -0.25], text="a1"),
    ]
    yield _case(alone(*unscored))
    marks = [True, False, True]
    marked = [replace(completion_of(text, 1), sampled=marks[: len(text) + 1]) for text in ("a0", "b")]
    yield Case("tokens of a tool", scripted=alone(*marked))
    yield from (Case(told, **given) for told, given in unusual_completions().items())


@check("rollout.logprobs_and_finish_reasons", needs=("rollout",), cases=_scripts_and_missing_logprobs, draws=_drawn)
def logprobs_and_finish_reasons(
    adapter: Adapter, scripted: list[ScriptedItem], delays: Sequence[int] = (), ends: dict[str, Any] | None = None
) -> None:
    """Each completion keeps the sampler's logprobs of its own tokens, its finish reason and its marks of what was sampled.

    Silent because the logprobs of a neighbour, or those shifted by a token, are negative numbers as well: the importance
    ratio is wrong on policy and gets clipped. A missing logprob stays missing (None or NaN), because 0.0 means that the
    token was certain. A tool's tokens without their marks are trained. Look for lists of different origin that are zipped
    together, for fallback values, and for fields that are not copied.
    """
    both = _rollout(adapter, scripted, delays=delays, **(ends or {})), groups_of(scripted)
    got, expected = ([sorted(map(_scored, group.completions)) for group in groups] for groups in both)
    assert_equal(got, expected, "ids, finish reason, logprobs and marks do not belong together")


def _scored(completion: Completion) -> tuple[list[int], str, list[str], list[bool]]:
    logprobs = [math.nan] * len(completion.token_ids) if completion.logprobs is None else completion.logprobs
    marks = [True] * len(completion.token_ids) if completion.sampled is None else list(map(bool, completion.sampled))
    return _ids(completion.token_ids), completion.finish_reason, _rounded(logprobs), marks


def _scripts_and_odd_texts() -> Iterator[Case]:
    yield from _scripts()
    rewards: dict[str, float | None] = {" a\n": 1.0, "a": 0.0, "": -0.5, "b": 0.25}
    completions = [completion_of(text, 1) for text in rewards]
    for chosen in (rewards, rewards | {"b": None}):
        yield _case([ScriptedItem("a", prompt_of("a"), completions, chosen)])
    yield from (Case(told, **given) for told, given in unusual_completions().items())


@check("rollout.rewards_of_their_completion", needs=("rollout",), cases=_scripts_and_odd_texts, draws=_drawn)
def rewards_of_their_completion(
    adapter: Adapter, scripted: list[ScriptedItem], delays: Sequence[int] = (), ends: dict[str, Any] | None = None
) -> None:
    """Each completion has the reward of its own item's function for its text; 0.0 stays 0.0 and None becomes NaN.

    Silent because a neighbour's reward is a plausible reward: the advantage then has a random direction. Look for
    rewards that are collected in the order in which they arrive, for `reward or default`, and for text that is stripped
    or has its prompt in front before it is scored.
    """
    both = _rollout(adapter, scripted, delays=delays, **(ends or {})), groups_of(scripted)
    got, expected = (list(map(_rewarded, groups)) for groups in both)
    assert_equal(got, expected, "the rewards are not those of the completions beside them")


def _rewarded(group: Group) -> tuple[int, list[tuple[list[int], str]]]:
    return len(group.rewards), sorted(zip(_sampled(group), _rounded(group.rewards), strict=False))


@check("rollout.items_with_equal_prompts", needs=("rollout",))
def items_with_equal_prompts(adapter: Adapter) -> None:
    """Two items that share a prompt keep their own groups and their own reward functions.

    Silent because data sets hold duplicates and a dictionary keyed by prompt merges them: one item is rewarded by the
    other's answer, or a group is twice the size. Look for dictionaries keyed by prompt, and for prefixes as identities.
    """
    scripted = [
        ScriptedItem("a", prompt_of("a"), [completion_of("a0", 1)], {"a0": 1.0, "a1": 0.75}),
        ScriptedItem("b", prompt_of("a"), [completion_of("a1", 2)], {"a0": 0.5, "a1": 0.25}),
    ]
    wanted, groups = groups_of(scripted), _rollout(adapter, scripted)
    assert_equal(_identities(groups), _identities(wanted), "the two items have not one group each")
    sampled, drawn = list(chain(*map(_sampled, wanted))), list(map(_sampled, groups))
    assert_equal(sorted(chain(*drawn)), sampled, "the two groups do not share out what was sampled")
    # The engine decides which of the two completions goes to which item.
    texts = [["a0" if tokens == sampled[0] else "a1" for tokens in own] for own in drawn]
    expected = [[item.rewards[text] for text in own] for item, own in zip(scripted, texts, strict=True)]
    rewards = [[float(reward) for reward in group.rewards] for group in groups]
    assert_equal(rewards, expected, "a completion is not rewarded by the function of its own item")


@check("rollout.prompts_as_given", needs=("rollout",))
def prompts_as_given(adapter: Adapter) -> None:
    """The engine gets each item's prompt ids unchanged: nothing prepended, padded or decoded.

    Silent because the model answers any prompt: with a second BOS, padding tokens or without its chat template it samples
    from another distribution than the one that the trainer scores. Look for a BOS in the template and in the engine, for
    left-padding before sampling, and for prompts that pass through text.
    """
    scripted = scripted_items(3, 1)
    asked = sorted({request.prompt for request in _requests(adapter, scripted)})
    expected = sorted(item.prompt for item in scripted)
    assert_equal(asked, expected, "the engine was asked to complete other prompts than the items'")


def _sampling_choices() -> Iterator[Case]:
    singly = {"temperature": (0.7, 0.0), "top_p": (0.9,), "top_k": (20,), "max_new_tokens": (7, 1)}
    ends = {"eos_token_ids": ((EOS_ID, 5), (5,), ())}
    together = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "max_new_tokens": 7, "eos_token_ids": (EOS_ID, 5)}
    for choice in (*({name: each} for name, values in (singly | ends).items() for each in values), together):
        yield Case(choice, choice=choice)


@check("rollout.sampling_reaches_the_engine", needs=("rollout",), cases=_sampling_choices)
def sampling_reaches_the_engine(adapter: Adapter, choice: dict[str, Any]) -> None:
    """Temperature, top-p, top-k, token limit and EOS ids reach the engine unchanged, and no penalty is added.

    Silent because another temperature or a repetition penalty still samples good text, only not from the distribution
    that is trained; a `0` that means greedy or "off", or an empty list of EOS ids (`ignore_eos`), turns into a default
    under `or`; a limit that forgets the prompt overruns the context. Look for `x or default`, for keyword arguments that
    shadow the configuration, for an option that is defined and never passed on, for the model's generation config, and
    for a token limit computed from the padded prompt.
    """
    wanted, neutral = sampling_of(**choice), sampling_of()
    penalties = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0}
    asked = [request.sampling for request in _requests(adapter, scripted_items(2, 1), **choice)]
    told = "the engine was given something else"
    for name in ("temperature", "top_p", "top_k", "max_new_tokens"):
        given = list(dict.fromkeys(each.get(name, neutral[name]) for each in asked))
        assert_equal(given, [wanted[name]], f"{name} {wanted[name]} was asked for, {told}")
    ends = wanted["eos_token_ids"]
    # Without any in the request, the engine ends at its own.
    named = (each.get("eos_token_ids") for each in asked)
    given = list(dict.fromkeys(None if ids is None else tuple(ids) for ids in named))
    assert_equal(given, [ends], f"EOS ids {ends} were asked for, {told}")
    for name, none in penalties.items():
        given = list(dict.fromkeys(each.get(name) or none for each in asked))
        assert_equal(given, [none], f"the engine was given a {name} that nobody asked for")


def _seed_pairs() -> Iterator[Case]:
    for seed, other in ((3, 0), (0, 3)):
        yield Case(f"seed {seed}", seed=seed, other=other)


@check("rollout.seed_reaches_the_engine", needs=("rollout",), cases=_seed_pairs)
def seed_reaches_the_engine(adapter: Adapter, seed: int, other: int) -> None:
    """A requested seed, 0 included, reaches every request that can carry one, and another seed gives other requests.

    Silent because a run with an ignored seed looks normal: it cannot be repeated, or its repetitions are all the same
    sample. Look for `if seed:`, for a seed that is set on some of the requests, and for a constant. An engine that is
    seeded as a whole gets requests without seeds, which leaves nothing to compare.
    """
    drawn, others = (
        [request.sampling.get("seed") for request in _requests(adapter, scripted_items(2, 1), seed=each)]
        for each in (seed, other)
    )
    if not {*drawn, *others} - {None}:
        raise NothingToCompare("requests carry no seed: the engine is seeded as a whole")
    assert_true(None not in drawn, f"seed {seed} was asked for, a request carries none", quantity="data")
    told = f"seeds {seed} and {other} were asked for, the requests carry the same: {drawn}"
    assert_true(sorted(map(str, drawn)) != sorted(map(str, others)), told, quantity="data")


@check("rollout.seeds", needs=("rollout",), cases=lambda: [Case(f"seed {seed}", seed=seed) for seed in (None, 3)])
def seeds(adapter: Adapter, seed: int | None) -> None:
    """Unseeded requests never share a seed; seeded ones for the same prompt each get their own.

    Silent because text drawn with the same random numbers still differs between prompts: only the variety, and with it
    the groups' rewards, collapses. A group sampled request by request with one seed is n times the same completion.
    Look for a constant seed in the sampling parameters.
    """
    drawn = [
        ("any prompt" if seed is None else request.prompt, request.sampling["seed"])
        for request in _requests(adapter, scripted_items(3, 2), n=2, seed=seed)
        if request.sampling.get("seed") is not None
    ]
    told = f"requests share a seed where the seed asked for is {seed}"
    assert_equal(len(drawn) - len(set(drawn)), 0, told)


@check("rollout.failed_request_is_loud", needs=("rollout",))
def failed_request_is_loud(adapter: Adapter) -> None:
    """A failed request raises, drops its group or is marked "abort"; it never becomes a completion with a reward.

    Silent because an empty completion with reward 0 looks like a wrong answer, and the policy is punished for the engine's
    failure. Look for `except` around the request, and for `return_exceptions=True`.
    """
    scripted = scripted_items(3, 1)
    engine = engine_of(scripted, fails=[scripted[1].prompt])
    groups = unless_raised(_rollout, adapter, scripted, engine)
    # If the engine got another prompt instead, no request failed.
    if groups is None or scripted[1].prompt not in [request.prompt for request in engine.requests]:
        return
    ends = {each.finish_reason for group in groups if group.item_id == "b" for each in group.completions}
    told = "the engine failed on the prompt of item 'b', and"
    assert_equal(ends - {"abort"}, set(), f"{told} a completion was made up")
    got, wanted = ([group for group in each if group.item_id != "b"] for each in (groups, groups_of(scripted)))
    told = f"{told} the groups of the others are not what they were"
    assert_equal((_identities(got), _tokens(got)), (_identities(wanted), _tokens(wanted)), told)


@check("rollout.samples_afresh", needs=("rollout",))
def samples_afresh(adapter: Adapter) -> None:
    """A second rollout of the same items returns newly sampled completions.

    Silent because completions of an earlier policy are plausible completions. Look for caches keyed by prompt, for default
    arguments that collect, and for queues that still hold the last round.
    """
    first = scripted_items(2, 1)
    second = [replace(item, completions=[completion_of(item.id, 5)], rewards={item.id: 0.5}) for item in first]
    _rollout(adapter, first)
    told = "the second rollout does not hold what was sampled for it"
    assert_equal(_tokens(_rollout(adapter, second)), _tokens(groups_of(second)), told)


@check(
    "rollout.inputs_untouched",
    severity="hardening",
    needs=("rollout",),
    cases=lambda: [Case(f"seed {seed}", seed=seed) for seed in (None, 3)],
)
def inputs_untouched(adapter: Adapter, seed: int | None) -> None:
    """A rollout does not modify the items and the sampling parameters.

    Silent because the first rollout is right: the next one samples with another n, or from longer prompts. Look for
    assignments into the sampling parameters and for `+=` on prompt ids.
    """
    scripted = scripted_items(2, 2)
    items, sampling = items_of(scripted), sampling_of(n=2, seed=seed)
    adapter.rollout(engine_of(scripted), items, sampling)
    expected = [(item.id, item.prompt_ids) for item in scripted]
    assert_equal([(item.id, item.prompt_ids) for item in items], expected, "the items changed")
    assert_equal(sampling, sampling_of(n=2, seed=seed), "the sampling parameters changed")
