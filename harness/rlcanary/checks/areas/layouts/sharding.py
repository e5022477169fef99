"""Rows whose positions lie on the ranks of a context-parallel group: every split is right that loses and moves nothing."""

from rlcanary.checks.asserts import assert_close, assert_equal, gradient, leave_out, soft
from rlcanary.checks.case import Case
from rlcanary.checks.check import check
from rlcanary.checks.worlds.layouts import (
    drawn_rows,
    entries,
    row_batches,
    row_scores,
    shards_by_rank,
    whole_entries,
)
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.batch import CollatedBatch
from rlcanary.contract.records.layouts import Layout
from rlcanary.reference.layouts import whole_row

NEEDS = ("shard_rows",)


def _all_sizes() -> list[Case]:
    return list(row_batches(1, 2, 4, 3))


@check("sharding.each_token_once", needs=NEEDS, cases=_all_sizes, draws=drawn_rows)
def each_token_once(adapter: Adapter, batch: CollatedBatch, layout: Layout) -> None:
    """Each token of a row is in the shard of exactly one rank, whatever the row's length; padding is marked as such.

    Silent because attention goes on without the tokens that are missing, or twice to those that two ranks have. Look at rows
    whose length is no multiple of the chunks, at a floor division, and at padding that is told by its id.
    """
    shards = shards_by_rank(adapter, batch, layout)
    for row, of_row in enumerate(zip(*shards, strict=True)):
        got = entries(of_row, "attention_mask", "input_ids")
        # The last token predicts nothing and may be left out.
        expected = whole_entries(batch, row, "attention_mask", "input_ids")
        last = (batch.input_ids[row][batch.attention_mask[row]][-1].item(),)
        expected = [each for each in expected if each != last or last in got]
        with soft():
            assert_equal(got, expected, f"tokens of row {row} on {layout.context_parallel} ranks, sorted")


@check("sharding.positions", needs=NEEDS, cases=_all_sizes, draws=drawn_rows)
def positions(adapter: Adapter, batch: CollatedBatch, layout: Layout) -> None:
    """On every rank a token has its position in the whole row.

    Silent because rotary embeddings see differences: within a shard that starts at 0 again all of them are right, and only
    attention across the seams is to the wrong distance. Look for an `arange` over the shard, for a zigzag whose second chunk
    continues the first, and for padding in front that is counted.
    """
    shards = shards_by_rank(adapter, batch, layout)
    for row, of_row in enumerate(zip(*shards, strict=True)):
        got = entries(of_row, "attention_mask", "input_ids", "position_ids")
        tokens = {token for token, _ in got}
        expected = whole_entries(batch, row, "attention_mask", "input_ids", "position_ids")
        # The last token may be left out; whether another one is missing is judged elsewhere.
        expected = [each for each in expected if each[0] in tokens]
        with soft():
            assert_equal(got, expected, f"(token, position) of row {row} on {layout.context_parallel} ranks, sorted")


@check("sharding.labels", needs=NEEDS, cases=_all_sizes, draws=drawn_rows)
def labels(adapter: Adapter, batch: CollatedBatch, layout: Layout) -> None:
    """Each trained token is the label of the token before it, also across the seam of two shards, on one rank and once.

    Silent because all but one or two labels of a shard are right, and a wrong one has a logprob too. Look for labels that
    are shifted within a shard, for those that are shifted again after the split, and for a mask that is cut or shifted
    otherwise than its labels.
    """
    shards = shards_by_rank(adapter, batch, layout)
    for row, of_row in enumerate(zip(*shards, strict=True)):
        got = entries(of_row, "loss_mask", "input_ids", "labels")
        expected = whole_entries(batch, row, "loss_mask", "input_ids", "labels")
        with soft():
            message = (
                f"(token, label) of row {row} on {layout.context_parallel} ranks where something is trained, sorted"
            )
            assert_equal(got, expected, message)


@check("sharding.scores_follow", needs=NEEDS, cases=_all_sizes, draws=drawn_rows)
def scores_follow(adapter: Adapter, batch: CollatedBatch, layout: Layout) -> None:
    """Old and reference logprobs lie beside the labels that they are of.

    Silent because ratios of another token's logprob are ratios: they scatter, and are clipped. Look for one field of many
    that is cut in another way, or that belongs to the token itself while the labels belong to the next one.
    """
    shards = shards_by_rank(adapter, batch, layout)
    for name in ("old_logprobs", "ref_logprobs"):
        if any(getattr(shard, name) is None for of_rank in shards for shard in of_rank):
            leave_out(f"shards come without {name}")
            continue
        for row, of_row in enumerate(zip(*shards, strict=True)):
            got = entries(of_row, "loss_mask", "labels", name)
            expected = whole_entries(batch, row, "loss_mask", "labels", name)
            with soft():
                message = f"(label, {name}) of row {row} on {layout.context_parallel} ranks, sorted"
                assert_equal(got, expected, message, quantity=name)


@check("sharding.gathered_logprobs", needs=("shard_rows", "gathered_logprobs"), cases=_all_sizes, draws=drawn_rows)
def gathered_logprobs(adapter: Adapter, batch: CollatedBatch, layout: Layout) -> None:
    """Logprobs of shards, put together again, are in the order of the tokens, and so is their gradient.

    Silent because they are logprobs of the same row, only in another order, or with padding between them. Where each rank
    then computes the same loss, a backward pass that sums over the ranks multiplies the gradient by their number. Look at
    how the two chunks of a zigzag are told apart, at where padding is removed, and at the gather's backward pass.
    """
    shards = shards_by_rank(adapter, batch, layout)
    rows = [whole_row(batch, row) for row in range(len(batch.rewards))]
    scores = [
        [row_scores(shard, row).requires_grad_() for shard, row in zip(of_rank, rows, strict=True)]
        for of_rank in shards
    ]
    got_BT = adapter.gathered_logprobs(scores, batch, layout)
    mask_BT = batch.completion_mask
    assert batch.old_logprobs is not None
    with soft():
        message = f"logprobs of {layout.context_parallel} ranks are not put together in the order of the tokens"
        assert_close(got_BT, batch.old_logprobs, message, where=mask_BT)
    if not got_BT.requires_grad:
        leave_out("logprobs are gathered without gradient")
        return
    # The weight of each token is its own logprob.
    weights_BT = batch.old_logprobs.masked_fill(~mask_BT, 0)
    for of_rank, leaves in zip(shards, scores, strict=True):
        for shard, leaf_N in zip(of_rank, leaves, strict=True):
            wanted_N = leaf_N.masked_fill(~shard.loss_mask.bool(), 0)
            with soft():
                message = (
                    f"the gradient of logprobs gathered from {layout.context_parallel} ranks is not that of their sum"
                )
                assert_close(gradient(got_BT, leaf_N, weights_BT), wanted_N, message, quantity="gradient")
