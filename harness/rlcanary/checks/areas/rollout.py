"""Rollout: each completion stays with its prompt, its item, its reward and its policy version."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Generator

from rlcanary.checks.check import check
from rlcanary.checks.literal import literal
from rlcanary.checks.subject import Call, NothingToCompare, Subject
from rlcanary.checks.worlds.scripted_engine import (
    ScriptedItem,
    arguments_of,
    completion_of,
    prompt_of,
    sampling_of,
    scripted_items,
    spelled,
)
from rlcanary.contract.batch import Completion
from rlcanary.contract.conventions import Conventions
from rlcanary.tiny_models import EOS_ID, PAD_ID

IDENTITY = "[(group.item_id, [int(token) for token in group.prompt_ids]) for group in output]"
TOKENS = (
    "[sorted([int(token) for token in completion.token_ids] for completion in group.completions) for group in output]"
)
SCORED = (
    "[sorted(([int(token) for token in completion.token_ids], completion.finish_reason, "
    "['nan'] * len(completion.token_ids) if completion.logprobs is None else "
    "[str(round(float(logprob), 4)) for logprob in completion.logprobs]) "
    "for completion in group.completions) for group in output]"
)
REWARDS = (
    "[(len(group.rewards), sorted(([int(token) for token in completion.token_ids], str(round(float(reward), 4))) "
    "for completion, reward in zip(group.completions, group.rewards))) for group in output]"
)
REQUESTED = "list(dict.fromkeys({} for request in arguments[0].requests))"


def _cases() -> Iterator[list[ScriptedItem]]:
    yield scripted_items(2, 1)
    yield scripted_items(2, 2)
    yield scripted_items(7, 3)


def _told(scripted: list[ScriptedItem]) -> str:
    return f"{len(scripted)} items, {len(scripted[0].completions)} completions each"


def _rollout(subject: Subject, scripted: list[ScriptedItem], **options: Any) -> Call:
    return subject.call("rollout", *arguments_of(scripted, sampling_of(n=len(scripted[0].completions)), **options))


@check("rollout.groups_follow_items", needs=("rollout",))
def groups_follow_items(subject: Subject, rng: Generator) -> None:
    """A rollout returns one group per item, in the items' order, with the item's id and its prompt's ids.

    Silent because a group of another prompt looks valid: rewards and logprobs then belong to other text, and a batch
    that lost its last group is only a little smaller. Look for `as_completed` instead of `gather`, for `zip` over
    chunks of unequal length, for a loop that stops before it has used all fetched results, and for prompts that are
    tokenised or padded again on the way to the trainer.
    """
    for scripted in _cases():
        with subject.case(_told(scripted)):
            call = _rollout(subject, scripted)
            expected = [(item.id, item.prompt_ids) for item in scripted]
            call.expect_equal(IDENTITY, expected, f"the groups are not those of the {len(scripted)} items, in order")


@check("rollout.completions_of_their_prompt", needs=("rollout",))
def completions_of_their_prompt(subject: Subject, rng: Generator) -> None:
    """Each group holds exactly the n completions that the engine returned for its prompt.

    Silent because any completion can be scored under any prompt; equal completions of one prompt count as often as they
    were sampled. Look for completions that are flattened and cut into groups again, where `repeat` and
    `repeat_interleave` differ, for dictionaries and sets keyed by text, and for padding of unequal groups.
    """
    for scripted in _cases():
        with subject.case(_told(scripted)):
            call = _rollout(subject, scripted)
            expected = [sorted(list(completion.token_ids) for completion in item.completions) for item in scripted]
            call.expect_equal(TOKENS, expected, "the groups do not hold the completions of their prompts")


@check("rollout.tokens_in_tokens_out", needs=("rollout",))
def tokens_in_tokens_out(subject: Subject, rng: Generator) -> None:
    """A completion keeps its sampled ids: not encoded again from text, not stripped, no EOS appended.

    Silent because the text is the same: "hello" sampled letter by letter encodes to one id, which has no sampled
    logprob. Truncated completions have no end of sequence and an id that equals the padding may be sampled. Look for
    `encode(decode(ids))`, for `skip_special_tokens`, and for filters on the padding id or the end of sequence.
    """
    sampled = {
        "a word spelled out": completion_of("hello", 1),
        "a truncated word": completion_of("yes", 1, "length"),
        "an id that equals the padding": Completion(
            [*spelled("a"), PAD_ID, *spelled("b"), EOS_ID], [-1.0] * 4, text="ab"
        ),
        "an id that equals the padding, at its end": Completion(
            [*spelled("a"), PAD_ID], [-1.0] * 2, "length", text="a"
        ),
        "an end of turn within": Completion([*spelled("a"), EOS_ID, *spelled("b")], [-1.0] * 3, "length", text="ab"),
    }
    for told, completion in sampled.items():
        with subject.case(told):
            scripted = [ScriptedItem("a", prompt_of("a"), [completion], {completion.text or "": 1.0})]
            call = _rollout(subject, scripted)
            call.expect_equal(TOKENS, [[list(completion.token_ids)]], f"{told} did not come back as it was sampled")


@check("rollout.logprobs_and_finish_reasons", needs=("rollout",))
def logprobs_and_finish_reasons(subject: Subject, rng: Generator) -> None:
    """Each completion keeps the sampler's logprobs of its own tokens and its finish reason.

    Silent because the logprobs of a neighbour, or those shifted by a token, are negative numbers as well: the importance
    ratio is wrong on policy and gets clipped. A missing logprob stays missing (None or NaN), because 0.0 means that the
    token was certain. Look for lists of different origin that are zipped together, and for fallback values.
    """
    unscored = [
        Completion([*spelled("a0"), EOS_ID], None, text="a0"),
        Completion([*spelled("a1"), EOS_ID], [-0.5, float("nan"), -0.25], text="a1"),
    ]
    for scripted in (*_cases(), [ScriptedItem("a", prompt_of("a"), unscored, {"a0": 1.0, "a1": 0.0})]):
        with subject.case(_told(scripted)):
            call = _rollout(subject, scripted)
            expected = [sorted(map(_scored, item.completions)) for item in scripted]
            call.expect_equal(SCORED, expected, "ids, finish reason and logprobs do not belong together")


def _scored(completion: Completion) -> tuple[list[int], str, list[str]]:
    logprobs = [float("nan")] * len(completion.token_ids) if completion.logprobs is None else completion.logprobs
    return list(completion.token_ids), completion.finish_reason, [str(round(logprob, 4)) for logprob in logprobs]


@check("rollout.rewards_of_their_completion", needs=("rollout",))
def rewards_of_their_completion(subject: Subject, rng: Generator) -> None:
    """Each completion has the reward of its own item's function for its text; 0.0 stays 0.0 and None becomes NaN.

    Silent because a neighbour's reward is a plausible reward: the advantage then has a random direction. Look for
    rewards that are collected in the order in which they arrive, for `reward or default`, and for text that is stripped
    or has its prompt in front before it is scored.
    """
    texts = (" a\n", "a", "", "b")
    completions = [completion_of(text, 1) for text in texts]
    rewards: dict[str, float | None] = {" a\n": 1.0, "a": 0.0, "": -0.5, "b": 0.25}
    scored = ScriptedItem("a", prompt_of("a"), completions, rewards)
    with_none = ScriptedItem("a", prompt_of("a"), completions, rewards | {"b": None})
    for scripted in (*_cases(), [scored], [with_none]):
        with subject.case(_told(scripted)):
            call = _rollout(subject, scripted)
            expected = [(len(item.completions), sorted(_rewarded(item))) for item in scripted]
            call.expect_equal(REWARDS, expected, "the rewards are not those of the completions beside them")


def _rewarded(item: ScriptedItem) -> list[tuple[list[int], str]]:
    rewards = [item.rewards[completion.text or ""] for completion in item.completions]
    told = ["nan" if reward is None else str(round(reward, 4)) for reward in rewards]
    return list(zip((list(completion.token_ids) for completion in item.completions), told, strict=True))


@check("rollout.items_with_equal_prompts", needs=("rollout",))
def items_with_equal_prompts(subject: Subject, rng: Generator) -> None:
    """Two items that share a prompt keep their own groups and their own reward functions.

    Silent because data sets hold duplicates and a dictionary keyed by prompt merges them: one item is rewarded by the
    other's answer, or a group is twice the size. Look for dictionaries keyed by prompt, and for prefixes as identities.
    """
    first, second = [completion_of("a0", 1)], [completion_of("a1", 2)]
    scripted = [
        ScriptedItem("a", prompt_of("a"), first, {"a0": 1.0, "a1": 0.75}),
        ScriptedItem("b", prompt_of("a"), second, {"a0": 0.5, "a1": 0.25}),
    ]
    call = _rollout(subject, scripted)
    call.expect_equal(
        IDENTITY, [(item.id, item.prompt_ids) for item in scripted], "the two items have not one group each"
    )
    everything = sorted(list(completion.token_ids) for completion in first + second)
    call.expect_equal(f"sorted(sum({TOKENS}, []))", everything, "the two groups do not share out what was sampled")
    # The engine decides which of the two completions goes to which item.
    by_item = [{str([*spelled(text), EOS_ID]): reward for text, reward in item.rewards.items()} for item in scripted]
    expression = (
        f"[float(group.rewards[0]) == rewards.get(str([int(token) for token in group.completions[0].token_ids])) "
        f"for group, rewards in zip(output, {literal(by_item)})]"
    )
    call.expect_equal(expression, [True, True], "a completion is not rewarded by the function of its own item")


@check("rollout.prompts_as_given", needs=("rollout",))
def prompts_as_given(subject: Subject, rng: Generator) -> None:
    """The engine gets each item's prompt ids unchanged: nothing prepended, padded or decoded.

    Silent because the model answers any prompt: with a second BOS, padding tokens or without its chat template it samples
    from another distribution than the one that the trainer scores. Look for a BOS in the template and in the engine, for
    left-padding before sampling, and for prompts that pass through text.
    """
    scripted = scripted_items(3, 1)
    call = _rollout(subject, scripted)
    call.expect_equal(
        "sorted({request.prompt for request in arguments[0].requests})",
        sorted(item.prompt for item in scripted),
        "the engine was asked to complete other prompts than the items'",
    )


@check("rollout.sampling_reaches_the_engine", needs=("rollout",))
def sampling_reaches_the_engine(subject: Subject, rng: Generator) -> None:
    """Temperature, top-p, top-k, token limit and EOS ids reach the engine unchanged, and no penalty is added.

    Silent because another temperature or a repetition penalty still samples good text, only not from the distribution
    that is trained; a `0` that means greedy or "off" turns into a default under `or`; a limit that forgets the prompt
    overruns the context. Look for `x or default`, for keyword arguments that shadow the configuration, for the model's
    generation config, and for a token limit computed from the padded prompt.
    """
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 16, "eos_token_ids": (EOS_ID,)}
    choices: list[dict[str, Any]] = [
        {"temperature": 0.7},
        {"temperature": 0.0},
        {"top_p": 0.9},
        {"top_k": 20},
        {"max_new_tokens": 7},
        {"max_new_tokens": 1},
        {"eos_token_ids": (EOS_ID, 5)},
        {"eos_token_ids": (5,)},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "max_new_tokens": 7, "eos_token_ids": (EOS_ID, 5)},
    ]
    scripted = scripted_items(2, 1)
    for choice in choices:
        with subject.case(choice):
            values = neutral | choice
            call = subject.call("rollout", *arguments_of(scripted, sampling_of(**values)))
            asked = "the engine was given something else"
            for name in ("temperature", "top_p", "top_k", "max_new_tokens"):
                given = REQUESTED.format(f"request.sampling.get({name!r}, {neutral[name]})")
                call.expect_equal(given, [values[name]], f"{name} {values[name]} was asked for, {asked}")
            ends = REQUESTED.format("tuple(request.sampling.get('eos_token_ids', ()))")
            call.expect_equal(
                ends, [values["eos_token_ids"]], f"EOS ids {values['eos_token_ids']} were asked for, {asked}"
            )
            for name in ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_p"):
                none = 1.0 if name == "repetition_penalty" else 0.0
                expression = REQUESTED.format(f"request.sampling.get({name!r}) or {none}")
                call.expect_equal(expression, [none], f"the engine was given a {name} that nobody asked for")


@check("rollout.seed_reaches_the_engine", needs=("rollout",))
def seed_reaches_the_engine(subject: Subject, rng: Generator) -> None:
    """A requested seed, 0 included, reaches every request that can carry one, and another seed gives other requests.

    Silent because a run with an ignored seed looks normal: it cannot be repeated, or its repetitions are all the same
    sample. Look for `if seed:`, for a seed that is set on some of the requests, and for a constant. An engine that is
    seeded as a whole gets requests without seeds, which leaves nothing to compare.
    """
    scripted = scripted_items(2, 1)
    drawn = "sorted(str(request.sampling.get('seed')) for request in arguments[0].requests)"
    calls = {seed: subject.call("rollout", *arguments_of(scripted, sampling_of(seed=seed))) for seed in (3, 0)}
    seeds = {
        seed: sorted(str(request.sampling.get("seed")) for request in call.given[0].requests)
        for seed, call in calls.items()
    }
    if all(set(each) <= {"None"} for each in seeds.values()):
        raise NothingToCompare("requests carry no seed: the engine is seeded as a whole")
    for seed, call in calls.items():
        with subject.case(f"seed {seed}"):
            call.expect_equal(f"'None' in {drawn}", False, f"seed {seed} was asked for, a request carries none")
    calls[0].expect_equal(f"{drawn} == {seeds[3]}", False, "seeds 3 and 0 were asked for, the requests carry the same")


@check("rollout.seeds", needs=("rollout",))
def seeds(subject: Subject, rng: Generator) -> None:
    """Unseeded requests never share a seed; seeded ones for the same prompt each get their own.

    Silent because text drawn with the same random numbers still differs between prompts: only the variety, and with it
    the groups' rewards, collapses. A group sampled request by request with one seed is n times the same completion.
    Look for a constant seed in the sampling parameters.
    """
    requests = "[request for request in arguments[0].requests if request.sampling.get('seed') is not None]"
    for seed, key in ((None, "request.sampling['seed']"), (3, "(request.prompt, request.sampling['seed'])")):
        with subject.case(f"seed {seed}"):
            call = subject.call("rollout", *arguments_of(scripted_items(3, 2), sampling_of(n=2, seed=seed)))
            drawn = f"[{key} for request in {requests}]"
            call.expect_equal(
                f"len({drawn}) - len(set({drawn}))", 0, f"requests share a seed where the seed asked for is {seed}"
            )


def _syncs_between_rollouts(conventions: Conventions) -> str | None:
    return None if conventions.sync_while_sampling else "no weights are synced while sampling"


@check("rollout.policy_version", needs=("rollout",), applies=_syncs_between_rollouts)
def policy_version(subject: Subject, rng: Generator) -> None:
    """A group's policy version is the one at the start of its sampling, not at the end.

    Silent because the tag is only used to judge staleness: a group that straddled a weight sync counts as fresh, stays in
    training beyond its limit, and is corrected as if the new policy had sampled it. Look for a version that is read after
    the engine's answer arrived, or when the group is stored. Code that never syncs during sampling declares
    `sync_while_sampling=False`.
    """
    for scripted in (scripted_items(1, 1), scripted_items(3, 2)):
        with subject.case(_told(scripted)):
            call = _rollout(subject, scripted, version=3, syncing=True)
            asked = (
                "min((request.version for request in arguments[0].requests if request.prompt == "
                "tuple(int(token) for token in group.prompt_ids)), default=10**6)"
            )
            call.expect_equal(
                f"[3 <= group.policy_version <= {asked} for group in output]",
                [True] * len(scripted),
                "with a weight sync during every request, groups carry a later version than that of their request",
            )


@check("rollout.token_versions", needs=("rollout",), applies=_syncs_between_rollouts)
def token_versions(subject: Subject, rng: Generator) -> None:
    """A completion keeps the policy version of each token if the engine reports it.

    Silent because one version per group is enough elsewhere: tokens from before a weight sync are then treated as
    tokens of the policy after it, or the reverse. Look at the fields that are copied from the engine's answer.
    """
    served = (
        "[list(answer.token_versions) for answer in "
        "arguments[0].served.get(tuple(int(token) for token in group.prompt_ids), []) "
        "if list(answer.token_ids) == [int(token) for token in completion.token_ids]]"
    )
    call = _rollout(subject, scripted_items(2, 1), version=3, syncing=True)
    call.expect_equal(
        f"[list(completion.token_versions or ()) in {served} for group in output for completion in group.completions]",
        [True, True],
        "the versions of a completion's tokens are not those that the engine reported",
    )


@check("rollout.failed_request_is_loud", needs=("rollout",))
def failed_request_is_loud(subject: Subject, rng: Generator) -> None:
    """A failed request raises, drops its group or is marked "abort"; it never becomes a completion with a reward.

    Silent because an empty completion with reward 0 looks like a wrong answer, and the policy is punished for the engine's
    failure. Look for `except` around the request, and for `return_exceptions=True`.
    """
    scripted = scripted_items(3, 1)
    arguments = arguments_of(scripted, sampling_of(), fails=[scripted[1].prompt])
    call = subject.call_unless_raised("rollout", *arguments)
    # If the engine got another prompt instead, no request failed.
    if call is None or scripted[1].prompt not in [request.prompt for request in call.given[0].requests]:
        return
    call.expect_equal(
        "[group.item_id for group in output if group.item_id == 'b' "
        "and any(completion.finish_reason != 'abort' for completion in group.completions)]",
        [],
        "the engine failed on the prompt of item 'b', and a completion was made up",
        may_raise=True,
    )
    call.expect_equal(
        f"[group for group in zip({IDENTITY}, {TOKENS}) if group[0][0] != 'b']",
        [((item.id, item.prompt_ids), [list(item.completions[0].token_ids)]) for item in (scripted[0], scripted[2])],
        "the engine failed on the prompt of item 'b', and the groups of the others are not what they were",
        may_raise=True,
    )


@check("rollout.samples_afresh", needs=("rollout",))
def samples_afresh(subject: Subject, rng: Generator) -> None:
    """A second rollout of the same items returns newly sampled completions.

    Silent because completions of an earlier policy are plausible completions. Look for caches keyed by prompt, for default
    arguments that collect, and for queues that still hold the last round.
    """
    first = scripted_items(2, 1)
    second = [
        ScriptedItem(item.id, item.prompt_ids, [completion_of(f"{item.id}9", 5)], {f"{item.id}9": 0.5})
        for item in first
    ]
    before = _rollout(subject, first)
    call = _rollout(subject, second)
    expected = [[list(item.completions[0].token_ids)] for item in second]
    call.expect_equal(TOKENS, expected, "the second rollout does not hold what was sampled for it", before=before)


@check("rollout.inputs_untouched", needs=("rollout",))
def inputs_untouched(subject: Subject, rng: Generator) -> None:
    """A rollout does not modify the items and the sampling parameters.

    Silent because the first rollout is right: the next one samples with another n, or from longer prompts. Look for
    assignments into the sampling parameters and for `+=` on prompt ids.
    """
    scripted = scripted_items(2, 2)
    sampling = sampling_of(n=2)
    call = subject.call("rollout", *arguments_of(scripted, sampling))
    expected = [(item.id, item.prompt_ids) for item in scripted]
    call.expect_equal("[(item.id, item.prompt_ids) for item in arguments[1]]", expected, "the items changed")
    call.expect_equal("arguments[2]", sampling, "the sampling parameters changed")
