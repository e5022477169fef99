"""Splitting an update of a loss beside the policy's over micro-batches or ranks changes nothing.

Shapes: B rows (pairs in a preference), S sequence positions, T completion positions.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Generator, Tensor

from rlcanary import reference
from rlcanary.checks.areas.objective.split import PROFILES, Pieces, in_pieces
from rlcanary.checks.areas.other_losses import preference
from rlcanary.checks.asserts import assert_close, assert_metrics, soft
from rlcanary.checks.case import Case
from rlcanary.checks.check import check
from rlcanary.checks.worlds import rows
from rlcanary.checks.worlds.credit import value_batch
from rlcanary.checks.worlds.loss_batches import (
    distillation_batch,
    double,
    gradients,
    preference_batch,
    supervised_batch,
)
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.records.other_losses import OtherBatch, PreferenceBatch

KINDS: dict[str, tuple[dict[str, Any], ...]] = {
    "supervised": (
        *({"supervised_aggregation": name} for name in ("token_mean", "sequence_mean")),
        {"supervised_label_smoothing": 0.1},
    ),
    "distillation": (
        *({"distillation_aggregation": name} for name in ("token_mean", "sequence_mean")),
        {"distillation_label_weight": 0.3},
    ),
    "preference": (
        {"preference_supervised_coef": 0.0},
        {"preference_supervised_coef": 0.5},
        {"preference_supervised_coef": 0.5, "supervised_aggregation": "sequence_mean"},
    ),
    "critic": (
        *({"value_aggregation": name} for name in ("token_mean", "sequence_mean", "group_token_mean")),
        {"value_clip": 0.2},
    ),
}
"""The kinds of losses, each with changes of its divisors and its terms, where they can be set."""


def _batch(rng: Generator, kind: str, lengths: tuple[int, ...]) -> OtherBatch:
    """Make a batch of the kind whose rows have so many trained tokens."""
    if kind == "critic":
        return value_batch(rng, len(lengths), max(lengths), lengths)
    if kind == "supervised":
        # A prompt of one token stands in front: nothing predicts it.
        return supervised_batch(rng, torch.nn.functional.pad(_filled(lengths), (1, 0)))
    if kind == "distillation":
        return distillation_batch(rng, _filled(lengths))
    # No completion of a pair is empty; the longest rejected one stands beside the shortest chosen one.
    at_least_one = tuple(max(1, length) for length in lengths)
    return preference_batch(rng, _filled(at_least_one), _filled(at_least_one[::-1]))


def _filled(lengths: tuple[int, ...]) -> Tensor:
    """[B, T] bool, true on as many first positions of each row."""
    return torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)


def _numbers(conventions: Conventions, changes: dict[str, Any]) -> tuple[int, ...]:
    """Numbers of pieces, the last but one of unequal ones; groups of two rows stay whole where they are aggregated."""
    by_groups = conventions.replace(**changes).value_aggregation == "group_token_mean"
    return (1, 2, 4, 3) if by_groups else (1, 2, 4, 3, 8)


def _pieces(conventions: Conventions, rng: Generator) -> Iterator[Case]:
    for kind in KINDS:
        for changes in ({}, *KINDS[kind]):
            for profile, lengths in PROFILES.items():
                batch = _batch(rng, kind, lengths)
                for n in _numbers(conventions, changes):
                    told = f"{kind}, {profile}"
                    yield Case(
                        changes, f"{n} pieces", profile, within=kind, changes=changes, batch=batch, n=n, told=told
                    )


def _drawn(rng: Generator, size: int) -> Case:
    kind = rows.one_of(rng, list(KINDS))
    changes = rows.one_of(rng, KINDS[kind])
    # Two rows a group, and something to train.
    lengths = (1, *(rows.whole(rng, 0, 2 * size) for _ in range(2 * rows.whole(rng, 1, size) - 1)))
    n = rows.whole(rng, 1, len(lengths) // 2)
    return Case(kind, changes=changes, batch=_batch(rng, kind, lengths), n=n, told=f"{kind}, {len(lengths)} rows")


@check("split.other_micro_batches", needs=("accumulated_other_loss",), cases=_pieces, draws=_drawn)
def other_micro_batches(adapter: Adapter, batch: OtherBatch, n: int, told: str) -> None:
    """Micro-batches of uneven token counts give a supervised, distillation, preference or value loss of the whole batch.

    Silent because a mean of micro-batch means is also a mean: the tokens of short answers weigh more, by as much as the
    micro-batches differ, and a sum of means multiplies the learning rate by their number. Look at what each piece is
    divided by, at a loss that divides by the labels that it sees itself, at counts that include the tokens which the
    shift drops, and at a supervised term beside pairs.
    """
    _assert_whole(adapter, adapter.accumulated_other_loss, batch, n, f"in {n} micro-batches ({told})")


@check("split.other_ranks", needs=("sharded_other_loss",), cases=_pieces, draws=_drawn)
def other_ranks(adapter: Adapter, batch: OtherBatch, n: int, told: str) -> None:
    """The gradient of such a loss over ranks with uneven token counts equals that of the whole batch on one rank.

    Silent because data parallelism averages: a rank that divides by its own tokens trains on another mean, and one that
    divides by those of all ranks is divided by their number once more. Look at the count that is gathered, and at the
    factor that undoes the average.
    """
    _assert_whole(adapter, adapter.sharded_other_loss, batch, n, f"over {n} ranks ({told})")


def _assert_whole(adapter: Adapter, split: Pieces, batch: OtherBatch, n: int, place: str) -> None:
    output = in_pieces(split, batch, n, _count(batch))
    if output is None:
        return
    exact = double(batch)
    expected = reference.other_loss(exact, adapter.conventions).loss
    with soft():
        assert_close(output.loss, expected, f"the loss {place} is not that of the whole batch")
    wanted = dict(gradients(expected, exact))
    for name, found in gradients(output.loss, batch):
        told = f"the gradient of {name} {place} is not that of the whole batch"
        with soft():
            assert_close(found, wanted[name], told, quantity="gradient")


def _count(batch: OtherBatch) -> int:
    return len(batch.chosen_mask if isinstance(batch, PreferenceBatch) else batch.mask)


def _several_pieces(rng: Generator) -> Iterator[Case]:
    for kind in KINDS:
        # Without a clip, a critic's metrics are none.
        changes = {"value_clip": 0.2} if kind == "critic" else {}
        for profile, lengths in PROFILES.items():
            batch = _batch(rng, kind, lengths)
            for n in (2, 4):
                told = f"{kind}, {profile}"
                yield Case(f"{n} pieces", profile, within=kind, changes=changes, batch=batch, n=n, told=told)


@check(
    "split.other_metrics",
    severity="dashboard",
    needs=("accumulated_other_loss",),
    cases=_several_pieces,
    draws=_drawn,
)
def other_metrics(adapter: Adapter, batch: OtherBatch, n: int, told: str) -> None:
    """Metrics logged for such an update in micro-batches equal those for the whole batch.

    Silent because curves are compared with themselves: a mean of micro-batch means favours short answers, a micro-batch
    without a label counts as one of accuracy 0, and a perplexity of means is not the mean of perplexities. Look at how
    the numbers of the micro-batches are put together.
    """
    _assert_metrics(adapter, adapter.accumulated_other_loss, batch, n, f"in {n} micro-batches ({told})")


@check(
    "split.other_metrics_over_ranks",
    severity="dashboard",
    needs=("sharded_other_loss",),
    cases=_several_pieces,
    draws=_drawn,
)
def other_metrics_over_ranks(adapter: Adapter, batch: OtherBatch, n: int, told: str) -> None:
    """Metrics of such an update logged over several ranks equal those of one rank with all the data.

    Silent because curves are compared with themselves: a mean of the ranks' means favours short answers, and the numbers
    of the first rank alone look plausible. Look at what is gathered, and with which weight.
    """
    _assert_metrics(adapter, adapter.sharded_other_loss, batch, n, f"over {n} ranks ({told})")


def _assert_metrics(adapter: Adapter, split: Pieces, batch: OtherBatch, n: int, place: str) -> None:
    output = in_pieces(split, batch, n, _count(batch))
    if output is None:
        return
    if isinstance(batch, PreferenceBatch):
        expected = preference.exact_metrics(batch, adapter.conventions)
    else:
        expected = reference.other_loss(double(batch), adapter.conventions).metrics
    assert_metrics(output, expected, f"{place}; of all the data")
