"""Parity of sampler and trainer: the same distribution, the same logprobs, the same ends of completions."""

import math
from collections import Counter
from typing import Any

import torch
from torch import Generator

from rlcanary.checks.check import check
from rlcanary.checks.subject import Call, Finding, NothingToCompare, Subject
from rlcanary.checks.worlds.samples import (
    distribution,
    p_value,
    sampling,
    shortfall,
    trainer_logprobs,
    wrong_ending,
)
from rlcanary.checks.worlds.tiny_trainer import build, new_engine, script
from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.batch import Completion

SHORT = [5, 6, 7]
# Several whole blocks of a prefix cache.
LONG = list(range(3, 51))
# Lengths that differ, so that a batch has padding, and a beginning that two of them share.
PROMPTS = [[1, 8, 9, 10, 11, 12], [13], LONG, [*LONG[:40], 60, 61], [1, 14, 15]]
# Float32 against float64, in nats.
CLOSE = 2e-4
# At ten such tests a day, a correct sampler fails once in three hundred thousand years.
IMPROBABLE = 1e-9


def _generate(
    subject: Subject, prompts: list[list[int]], request: dict[str, Any]
) -> tuple[Call, list[list[Completion]]]:
    """Sample, and demand the requested number of completions."""
    call = subject.call("generate", new_engine(subject), prompts, request)
    counts = [len(group) for group in call.output]
    expected = [request["n"]] * len(prompts)
    if counts != expected:
        lines = ["got = [len(group) for group in adapter.generate(*arguments)]", f"assert got == {expected}, got"]
        raise Finding(
            f"{counts} completions came back, {expected} were asked for", call.snippet(lines), "number of completions"
        )
    return call, call.output


def _generate_again(
    subject: Subject, prompts: list[list[int]], request: dict[str, Any]
) -> tuple[Call, list[list[Completion]]]:
    """Sample with a seed if the engine takes one, so that the snippet reproduces a rare counterexample."""
    try:
        return _generate(subject, prompts, {**request, "seed": 0})
    except NotProvided:
        return _generate(subject, prompts, request)


@check("parity.logprobs", needs=("generate",))
def logprobs(subject: Subject, rng: Generator) -> None:
    """The sampler's logprobs of its tokens equal the trainer's at the sampling temperature.

    Silent because raw logprobs, at temperature 1, are off by a tenth of a nat, which looks like the noise of other
    kernels; so is a repetition penalty from the model's config. Look at raw and processed logprobs, at the defaults an
    engine reads from the model's folder, and at whether every path to the engine sets the same options.
    """
    for prompts, temperature in (([SHORT], 1.0), ([SHORT], 0.6), (PROMPTS, 1.5)):
        with subject.case(f"{len(prompts)} prompts, temperature {temperature}"):
            _expect_trainer_logprobs(subject, prompts, temperature)


def _expect_trainer_logprobs(subject: Subject, prompts: list[list[int]], temperature: float) -> None:
    model = build("tiny_llama()")
    call, groups = _generate(subject, prompts, sampling(temperature=temperature, n=2))
    for index, (prompt, completions) in enumerate(zip(prompts, groups, strict=True)):
        for completion in completions:
            if completion.logprobs is None:
                raise NothingToCompare("the engine gives no logprobs")
            expected_T = trainer_logprobs(model, prompt, completion.token_ids, temperature)
            got_T = torch.tensor(list(completion.logprobs)).double()
            subject.compared(len(expected_T))
            if got_T.shape == expected_T.shape and torch.allclose(got_T, expected_T, rtol=0, atol=CLOSE):
                continue
            lines = script(
                "for prompt, completions in zip(arguments[1], adapter.generate(*arguments)):",
                "    for completion in completions:",
                "        got = torch.tensor(list(completion.logprobs)).double()",
                f"        expected = trainer_logprobs(tiny_llama(), prompt, completion.token_ids, {temperature})",
                f"        torch.testing.assert_close(got, expected, rtol=0, atol={CLOSE})",
            )
            shown = [", ".join(f"{value:.4f}" for value in side.tolist()) for side in (got_T, expected_T)]
            raise Finding(
                f"at temperature {temperature}, prompt {index + 1} of {len(prompts)}: the sampler's logprobs are not the "
                f"trainer's\n  sampler: {shown[0]}\n  trainer: {shown[1]}",
                call.snippet(lines),
                f"logprobs of prompt {index + 1}",
                float((got_T - expected_T).abs().max()) if got_T.shape == expected_T.shape else math.inf,
            )


@check("parity.logprobs_are_logprobs", needs=("generate",))
def logprobs_are_logprobs(subject: Subject, rng: Generator) -> None:
    """Each sampled token has one logprob, finite and at most 0.

    Silent because a ratio of exp(logprob - 1234) is 0, which only makes the loss small; a missing logprob filled with
    0.0 means certainty. Look at the order in which the fields of an engine's answer are unpacked, and at defaults for
    missing fields.
    """
    for choice in ({}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.6}):
        with subject.case(choice):
            call, groups = _generate(subject, [SHORT, [13]], sampling(n=2, **choice))
            for completion in (completion for group in groups for completion in group):
                if completion.logprobs is None:
                    raise NothingToCompare("the engine gives no logprobs")
            expression = (
                "[len(completion.logprobs) == len(completion.token_ids) and all(-torch.inf < value <= 1e-6 for value in "
                "completion.logprobs) for group in output for completion in group]"
            )
            call.expect_equal(expression, [True] * 4, "these completions have not one logprob per token")


@check("parity.greedy", needs=("generate",))
def greedy(subject: Subject, rng: Generator) -> None:
    """At temperature 0 each prompt is continued with the trainer's likeliest tokens, in the order of the prompts.

    Silent because the continuation of the neighbour's prompt, or of a prompt with padding in it, is text. Look for
    results that are collected as they complete, for prompts that are padded on the way, and for a 0 that is taken as
    "not set" and replaced by the default temperature.
    """
    for prompts in ([SHORT], PROMPTS):
        with subject.case(f"{len(prompts)} prompts"):
            call, groups = _generate(subject, prompts, sampling(temperature=0.0))
            model = build("tiny_llama()")
            for index, (prompt, (completion,)) in enumerate(zip(prompts, groups, strict=True)):
                lost = shortfall(model, prompt, completion.token_ids)
                subject.compared(len(completion.token_ids))
                if lost > CLOSE:
                    lines = script(
                        "for prompt, (completion,) in zip(arguments[1], adapter.generate(*arguments)):",
                        "    got = shortfall(tiny_llama(), prompt, completion.token_ids)",
                        f"    assert got <= {CLOSE}, (prompt, got)",
                    )
                    raise Finding(
                        f"prompt {index + 1} of {len(prompts)} was continued with {list(completion.token_ids)}, where "
                        f"one of the tokens is {lost:.3g} nats less likely than the likeliest",
                        call.snippet(lines),
                        f"prompt {index + 1}",
                        lost,
                    )


@check("parity.samples_differ", needs=("generate",))
def samples_differ(subject: Subject, rng: Generator) -> None:
    """The samples of a prompt differ from each other, and those of a second request from the first.

    Silent because a group of copies has one reward, no advantage and nothing to learn from. Look for a seed that is fixed
    in the sampling parameters and sent with every request.
    """
    request = sampling(n=6, max_new_tokens=8)
    call, (group,) = _generate(subject, [SHORT], request)
    ids = "[tuple(completion.token_ids) for completion in output[0]]"
    call.expect_equal(f"len(set({ids})) > 1", True, "six samples of one prompt are all the same")
    again = subject.call("generate", call.arguments[0], [SHORT], request)
    first = [tuple(completion.token_ids) for completion in group]
    subject.compared()
    if [tuple(completion.token_ids) for completion in again.output[0]] == first:
        lines = script(
            "first, second = adapter.generate(*arguments), adapter.generate(*arguments)",
            "ids = [[tuple(completion.token_ids) for completion in output[0]] for output in (first, second)]",
            "assert ids[0] != ids[1], ids[0]",
        )
        raise Finding("a second request without a seed gave the same samples", call.snippet(lines))


@check("parity.seed", needs=("generate",))
def seed(subject: Subject, rng: Generator) -> None:
    """A seeded request repeats its samples, which differ from each other and from those of another seed.

    Silent because unseeded samples are as good, only not reproducible. Look for a seed that is dropped on the way to
    the engine, or shared by all samples of a group.
    """
    outputs = []
    for value in (1, 1, 2):
        call, (group,) = _generate(subject, [SHORT], sampling(n=4, max_new_tokens=8, seed=value))
        outputs.append([tuple(completion.token_ids) for completion in group])
    holds = outputs[0] == outputs[1] != outputs[2] and len(set(outputs[0])) > 1
    subject.compared()
    if not holds:
        lines = script(
            "engine, prompts, request = arguments",
            "outputs = []",
            "for seed in (1, 1, 2):",
            "    (group,) = adapter.generate(engine, prompts, {**request, 'seed': seed})",
            "    outputs.append([tuple(completion.token_ids) for completion in group])",
            "assert outputs[0] == outputs[1], 'the same seed gave other samples'",
            "assert outputs[0] != outputs[2], 'another seed gave the same samples'",
            "assert len(set(outputs[0])) > 1, 'all samples of a seed are the same'",
        )
        told = "the same seed gave other samples"
        if outputs[0] == outputs[1]:
            told = (
                "another seed gave the same samples"
                if outputs[0] == outputs[2]
                else "all samples of a seed are the same"
            )
        raise Finding(told, call.snippet(lines), told)


@check("parity.endings", needs=("generate",))
def endings(subject: Subject, rng: Generator) -> None:
    """A completion ends with its first EOS, which it includes, or at max_new_tokens; its finish reason says which.

    Silent because a completion without its end-of-sequence token trains a policy that never stops, and a truncated one
    that says "stop" is rewarded as if it were whole. Look at what the engine strips from its answer, at several
    end-of-sequence ids, and at token limits that include the prompt.
    """
    # So many ids that most completions end with one of them, and one id that hardly any ends with.
    for eos_token_ids, max_new_tokens in ((tuple(range(0, 64, 4)), 6), ((2,), 5), ((2,), 1)):
        with subject.case(f"{len(eos_token_ids)} EOS ids, at most {max_new_tokens} tokens"):
            request = sampling(n=8, max_new_tokens=max_new_tokens, eos_token_ids=eos_token_ids)
            call, groups = _generate_again(subject, [SHORT, LONG], request)
            wrong = [
                (completion, told)
                for group in groups
                for completion in group
                if (told := wrong_ending(completion, eos_token_ids, max_new_tokens))
            ]
            subject.compared(sum(map(len, groups)))
            if wrong:
                completion, told = wrong[0]
                lines = script(
                    "request = arguments[2]",
                    "for group in adapter.generate(*arguments):",
                    "    for completion in group:",
                    "        got = wrong_ending(completion, request['eos_token_ids'], request['max_new_tokens'])",
                    "        assert got is None, (completion, got)",
                )
                raise Finding(f"the completion {list(completion.token_ids)} has {told}", call.snippet(lines), "endings")


@check("parity.distribution", needs=("generate",))
def first_token_distribution(subject: Subject, rng: Generator) -> None:
    """Token frequencies match softmax(logits / T), and top_k and top_p exclude exactly the tokens that they should.

    Silent because logprobs do not show it: an engine that reports correct ones may still draw from the 50 likeliest
    tokens only, because of the model's generation config. Look at the defaults of every sampling parameter, and at the
    order of temperature and filters.
    """
    cases: list[tuple[list[int], dict[str, Any]]] = [
        (SHORT, {"temperature": 1.0}),
        (SHORT, {"temperature": 0.6}),
        (SHORT, {"temperature": 3.0}),
        (SHORT, {"top_k": 3}),
        (SHORT, {"top_p": 0.6}),
        (LONG, {"temperature": 1.0}),
    ]
    for prompt, choice in cases:
        with subject.case(f"{len(prompt)} tokens", choice):
            _expect_distribution(subject, prompt, choice)


def _expect_distribution(subject: Subject, prompt: list[int], choice: dict[str, Any]) -> None:
    probabilities_V = distribution(build("tiny_llama()"), prompt, **choice)
    # An engine that ignores the limit shows it on few samples; a thousand of its full length would take hours.
    call, (few,) = _generate_again(subject, [prompt], sampling(n=8, max_new_tokens=1, **choice))
    longest = max(len(completion.token_ids) for completion in few)
    if longest > 1:
        lines = ["(few,) = adapter.generate(*arguments)", "assert max(len(each.token_ids) for each in few) <= 1"]
        raise Finding(f"a completion of {longest} tokens where 1 was allowed", call.snippet(lines), "length")
    call, (completions,) = _generate_again(subject, [prompt], sampling(n=1000, max_new_tokens=1, **choice))
    empty = sum(not completion.token_ids for completion in completions)
    if empty:
        lines = [
            "(completions,) = adapter.generate(*arguments)",
            "assert all(len(each.token_ids) for each in completions)",
        ]
        told = f"{empty} of {len(completions)} completions hold no token, not even an EOS"
        raise Finding(told, call.snippet(lines), "empty completions", empty / len(completions))
    drawn = [int(completion.token_ids[0]) for completion in completions]
    subject.compared(len(drawn))
    if p_value(drawn, probabilities_V) > IMPROBABLE:
        return
    counts = Counter(drawn)
    token = max(range(len(probabilities_V)), key=lambda token: abs(counts[token] / len(drawn) - probabilities_V[token]))
    options = ", ".join(f"{name}={value!r}" for name, value in choice.items())
    lines = script(
        "(completions,) = adapter.generate(*arguments)",
        "drawn = [completion.token_ids[0] for completion in completions]",
        f"got = p_value(drawn, distribution(tiny_llama(), arguments[1][0], {options}))",
        f"assert got > {IMPROBABLE}, got",
    )
    raise Finding(
        f"with {options}, {len(drawn)} first tokens are not drawn from the trainer's distribution: token {token} was drawn "
        f"{counts[token]} times and should be about {float(probabilities_V[token]) * len(drawn):.0f} times",
        call.snippet(lines),
        "first tokens",
        sum(abs(counts[each] / len(drawn) - float(share)) for each, share in enumerate(probabilities_V)) / 2,
    )
