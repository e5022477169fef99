"""Parity of sampler and trainer: the same distribution, the same logprobs, the same ends of completions."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Generator

from rlcanary.checks.asserts import NothingToCompare, assert_close, assert_equal, assert_true, soft
from rlcanary.checks.case import Case
from rlcanary.checks.check import check
from rlcanary.checks.worlds.rows import one_of, whole
from rlcanary.checks.worlds.samples import (
    allowed,
    distribution,
    near_a_cut,
    p_value,
    sampling,
    scored,
    shortfall,
    trainer_logprobs,
    wrong_ending,
)
from rlcanary.checks.worlds.training.states import precision
from rlcanary.checks.worlds.training.tiny_trainer import tiny_policy
from rlcanary.contract.adapter import Adapter, NotProvided
from rlcanary.contract.batch import Completion
from rlcanary.contract.layers import copied

SHORT = [5, 6, 7]
# Several whole blocks of a prefix cache.
LONG = list(range(3, 51))
# Lengths that differ, so that a batch has padding, and a beginning that two of them share.
PROMPTS = [[1, 8, 9, 10, 11, 12], [13], LONG, [*LONG[:40], 60, 61], [1, 14, 15]]
# More prompts than a batch of an engine is likely to hold.
MANY_PROMPTS = [[3 + number, 4] for number in range(40)]
# Float32 against float64, in nats.
CLOSE = 2e-4
# At ten such tests a day, a correct sampler fails once in three hundred thousand years.
IMPROBABLE = 1e-9


def _close(adapter: Adapter, model: Any) -> float:
    return max(CLOSE if precision(model) == torch.float32 else 0.0, allowed(adapter, model))


def _generate(
    adapter: Adapter, model: Any, prompts: list[list[int]], request: dict[str, Any], engine: Any = None
) -> list[list[Completion]]:
    """Sample, from a new engine by default, and demand the requested number of completions."""
    sampler = adapter.new_engine(copied(model)) if engine is None else engine
    groups = adapter.generate(sampler, prompts, request)
    counts, expected = [len(group) for group in groups], [request["n"]] * len(prompts)
    told = f"{counts} completions came back, {expected} were asked for"
    assert_true(counts == expected, told, quantity="number of completions", compared=0)
    return groups


def _generate_again(
    adapter: Adapter, model: Any, prompts: list[list[int]], request: dict[str, Any]
) -> list[list[Completion]]:
    """Sample with a seed if the engine takes one, so that the program reproduces a rare counterexample."""
    try:
        return _generate(adapter, model, prompts, {**request, "seed": 0})
    except NotProvided:
        return _generate(adapter, model, prompts, request)


def _drawn(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [tuple(completion.token_ids) for completion in completions]


def _given(completion: Completion) -> list[float]:
    if completion.logprobs is None:
        raise NothingToCompare("the engine gives no logprobs")
    return list(completion.logprobs)


def _temperatures() -> Iterator[Case]:
    for prompts, temperature in (([SHORT], 1.0), ([SHORT], 0.6), (PROMPTS, 1.5)):
        label = f"{len(prompts)} prompts, temperature {temperature}"
        yield Case(label, prompts=prompts, temperature=temperature)


@check("parity.logprobs", needs=("generate",), cases=_temperatures, worlds=("generation_config",))
def logprobs(adapter: Adapter, model: Any, prompts: list[list[int]], temperature: float) -> None:
    """The sampler's logprobs of its tokens equal the trainer's at the sampling temperature.

    Silent because raw logprobs, at temperature 1, are off by a tenth of a nat, which looks like the noise of other
    kernels; so is a repetition penalty from the model's config. Look at raw and processed logprobs, at the defaults an
    engine reads from the model's folder, and at whether every path to the engine sets the same options.
    """
    groups = _generate(adapter, model, prompts, sampling(temperature=temperature, n=2))
    for index, (prompt, completions) in enumerate(zip(prompts, groups, strict=True), 1):
        place = f"prompt {index} of {len(prompts)}"
        told = f"at temperature {temperature}, {place}: the sampler's logprobs are not the trainer's"
        for completion in completions:
            expected_T = trainer_logprobs(model, prompt, completion.token_ids, temperature)
            assert_close(
                _given(completion),
                expected_T,
                told,
                within=(0.0, _close(adapter, model)),
                quantity=f"logprobs of prompt {index}",
            )


# Prompts of a block of a prefix cache, of one token less and of one more; beginnings that were asked for before.
REQUESTS = [
    ([LONG[:16]], {"temperature": 1.0}),
    ([LONG, LONG[:15]], {"temperature": 0.6}),
    ([[*LONG[:17], 60], SHORT], {"temperature": 1.0}),
    ([LONG], {"temperature": 1.5}),
    ([LONG[:16], [13]], {"temperature": 1.0}),
]


def _histories() -> Iterator[Case]:
    yield Case(requests=REQUESTS)


def _drawn_history(rng: Generator, size: int) -> Case:
    requests = []
    for _ in range(whole(rng, 1, size)):
        beginning = LONG[: one_of(rng, (0, 1, 15, 16, 17, 32, 33))]
        prompts = [[*beginning, *torch.randint(3, 64, (whole(rng, 1, 3),), generator=rng).tolist()] for _ in range(2)]
        requests.append((prompts, {"temperature": one_of(rng, (0.6, 1.0, 1.5)), "n": whole(rng, 1, 3)}))
    return Case(requests=requests)


@check("parity.whenever_asked", needs=("generate",), cases=_histories, draws=_drawn_history)
def whenever_asked(adapter: Adapter, requests: list[tuple[list[list[int]], dict[str, Any]]]) -> None:
    """The engine computes the same as the trainer in every request, whatever it was asked before.

    Silent because the first request is right: keys and values of another prompt that began alike, a temperature or a
    processor of logits that stays from the request before, are off by little. Look at the blocks of the prefix cache, at
    state that the engine keeps between requests, and at requests that share a batch.
    """
    engine, model = adapter.new_engine(tiny_policy()), tiny_policy()
    for number, (prompts, choice) in enumerate(requests, 1):
        groups = _generate(adapter, model, prompts, sampling(**choice), engine)
        for prompt, completions in zip(prompts, groups, strict=True):
            for completion in completions:
                expected_T = trainer_logprobs(model, prompt, completion.token_ids, choice["temperature"])
                told = f"in request {number} the logprobs of a prompt of {len(prompt)} tokens are not the trainer's"
                assert_close(
                    _given(completion), expected_T, told, within=(0.0, _close(adapter, model)), quantity="logprobs"
                )


@check(
    "parity.logprobs_are_logprobs",
    needs=("generate",),
    cases=lambda: [Case(each, choice=each) for each in ({}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.6})],
)
def logprobs_are_logprobs(adapter: Adapter, model: Any, choice: dict[str, Any]) -> None:
    """Each sampled token has one logprob, finite and at most 0.

    Silent because a ratio of exp(logprob - 1234) is 0, which only makes the loss small; a missing logprob filled with
    0.0 means certainty. Look at the order in which the fields of an engine's answer are unpacked, and at defaults for
    missing fields.
    """
    count = 1 if choice.get("temperature") == 0 else 2  # engines take no greedy request for several completions
    completions = list(chain(*_generate(adapter, model, [SHORT, [13]], sampling(n=count, **choice))))
    holds = [
        len(_given(each)) == len(each.token_ids) and all(-torch.inf < value <= 1e-6 for value in _given(each))
        for each in completions
    ]
    assert_equal(holds, [True] * 2 * count, "these completions have not one logprob per token")


@check(
    "parity.greedy",
    needs=("generate",),
    cases=lambda: [Case(f"{len(prompts)} prompts", prompts=prompts) for prompts in ([SHORT], PROMPTS, MANY_PROMPTS)],
    worlds=("learned_positions", "generation_config"),
)
def greedy(adapter: Adapter, model: Any, prompts: list[list[int]]) -> None:
    """At temperature 0 each prompt is continued with the trainer's likeliest tokens, in the order of the prompts.

    Silent because the continuation of the neighbour's prompt, or of a prompt with padding in it, is text. Look for
    results that are collected as they complete, for prompts that are padded on the way, and for a 0 that is taken as
    "not set" and replaced by the default temperature.
    """
    # So many tokens that samples are hardly ever the likeliest ones by chance.
    groups = _generate(adapter, model, prompts, sampling(temperature=0.0, max_new_tokens=12))
    for index, (prompt, (completion,)) in enumerate(zip(prompts, groups, strict=True), 1):
        ids = list(completion.token_ids)
        lost = shortfall(model, prompt, ids)
        told = (
            f"prompt {index} of {len(prompts)} was continued with {ids}, where one of the tokens is {lost:.3g} nats less "
            "likely than the likeliest"
        )
        assert_true(lost <= _close(adapter, model), told, quantity=f"prompt {index}", magnitude=lost, compared=len(ids))


@check("parity.samples_differ", needs=("generate",))
def samples_differ(adapter: Adapter, model: Any) -> None:
    """The samples of a prompt differ from each other, and those of a second request from the first.

    Silent because a group of copies has one reward, no advantage and nothing to learn from. Look for a seed that is fixed
    in the sampling parameters and sent with every request.
    """
    engine, request = adapter.new_engine(copied(model)), sampling(n=6, max_new_tokens=8)
    first = _drawn(*_generate(adapter, model, [SHORT], request, engine))
    with soft():
        assert_true(
            len(set(first)) > 1, f"six samples of one prompt are all the same: {first[0]}", quantity="one request"
        )
    second = _drawn(*adapter.generate(engine, [SHORT], request))
    assert_true(first != second, "a second request without a seed gave the same samples", quantity="two requests")


@check("parity.seed", needs=("generate",))
def seed(adapter: Adapter, model: Any) -> None:
    """A seeded request repeats its samples, which differ from each other and from those of another seed.

    Silent because unseeded samples are as good, only not reproducible. Look for a seed that is dropped on the way to
    the engine, or shared by all samples of a group.
    """
    requests = (sampling(n=4, max_new_tokens=8, seed=value) for value in (1, 1, 2))
    first, again, other = (_drawn(*_generate(adapter, model, [SHORT], request)) for request in requests)
    assert_true(first == again, "the same seed gave other samples", quantity="one seed")
    assert_true(first != other, "another seed gave the same samples", quantity="two seeds")
    assert_true(len(set(first)) > 1, "all samples of a seed are the same", quantity="samples of a seed")


def _limits() -> Iterator[Case]:
    # So many ids that most completions end with one of them, and one id that hardly any ends with; 24 tokens are more than
    # the 20 that transformers generates where nobody says how many.
    for eos_token_ids, max_new_tokens in ((tuple(range(0, 64, 4)), 6), ((2,), 5), ((2,), 1), ((2,), 24)):
        label = f"{len(eos_token_ids)} EOS ids, at most {max_new_tokens} tokens"
        yield Case(label, eos_token_ids=eos_token_ids, max_new_tokens=max_new_tokens)


@check("parity.endings", needs=("generate",), cases=_limits, worlds=("generation_config",))
def endings(adapter: Adapter, model: Any, eos_token_ids: tuple[int, ...], max_new_tokens: int) -> None:
    """A completion ends with its first EOS, which it includes, or at max_new_tokens; its finish reason says which.

    Silent because a completion without its end-of-sequence token trains a policy that never stops, and a truncated one
    that says "stop" is rewarded as if it were whole. Look at what the engine strips from its answer, at several
    end-of-sequence ids, and at token limits that include the prompt.
    """
    request = sampling(n=8, max_new_tokens=max_new_tokens, eos_token_ids=eos_token_ids)
    completions = list(chain(*_generate_again(adapter, model, [SHORT, LONG], request)))
    wrong = [
        f"the completion {list(completion.token_ids)} has {told}"
        for completion in completions
        if (told := wrong_ending(completion, eos_token_ids, max_new_tokens))
    ]
    assert_true(not wrong, "".join(wrong[:1]), quantity="endings", compared=len(completions))


@check("parity.ends_as_often_as_probable", needs=("generate",))
def ends_as_often_as_probable(adapter: Adapter) -> None:
    """An end-of-sequence token is drawn as often as the trainer's model gives it, as the first token and as the second.

    Silent because a policy that may not end yet, under a minimum of new tokens or a penalty, writes longer answers of good
    text, whose end is then trained on a distribution that was never sampled from. Look for `min_tokens`, `ignore_eos`, a
    bias on the end-of-sequence id and the model's generation config.
    """
    model, count = tiny_policy(), 600
    first_V = scored(model, SHORT, [0])[0].exp()
    went_on = int(first_V.argmax())
    second_V = scored(model, SHORT, [went_on, 0])[1].exp()
    # Likely tokens end a completion, so that many end with the first token, and many of those that went on with the second.
    ends = [int(first_V.topk(2).indices[1]), int(second_V.argmax())]
    request = sampling(n=count, max_new_tokens=2, eos_token_ids=tuple(ends))
    (completions,) = _generate_again(adapter, model, [SHORT], request)
    drawn = [list(completion.token_ids) for completion in completions]
    leading = [ids[0] for ids in drawn if ids]
    following = [ids[1] for ids in drawn if len(ids) > 1 and ids[0] == went_on]
    for place, tokens, exact_V in (("first", leading, first_V), ("second", following, second_V)):
        share, expected = sum(token in ends for token in tokens), float(exact_V[ends].sum()) * len(tokens)
        told = f"{share} of {len(tokens)} {place} tokens end the completion, about {expected:.0f} should"
        is_end_V = torch.zeros_like(exact_V).scatter(0, torch.tensor(ends), 1.0)
        two_V = torch.stack([(exact_V * (1 - is_end_V)).sum(), (exact_V * is_end_V).sum()])
        holds = (
            p_value([int(token in ends) for token in tokens], two_V, adapter.conventions.engine_tolerance) > IMPROBABLE
        )
        assert_true(holds, told, quantity=f"{place} tokens", compared=len(tokens))


def _filters() -> Iterator[Case]:
    for choice in ({"temperature": 1.0}, {"temperature": 0.6}, {"temperature": 3.0}, {"top_k": 3}, {"top_p": 0.6}):
        yield Case(f"{len(SHORT)} tokens", choice, prompt=SHORT, choice=choice)
    yield Case(f"{len(LONG)} tokens", {"temperature": 1.0}, prompt=LONG, choice={"temperature": 1.0})
    for choice in ({"temperature": 1.5, "top_p": 0.6}, {"temperature": 0.6, "top_k": 3}):
        yield Case(f"{len(SHORT)} tokens", choice, prompt=SHORT, choice=choice)


@check("parity.distribution", needs=("generate",), cases=_filters)
def first_token_distribution(adapter: Adapter, model: Any, prompt: list[int], choice: dict[str, Any]) -> None:
    """Token frequencies match softmax(logits / T), and top_k and top_p exclude exactly the tokens that they should.

    Silent because logprobs do not show it: an engine that reports correct ones may still draw from the 50 likeliest
    tokens only, because of the model's generation config. Look at the defaults of every sampling parameter, and at the
    order of temperature and filters.
    """
    # An engine that ignores the limit shows it on few samples; a thousand of its full length would take hours.
    for n in (8, 1000):
        (completions,) = _generate_again(adapter, model, [prompt], sampling(n=n, max_new_tokens=1, **choice))
        longest = max(len(completion.token_ids) for completion in completions)
        told = f"a completion of {longest} tokens where 1 was allowed"
        assert_true(longest <= 1, told, quantity="length", compared=0)
    empty = sum(not completion.token_ids for completion in completions)
    told = f"{empty} of {len(completions)} completions hold no token, not even an EOS"
    assert_true(not empty, told, quantity="empty completions", magnitude=empty / len(completions), compared=0)
    tolerance = adapter.conventions.engine_tolerance
    at_the_cut = near_a_cut(model, prompt, tolerance, **choice)
    drawn = [token for completion in completions if (token := int(completion.token_ids[0])) not in at_the_cut]
    probabilities_V = distribution(model, prompt, **choice)
    probabilities_V[list(at_the_cut)] = 0
    if not drawn:
        raise NothingToCompare("within engine_tolerance, a filter may keep or drop each of these tokens")
    probabilities_V /= probabilities_V.sum()
    difference_V = torch.tensor(drawn).bincount(minlength=len(probabilities_V)) / len(drawn) - probabilities_V
    token = int(difference_V.abs().argmax())
    told = (
        f"with {', '.join(f'{name}={value!r}' for name, value in choice.items())}, {len(drawn)} first tokens are not drawn "
        f"from the trainer's distribution: token {token} was drawn {drawn.count(token)} times and should be about "
        f"{float(probabilities_V[token]) * len(drawn):.0f} times"
    )
    magnitude = float(difference_V.abs().sum() / 2)
    holds = p_value(drawn, probabilities_V, tolerance) > IMPROBABLE
    assert_true(holds, told, quantity="first tokens", magnitude=magnitude, compared=len(drawn))
