"""Collating: every token, reward and logprob arrives in the row it belongs to."""

from collections.abc import Sequence

import torch
from torch import Generator, Tensor

from rlcanary.checks.check import check
from rlcanary.checks.subject import Call, Finding, Subject
from rlcanary.contract.batch import CollatedBatch, Completion, Group

GROUPS = [
    Group(
        prompt_ids=[11, 12],
        completions=[
            Completion([21, 22, 2], logprobs=[-0.1, -0.2, -0.3]),
            Completion([23], logprobs=[-0.4], finish_reason="length"),
        ],
        rewards=[1.0, 0.25],
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
]


def _rows() -> list[tuple[Group, Completion, float]]:
    return [
        (group, completion, reward)
        for group in GROUPS
        for completion, reward in zip(group.completions, group.rewards, strict=True)
    ]


def _expect_rows(call: Call, name: str, got: Sequence[object], expected: Sequence[object], expression: str) -> None:
    call.subject.compared(len(expected))
    for row, (found, wanted) in enumerate(zip(got, expected, strict=True)):
        if found != wanted:
            lines = [
                f"batch = adapter.make_batch(*arguments); row = {row}",
                f"got = {expression}",
                f"assert got == {wanted!r}, got",
            ]
            told = f"row {row} has {name} {found}, expected {wanted}"
            share = [one == other for one, other in zip(got, expected, strict=True)].count(False) / len(expected)
            raise Finding(told, call.snippet(lines), name, share)


def _masked(values_BT: Tensor, mask_BT: Tensor) -> list[list[float]]:
    return [
        [round(float(value), 4) for value in row[keep.bool()]] for row, keep in zip(values_BT, mask_BT, strict=True)
    ]


@check("batch.tokens", needs=("make_batch",))
def tokens(subject: Subject, rng: Generator) -> None:
    """Each row holds its own prompt and completion exactly as sampled, for any padding id.

    Silent because a row of other tokens is scored and trained like any other. The padding id may equal an EOS id or an
    ordinary token: masks come from lengths. Look for `ids != pad`, and for trimming at the first padding id.
    """
    for pad_token_id in (0, 2, 21):
        with subject.case(f"padding id {pad_token_id}"):
            call = subject.call("make_batch", GROUPS, pad_token_id)
            batch: CollatedBatch = call.output
            completions = [
                [int(token) for token in row] for row in _masked(batch.completion_ids, batch.completion_mask)
            ]
            _expect_rows(
                call,
                f"with pad id {pad_token_id} the completion",
                completions,
                [list(completion.token_ids) for _, completion, _ in _rows()],
                "batch.completion_ids[row][batch.completion_mask[row].bool()].tolist()",
            )
            sequences = [[int(token) for token in row] for row in _masked(batch.input_ids, batch.attention_mask)]
            _expect_rows(
                call,
                f"with pad id {pad_token_id} the sequence",
                sequences,
                [[*group.prompt_ids, *completion.token_ids] for group, completion, _ in _rows()],
                "batch.input_ids[row][batch.attention_mask[row].bool()].tolist()",
            )
            at_start = [
                int(batch.input_ids[row, int(start)]) for row, start in enumerate(batch.completion_starts.tolist())
            ]
            _expect_rows(
                call,
                "at completion_starts the token",
                at_start,
                [completion.token_ids[0] for _, completion, _ in _rows()],
                "int(batch.input_ids[row, int(batch.completion_starts[row])])",
            )


@check("batch.positions", needs=("make_batch",))
def positions(subject: Subject, rng: Generator) -> None:
    """Position ids count the tokens of each row from 0, with padding on either side.

    Silent because a model accepts any positions: if padding is counted, the same text has different logprobs in every
    batch and the trainer drifts from the sampler. Look for `arange` over a left-padded row.
    """
    call = subject.call("make_batch", GROUPS, 0)
    got = [[int(value) for value in row] for row in _masked(call.output.position_ids, call.output.attention_mask)]
    wanted = [list(range(len(group.prompt_ids) + len(completion.token_ids))) for group, completion, _ in _rows()]
    expression = "batch.position_ids[row][batch.attention_mask[row].bool()].tolist()"
    _expect_rows(call, "positions", got, wanted, expression)


@check("batch.rewards_and_identity", needs=("make_batch",))
def rewards_and_identity(subject: Subject, rng: Generator) -> None:
    """Each row carries the reward, the group and the sampler's logprobs of its own completion.

    Silent because a neighbour's reward is a plausible reward. In a group of identical completions, as here, only the
    reward tells rows apart. Look for dictionaries keyed by text, sorting, and lists of different origin zipped
    together.
    """
    call = subject.call("make_batch", GROUPS, 0)
    batch: CollatedBatch = call.output
    rewards = [float(reward) for reward in batch.rewards]
    _expect_rows(call, "reward", rewards, [reward for _, _, reward in _rows()], "float(batch.rewards[row])")
    same_group = [(batch.group_ids[row] == batch.group_ids[0]).item() for row in range(len(rewards))]
    _expect_rows(
        call,
        "membership in the first group",
        same_group,
        [group is GROUPS[0] for group, _, _ in _rows()],
        "(batch.group_ids[row] == batch.group_ids[0]).item()",
    )
    if batch.old_logprobs is None and subject.conventions.old_logprobs == "sampler":
        subject.compared(len(rewards))
        raise Finding(
            "each completion has its sampler's logprobs, the batch has none; if the trainer computes its own, declare "
            "old_logprobs='trainer'",
            call.snippet(["assert adapter.make_batch(*arguments).old_logprobs is not None"]),
            "sampler logprobs",
            1.0,
        )
    if batch.old_logprobs is not None:
        _expect_rows(
            call,
            "sampler logprobs",
            _masked(batch.old_logprobs, batch.completion_mask),
            [[round(value, 4) for value in completion.logprobs or ()] for _, completion, _ in _rows()],
            "[round(value, 4) for value in batch.old_logprobs[row][batch.completion_mask[row].bool()].tolist()]",
        )


@check("batch.nothing_lost", needs=("make_batch",))
def nothing_lost(subject: Subject, rng: Generator) -> None:
    """The number of trained completion tokens is the number sampled.

    Silent because no logged number shows a dropped row or an extra token. Look for `zip` over lists of unequal
    length, and for masks that were built before truncation.
    """
    call = subject.call("make_batch", GROUPS, 2)
    sampled = sum(len(completion.token_ids) for _, completion, _ in _rows())
    trained = int(torch.as_tensor(call.output.completion_mask).sum())
    subject.compared()
    if trained != sampled:
        lines = [f"assert int(adapter.make_batch(*arguments).completion_mask.sum()) == {sampled}"]
        told = f"{sampled} completion tokens were sampled, {trained} are trained"
        raise Finding(told, call.snippet(lines), "number of tokens", abs(trained - sampled) / sampled)


@check("batch.only_sampled_tokens_are_trained", needs=("make_batch",))
def only_sampled_tokens_are_trained(subject: Subject, rng: Generator) -> None:
    """Tokens of a completion that the policy did not sample stay in the sequence but are not trained.

    Silent because a tool's reply in the middle of a completion is good text: trained, it teaches the policy to write the
    replies itself. Look for masks that are made from the lengths alone, where `Completion.sampled` says more.
    """
    for sampled in ([True, False, True], [False, True, True], [True, True, False]):
        marked = Completion([21, 22, 23], logprobs=[-0.1, -0.2, -0.3], sampled=sampled)
        group = Group(prompt_ids=[11, 12], completions=[marked, Completion([24, 2], [-0.4, -0.5])], rewards=[1.0, 0.0])
        with subject.case(sampled):
            call = subject.call("make_batch", [group], 0)
            call.expect_equal(
                "[row[keep.bool()].tolist() for row, keep in zip(output.completion_ids, output.completion_mask)]",
                [[token for token, kept in zip((21, 22, 23), sampled, strict=True) if kept], [24, 2]],
                f"the policy sampled {sampled} of the first completion, other tokens are trained",
            )
            call.expect_equal(
                "[row[keep.bool()].tolist() for row, keep in zip(output.input_ids, output.attention_mask)]",
                [[11, 12, 21, 22, 23], [11, 12, 24, 2]],
                "tokens that others wrote are not in the sequence",
            )
