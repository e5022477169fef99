"""Collating: every token, reward and logprob arrives in the row it belongs to."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Generator, Tensor

from rlcanary.checks.asserts import assert_equal, assert_true
from rlcanary.checks.case import Case
from rlcanary.checks.check import check
from rlcanary.checks.worlds.groups import PADDING_IDS
from rlcanary.checks.worlds.groups import sampled as drawn_groups
from rlcanary.checks.worlds.rows import one_of
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.batch import Completion, Group

GROUPS = [
    Group(
        prompt_ids=[11, 12],
        completions=[
            Completion([21, 22, 2], logprobs=[-0.1, -0.2, -0.3]),
            Completion([23], logprobs=[-0.4], finish_reason="length"),
        ],
        # The second is a number of float32, and of no half precision.
        rewards=[1.0, 64.03125],
        item_id="a",
        policy_version=3,
    ),
    Group(
        prompt_ids=[13, 14, 15, 16],
        completions=[Completion([24, 2], logprobs=[-0.5, -0.6]), Completion([24, 2], logprobs=[-0.7, -0.8])],
        rewards=[0.5, 0.75],
        item_id="b",
        policy_version=4,
    ),
    # Another item with the prompt of the first.
    Group(
        prompt_ids=[11, 12],
        completions=[Completion([25, 2], logprobs=[-0.9, -1.0])],
        rewards=[-0.5],
        item_id="c",
        policy_version=4,
    ),
    # The second item once more.
    Group(
        prompt_ids=[13, 14, 15, 16],
        completions=[Completion([26], logprobs=[-1.1]), Completion([27, 28], logprobs=[-1.2, -1.3])],
        rewards=[2.0, 0.25],
        item_id="b",
        policy_version=5,
    ),
]

# More rows than a chunk is likely to hold, short and long in turn, with ids of a large vocabulary and long ids of items.
MANY = [
    Group(
        prompt_ids=[151_000 + number, 40_000, 300],
        completions=[
            Completion([70_000 + number] * (1 + number % 5), logprobs=[-0.1] * (1 + number % 5)),
            Completion([24, 2], logprobs=[-0.5, -0.6]),
        ],
        rewards=[number / 8, -0.25],
        item_id=f"item {number}",
        policy_version=number % 3,
    )
    for number in range(35)
]


def rows_of(groups: list[Group]) -> list[tuple[Group, Completion, float]]:
    """Return the group, the completion and the reward of each row."""
    return [
        (group, completion, reward)
        for group in groups
        for completion, reward in zip(group.completions, group.rewards, strict=True)
    ]


def own(adapter: Adapter, completion: Completion, values: Sequence[float]) -> list[float]:
    """Return the values of the tokens that are trained, rounded: those that the policy sampled."""
    if adapter.conventions.mask_truncated and completion.finish_reason == "length":
        return []
    marks = [True] * len(completion.token_ids) if completion.sampled is None else completion.sampled
    return [round(value, 4) for value, is_own in zip(values, marks, strict=True) if is_own]


def masked(values_BT: Tensor, mask_BT: Tensor) -> list[list[float]]:
    """Return the entries of each row where the mask is true, rounded."""
    return [
        [round(value, 4) for value in row[keep.bool()].tolist()] for row, keep in zip(values_BT, mask_BT, strict=True)
    ]


def assert_rows(name: str, got: Sequence[object], expected: Sequence[object]) -> None:
    """Assert that there are as many rows as expected, each with its expected value."""
    told = f"{len(got)} rows have {name}, {len(expected)} were expected"
    assert_true(len(got) == len(expected), told, quantity=f"number of rows with {name}", compared=0)
    wrong = [row for row, (found, wanted) in enumerate(zip(got, expected, strict=True)) if found != wanted]
    told = "".join(f"row {row} has {name} {got[row]}, expected {expected[row]}" for row in wrong[:1])
    assert_true(not wrong, told, quantity=name, magnitude=len(wrong) / len(expected), compared=len(expected))


def _padded() -> Iterator[Case]:
    for pad_token_id in (0, 2, 21):
        yield Case(f"padding id {pad_token_id}", groups=GROUPS, pad_token_id=pad_token_id)
    yield Case("70 rows", groups=MANY, pad_token_id=0)


def _drawn_and_padded(rng: Generator, size: int) -> Case:
    return Case(groups=drawn_groups(rng, size, logprobs=True), pad_token_id=one_of(rng, PADDING_IDS))


@check("batch.tokens", needs=("make_batch",), cases=_padded, draws=_drawn_and_padded)
def tokens(adapter: Adapter, groups: list[Group], pad_token_id: int) -> None:
    """Each row holds its own prompt and completion exactly as sampled, for any padding id.

    Silent because a row of other tokens is scored and trained like any other. The padding id may equal an EOS id or an
    ordinary token: masks come from lengths. Look for `ids != pad`, and for trimming at the first padding id.
    """
    batch, rows = adapter.make_batch(groups, pad_token_id), rows_of(groups)
    told = f"with pad id {pad_token_id} the"
    completions = [own(adapter, completion, completion.token_ids) for _, completion, _ in rows]
    assert_rows(f"{told} completion", masked(batch.completion_ids, batch.completion_mask), completions)
    sequences = [[*group.prompt_ids, *completion.token_ids] for group, completion, _ in rows]
    assert_rows(f"{told} sequence", masked(batch.input_ids, batch.attention_mask), sequences)
    at_start = [int(ids[int(start)]) for ids, start in zip(batch.input_ids, batch.completion_starts, strict=True)]
    first = [completion.token_ids[0] for _, completion, _ in rows]
    assert_rows("at completion_starts the token", at_start, first)


def _unpadded() -> Iterator[Case]:
    yield Case(groups=GROUPS)
    yield Case("70 rows", groups=MANY)


def _drawn(rng: Generator, size: int) -> Case:
    return Case(groups=drawn_groups(rng, size, logprobs=True))


@check("batch.positions", needs=("make_batch",), cases=_unpadded, draws=_drawn)
def positions(adapter: Adapter, groups: list[Group]) -> None:
    """Position ids count the tokens of each row from 0, with padding on either side.

    Silent because a model accepts any positions: if padding is counted, the same text has different logprobs in every
    batch and the trainer drifts from the sampler. Look for `arange` over a left-padded row.
    """
    batch = adapter.make_batch(groups, 0)
    wanted = [list(range(len(group.prompt_ids) + len(row.token_ids))) for group, row, _ in rows_of(groups)]
    assert_rows("positions", masked(batch.position_ids, batch.attention_mask), wanted)


@check("batch.rewards_and_identity", needs=("make_batch",), cases=_unpadded, draws=_drawn)
def rewards_and_identity(adapter: Adapter, groups: list[Group]) -> None:
    """Each row carries the reward, the group and the sampler's logprobs of its own completion.

    Silent because a neighbour's reward is a plausible reward. In a group of identical completions, as here, only the
    reward tells rows apart. Look for dictionaries keyed by text, sorting, and lists of different origin zipped
    together.
    """
    batch, rows = adapter.make_batch(groups, 0), rows_of(groups)
    assert_rows("reward", [float(reward) for reward in batch.rewards], [reward for _, _, reward in rows])
    ids = torch.as_tensor(batch.group_ids).tolist()
    got = [[row for row, each in enumerate(ids) if each == own_id] for own_id in ids]
    wanted = [[row for row, (each, _, _) in enumerate(rows) if each is group] for group, _, _ in rows]
    assert_rows("as rows of its group", got, wanted)
    if batch.old_logprobs is None:
        told = (
            "each completion has its sampler's logprobs, the batch has none; if the trainer computes its own, declare "
        )
        is_recomputed = adapter.conventions.old_logprobs != "sampler"
        assert_true(is_recomputed, f"{told}old_logprobs='trainer'", quantity="sampler logprobs", magnitude=1.0)
    else:
        drawn = [own(adapter, completion, completion.logprobs or ()) for _, completion, _ in rows]
        assert_rows("sampler logprobs", masked(batch.old_logprobs, batch.completion_mask), drawn)


@check("batch.nothing_lost", needs=("make_batch",), cases=_unpadded, draws=_drawn)
def nothing_lost(adapter: Adapter, groups: list[Group]) -> None:
    """The number of trained completion tokens is the number sampled.

    Silent because no logged number shows a dropped row or an extra token. Look for `zip` over lists of unequal
    length, and for masks that were built before truncation.
    """
    drawn = sum(len(own(adapter, completion, completion.token_ids)) for _, completion, _ in rows_of(groups))
    trained = int(torch.as_tensor(adapter.make_batch(groups, 2).completion_mask).sum())
    told = f"{drawn} completion tokens were sampled, {trained} are trained"
    assert_true(trained == drawn, told, quantity="number of tokens", magnitude=abs(trained - drawn) / max(drawn, 1))


def _mixed_options() -> Iterator[Case]:
    lacking = Completion([24, 2])
    scored = Completion([21, 22], logprobs=[-0.1, -0.2], token_versions=[3, 3], sampled=[True, True], text="x")
    for told, pair in {
        "all have them": [scored, replace(scored, logprobs=[-0.3, -0.4])],
        "the second lacks them": [scored, lacking],
        "the first lacks them": [lacking, scored],
    }.items():
        yield Case(told, groups=[Group([11, 12], pair, [1.0, 0.0], item_id="a", policy_version=3)])
    across = [replace(scored, token_versions=versions) for versions in ([3, 4], [3, 3])]
    groups = [Group([11, 12], across, [1.0, 0.0], item_id="a", policy_version=3)]
    yield Case("sampled across a weight sync", groups=groups)
    ref_logprobs = [[[-1.0, -1.1, -1.2], [-1.3]], [[-1.4, -1.5], [-1.6, -1.7]], [[-1.8, -1.9]], [[-2.0], [-2.1, -2.2]]]
    groups = [replace(group, ref_logprobs=rows) for group, rows in zip(GROUPS, ref_logprobs, strict=True)]
    yield Case("reference logprobs", groups=groups)


@check("batch.optional_fields", needs=("make_batch",), cases=_mixed_options)
def optional_fields(adapter: Adapter, groups: list[Group]) -> None:
    """Logprobs, versions and item ids, where a batch has them, are those of each row's own completion.

    Silent because they are read rarely: a stale row counts as fresh, a reference logprob of the neighbour is a KL, and one
    that was made up for a completion without any is a ratio. Look for rows that are filtered while these lists are not, and
    for fallback values. A batch may lack any of them.
    """
    batch, rows = adapter.make_batch(groups, 0), rows_of(groups)
    if batch.old_logprobs is not None:
        sampled = [_written(own(adapter, row, row.logprobs or [math.nan] * len(row.token_ids))) for _, row, _ in rows]
        got = [_written(row) for row in masked(batch.old_logprobs, batch.completion_mask)]
        assert_rows("sampler logprobs", got, sampled)
    if batch.ref_logprobs is not None:
        scores = [
            _written(own(adapter, row, row_scores))
            for group in groups
            for row, row_scores in zip(group.completions, group.ref_logprobs or unscored(group), strict=True)
        ]
        got = [_written(row) for row in masked(batch.ref_logprobs, batch.completion_mask)]
        assert_rows("reference logprobs", got, scores)
    if batch.policy_versions is not None:
        versions = [group.policy_version for group, _, _ in rows]
        assert_rows("policy version", [int(version) for version in batch.policy_versions], versions)
    if batch.item_ids:
        assert_rows("item", batch.item_ids, [group.item_id for group, _, _ in rows])


def unscored(group: Group) -> list[list[float]]:
    """Return NaN for each token of a group that nobody has scored."""
    return [[math.nan] * len(completion.token_ids) for completion in group.completions]


def _written(numbers: Sequence[float]) -> list[str]:
    """Write numbers so that NaN equals NaN."""
    return [f"{number:.4f}" for number in numbers]


def _marked() -> Iterator[Case]:
    for sampled in ([True, False, True], [False, True, True], [True, True, False]):
        marked = Completion([21, 22, 23], logprobs=[-0.1, -0.2, -0.3], sampled=sampled)
        for other in ([24, 2], [24, 25, 26, 2]):
            completions = [marked, Completion(other, [-0.4] * len(other))]
            yield Case(sampled, other, group=Group(prompt_ids=[11, 12], completions=completions, rewards=[1.0, 0.0]))


@check("batch.only_sampled_tokens_are_trained", needs=("make_batch",), cases=_marked)
def only_sampled_tokens_are_trained(adapter: Adapter, group: Group) -> None:
    """Tokens of a completion that the policy did not sample stay in the sequence but are not trained.

    Silent because a tool's reply in the middle of a completion is good text: trained, it teaches the policy to write the
    replies itself. Look for masks that are made from the lengths alone, where `Completion.sampled` says more.
    """
    batch = adapter.make_batch([group], 0)
    kept = [own(adapter, completion, completion.token_ids) for completion in group.completions]
    told = f"the policy sampled {group.completions[0].sampled} of the first completion, other tokens are trained"
    assert_equal(masked(batch.completion_ids, batch.completion_mask), kept, told)
    whole = [[*group.prompt_ids, *completion.token_ids] for completion in group.completions]
    assert_equal(
        masked(batch.input_ids, batch.attention_mask), whole, "tokens that others wrote are not in the sequence"
    )
