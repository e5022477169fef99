"""Ends of completions: a sampled EOS is trained, a truncated completion is kept whole, and padding does not count."""

from collections.abc import Iterator, Sequence
from itertools import compress

from rlcanary.checks.asserts import assert_equal, unless_raised
from rlcanary.checks.case import Case
from rlcanary.checks.check import check
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.batch import CollatedBatch, Completion, Group

EOS_IDS = (2, 5)


def _group(*completions: Sequence[int], sampled: Sequence[list[bool]] | None = None) -> Group:
    """Make a group of these completions, with rewards 1, 2, … so that rows can be told apart."""
    rows = [
        Completion(
            list(ids),
            [-0.5] * len(ids),
            "stop" if ids and ids[-1] in EOS_IDS else "length",
            sampled=None if sampled is None else sampled[row],
        )
        for row, ids in enumerate(completions)
    ]
    return Group([11, 12], rows, [float(row) for row in range(1, len(rows) + 1)])


def _trained(batch: CollatedBatch) -> list[list[int]]:
    """Return the ids that each row trains."""
    return [row[keep.bool()].tolist() for row, keep in zip(batch.completion_ids, batch.completion_mask, strict=False)]


def _expected(adapter: Adapter, completions: list[list[int]]) -> list[list[int]]:
    """Return the ids that each row has to train."""
    is_masked = adapter.conventions.mask_truncated
    return [[] if is_masked and ids and ids[-1] not in EOS_IDS else ids for ids in completions]


def _truncated() -> Iterator[Case]:
    for completions in ([[21, 22, 23]], [[21, 22], [23]], [[21, 22, 23, 24], [25], [26, 27]]):
        for pad in (0, 2, completions[-1][-1]):
            yield Case(completions, f"padding id {pad}", completions=completions, pad_token_id=pad)
    for is_masked in (True, False):
        changes, completions = {"mask_truncated": is_masked}, [[21, 22, 23, 24], [25, 2], [26]]
        yield Case(changes, changes=changes, completions=completions, pad_token_id=0)
        sampled = [[True, False, False, True], [True, True], [True]]
        yield Case(changes, "tool tokens", changes=changes, completions=completions, pad_token_id=0, sampled=sampled)


@check("eos.truncated_completion_is_whole", needs=("make_batch",), cases=_truncated)
def truncated_completion_is_whole(
    adapter: Adapter, completions: list[list[int]], pad_token_id: int, sampled: list[list[bool]] | None = None
) -> None:
    """A completion cut off by the token limit is trained on all of its tokens and on no EOS; on none if so declared.

    Silent because dropping or shortening a truncated completion, or adding an EOS, changes only its length: the policy
    learns to stop where it was cut. Look for an EOS that is appended, for masks that search for one, for a last token
    that happens to be the padding id, and for `mask_truncated`, to be declared where such completions are masked.
    """
    batch = adapter.make_batch([_group(*completions, sampled=sampled)], pad_token_id)
    told = f"with padding id {pad_token_id}, other tokens of the truncated completions are trained"
    expected = _expected(adapter, completions)
    if sampled is not None:
        expected = [
            [token for token, is_own in zip(ids, marks, strict=False) if is_own]
            for ids, marks in zip(expected, sampled, strict=True)
        ]
    assert_equal(_trained(batch), expected, told)


def _ended() -> Iterator[Case]:
    for completions in ([[21, 2]], [[21, 2], [22, 23, 5]], [[2], [21, 22, 5], [21, 22, 23, 24]]):
        for pad in (0, 2, 5):
            yield Case(completions, f"padding id {pad}", completions=completions, pad_token_id=pad)


@check("eos.end_is_trained", needs=("make_batch",), cases=_ended)
def end_is_trained(adapter: Adapter, completions: list[list[int]], pad_token_id: int) -> None:
    """The EOS that ended a completion is trained, for each of the EOS ids and any padding id.

    Silent because a policy that gets no gradient for stopping writes longer and longer. Look for `ids != pad` where the
    padding is the EOS, and for one EOS id where the sampler stops at several.
    """
    batch = adapter.make_batch([_group(*completions)], pad_token_id)
    told = f"with padding id {pad_token_id}, the completions do not end in training as they ended in sampling"
    assert_equal(_trained(batch), _expected(adapter, completions), told)


def _paddings(*ids: int) -> Iterator[Case]:
    for pad in ids:
        yield Case(f"padding id {pad}", pad_token_id=pad)


@check("eos.end_within_a_completion", needs=("make_batch",), cases=lambda: _paddings(0, 2))
def end_within_a_completion(adapter: Adapter, pad_token_id: int) -> None:
    """Tokens sampled after an EOS id are trained too: the completion is as long as the sampler says.

    Silent because an EOS in the middle is rare: it takes an `ignore_eos` option, a minimum length, or several turns in
    one completion. Look for a mask derived from ids although the lengths are known.
    """
    completions = [[21, 2, 22, 2], [21, 5, 23]]
    batch = adapter.make_batch([_group(*completions)], pad_token_id)
    assert_equal(
        _trained(batch), _expected(adapter, completions), "tokens that were sampled behind an EOS id are missing"
    )


@check("eos.masks_agree", needs=("make_batch", "completion_mask"), cases=lambda: _paddings(0, 2, 21))
def masks_agree(adapter: Adapter, pad_token_id: int) -> None:
    """The mask derived from the ids equals the batch's mask derived from the lengths.

    Silent because each looks right alone: the loss uses one, and the metrics, the KL or the reward model the other.
    Only rows that end with an EOS or fill the batch are compared, because ids cannot tell a shorter truncated row from
    its padding. Look for two definitions of the same mask.
    """
    completions = [[21, 22, 23, 2], [24, 5], [25, 26, 27, 28], [2]]
    batch = adapter.make_batch([_group(*completions)], pad_token_id)
    width = batch.completion_mask.shape[1]
    trained, expected = (
        [[position < len(ids) for position in range(width)] for ids in rows]
        for rows in (_expected(adapter, completions), completions)
    )
    assert_equal(batch.completion_mask.bool().tolist(), trained, "the batch's mask is not that of the lengths")
    found = adapter.completion_mask(batch.completion_ids, list(EOS_IDS), pad_token_id).bool().tolist()
    is_told = [ids[-1] in EOS_IDS or len(ids) == width for ids in completions]
    told = "the mask that is searched in the batch's ids is not that of the lengths"
    assert_equal(list(compress(found, is_told)), list(compress(expected, is_told)), told)


def _with_empty_ones() -> Iterator[Case]:
    given: tuple[list[list[int]], ...] = ([[21, 2], [], [22, 23, 2]], [[]], [[], []])
    for completions in given:
        yield Case(completions, completions=completions)


@check("eos.empty_completion", needs=("make_batch",), cases=_with_empty_ones)
def empty_completion(adapter: Adapter, completions: list[list[int]]) -> None:
    """A completion without tokens is rejected, or keeps its row and reward with no trained token.

    Silent because a row that disappears shifts every later reward to another completion, and a row with a made-up token
    is trained. Look at aborted requests, at `if ids`, and at guards that test the whole batch for trained tokens
    instead of each row.
    """
    batch = unless_raised(adapter.make_batch, [_group(*completions)], 0)
    if batch is not None:
        assert_equal(
            _trained(batch), _expected(adapter, completions), "with an empty completion, the rows are other ones"
        )
        rewards = [float(reward) for reward in batch.rewards]
        expected = [float(row) for row in range(1, len(completions) + 1)]
        assert_equal(rewards, expected, "with an empty completion, the rewards moved")
