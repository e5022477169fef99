"""Supervised fine-tuning: the cross entropy of labels."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Generator

from rlcanary import reference
from rlcanary.checks.asserts import assert_close, assert_metrics, gradient, soft
from rlcanary.checks.case import Case
from rlcanary.checks.check import check
from rlcanary.checks.worlds import inputs, rows
from rlcanary.checks.worlds.loss_batches import LARGE, MASKS, double, mask, supervised_batch, surrounded, widened
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.conventions import Conventions, TokenAggregation
from rlcanary.contract.records.other_losses import SupervisedBatch
from rlcanary.reference.objective.aggregation import counted_sequences

_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    *({"supervised_aggregation": name} for name in get_args(TokenAggregation)),
    {"supervised_label_smoothing": 0.0},
    *({"supervised_label_smoothing": 0.1, "supervised_aggregation": name} for name in ("token_mean", "sequence_mean")),
)


def _under_options(rng: Generator) -> Iterator[Case]:
    for choice in _OPTIONS:
        for name, each in MASKS.items():
            batch = supervised_batch(rng, mask(each))
            yield Case(name, within=choice, changes=choice, batch=batch)
        yield Case("a part of an update", within=choice, changes=choice, batch=_part_of_more(batch))
        batch = supervised_batch(rng, mask(["xxx.", "x.x.", "x..."]))
        yield Case("a trained first token", within=choice, changes=choice, batch=batch)
    for name, each in LARGE.items():
        yield Case(name, batch=supervised_batch(rng, mask(each)))


def _part_of_more(batch: SupervisedBatch) -> SupervisedBatch:
    return replace(batch, global_tokens=11.0, global_sequences=7.0)


def _drawn(rng: Generator, size: int) -> Case:
    trained_BS = rows.mask(rng, rows.whole(rng, 1, size), rows.whole(rng, 2, 2 * size))
    # No tokens at all have a mean of their own in every codebase.
    trained_BS[0, 1] = True
    return Case(changes=rows.one_of(rng, _OPTIONS), batch=supervised_batch(rng, trained_BS))


@check("supervised.declared_loss", needs=("supervised_loss",), cases=_under_options, draws=_drawn)
def declared_loss(adapter: Adapter, batch: SupervisedBatch) -> None:
    """The loss is the cross entropy of each trained token under the logits before it, reduced as declared.

    Silent because a loss with labels that are shifted twice or not at all, or over the prompt, falls too, and a divisor
    that is too large is a smaller learning rate. Look at who shifts the labels, the data or the model; at the tokens that
    the divisor counts, among them a first one that nothing predicts and those of -100; and at rows that are joined
    before the shift.
    """
    exact = double(batch)
    expected = reference.supervised_loss(exact, adapter.conventions).loss
    loss = adapter.supervised_loss(inputs.fresh(batch)).loss
    with soft():
        assert_close(loss, expected, "the loss is not the declared cross entropy of the trained tokens")
    told = "the gradient is not that of the declared cross entropy"
    assert_close(gradient(loss, batch.logits), gradient(expected, exact.logits), told, quantity="gradient")


def _surroundings(rng: Generator) -> Iterator[Case]:
    for name, each in MASKS.items():
        for left, right in ((0, 0), (0, 2), (2, 0)):
            batch = supervised_batch(rng, mask(each))
            yield Case(name, f"{left} columns before, {right} behind", batch=batch, left=left, right=right)


@check("supervised.untrained_tokens", needs=("supervised_loss",), cases=_surroundings)
def untrained_tokens(adapter: Adapter, batch: SupervisedBatch, left: int, right: int) -> None:
    """Prompt and padding are nothing: their ids, their logits and their number change neither loss nor gradient.

    Silent because a model that also learns its prompts, or to write padding, has a lower loss, not a higher one. Look at
    the mask of the labels behind the shift, at a padding id that is also a real one, and at divisors that count columns.
    """
    other = surrounded(batch, left, right)
    loss, other_loss = (adapter.supervised_loss(inputs.fresh(each)).loss for each in (batch, other))
    with soft():
        assert_close(other_loss, loss.detach(), "other prompts and other padding changed the loss")
    expected_BSV = widened(gradient(loss, batch.logits), left, right)
    told = "other prompts and other padding changed the gradient, or received one"
    assert_close(gradient(other_loss, other.logits), expected_BSV, told, quantity="gradient")


_PROFILES: dict[str, list[str]] = {
    "uneven rows": ["..xxxx", ".x....", "....xx", "...x.."],
    "a part of nothing": [".xxx", "..x.", "....", "...."],
}


def _parts(conventions: Conventions, rng: Generator) -> Iterator[Case]:
    for name in dict.fromkeys((conventions.supervised_aggregation, "token_mean", "sequence_mean")):
        for profile, each in _PROFILES.items():
            for size in (1, 2):
                batch, changes = supervised_batch(rng, mask(each)), {"supervised_aggregation": name}
                yield Case(profile, name, f"{size} rows each", changes=changes, batch=batch, size=size)


@check("supervised.parts_add_up", needs=("supervised_loss",), cases=_parts)
def parts_add_up(adapter: Adapter, batch: SupervisedBatch, size: int) -> None:
    """Micro-batches that are told the counts of the whole update add up to its loss and to its gradient.

    Silent because a mean of micro-batch means is a mean too: tokens of short answers weigh more, by as much as the
    micro-batches differ in length. Look at a loss function that divides by the labels that it sees itself, at counts that
    include the tokens which the shift drops, and at a part without labels whose 0 / 0 is NaN.
    """
    aggregation = adapter.conventions.supervised_aggregation
    trained_BT = batch.mask[:, 1:]
    counts = float(trained_BT.sum()), counted_sequences(trained_BT, aggregation)
    told = replace(batch, global_tokens=counts[0], global_sequences=counts[1])
    parts = [adapter.supervised_loss(told.rows(part)).loss for part in torch.arange(len(batch.mask)).split(size)]
    whole, total = adapter.supervised_loss(inputs.fresh(batch)).loss, torch.stack(parts).sum()
    with soft():
        assert_close(total, whole.detach(), f"micro-batches of {size} rows do not add up to the loss of the whole")
    expected_BSV = gradient(whole, batch.logits)
    message = f"micro-batches of {size} rows do not add up to the gradient of the whole"
    assert_close(gradient(total, batch.logits), expected_BSV, message, quantity="gradient")


def _logged(rng: Generator) -> Iterator[Case]:
    for name, each in MASKS.items():
        batch = supervised_batch(rng, mask(each))
        yield Case(name, batch=batch)
        yield Case(name, "smoothed", changes={"supervised_label_smoothing": 0.1}, batch=batch)
        yield Case(name, "a part of an update", batch=_part_of_more(batch))


@check("supervised.metrics", needs=("supervised_loss",), cases=_logged, severity="dashboard")
def metrics(adapter: Adapter, batch: SupervisedBatch) -> None:
    """The logged loss is the returned one; likelihood, perplexity, accuracy and count are those of the trained tokens.

    Silent because curves are compared with themselves: one that averages micro-batches without their tokens, or counts
    prompts among the hits, has the shape of a right one. Look at the scale of what is logged and of what is optimised, at
    labels of -100 that never match, and at rows without labels.
    """
    output = adapter.supervised_loss(inputs.fresh(batch))
    expected = reference.supervised_loss(double(batch), adapter.conventions).metrics
    assert_metrics(output, {**expected, "loss": float(output.loss.detach())}, "of the trained tokens")
