"""Splitting an update over micro-batches or ranks changes nothing."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Generator

from rlcanary.checks.asserts import assert_close, assert_metrics, assert_true, gradient, soft, unless_raised
from rlcanary.checks.case import Case
from rlcanary.checks.check import check
from rlcanary.checks.worlds import inputs, rows
from rlcanary.checks.worlds.oracle import exact_loss, exact_output
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.batch import LossOutput, PolicyBatch
from rlcanary.contract.conventions import Conventions

# Metrics whose meaning the contract fixes; others, such as a number of pieces, may depend on the pieces.
NAMES = (
    *("kl", "entropy", "ratio_mean", "ratio_min", "ratio_max", "mult_prob_error", "policy_loss", "approx_kl"),
    *("clip_fraction", "clip_fraction_low", "clip_fraction_high", "dual_clip_fraction"),
    *("logprob", "old_logprob", "ref_logprob", "sampler_logprob"),
)

Split = Callable[[PolicyBatch, int], LossOutput]
Pieces = Callable[[Any, int], LossOutput]

# Trained tokens of each row. Pieces of as many rows differ in tokens, and pieces of as many tokens differ in rows, so that
# a mean of the pieces' means is not the mean, by whichever of the two an implementation cuts.
PROFILES: dict[str, tuple[int, ...]] = {
    "short rows last": (5, 5, 4, 1, 3, 1, 1, 1),
    "one long row": (1, 1, 12, 1, 2, 1, 1, 3),
    "rows of no token": (6, 0, 1, 2, 0, 0, 3, 0),
    "a last piece of no token": (4, 1, 2, 3, 0, 0, 0, 0),
}


def _terms(conventions: Conventions) -> Iterator[dict[str, Any]]:
    """Yield parts of the loss, each with inputs of its own."""
    yield {"aggregation": "group_token_mean"}
    yield {"kl_coef": 0.5}
    # A sequence's ratio is defined with one weight for the sequence: with one per token, codebases differ.
    yield {"importance_level": conventions.ratio_level, "importance_high": 1.1}
    yield {"entropy_coef": 0.1}


def _batches(rng: Generator) -> Iterator[tuple[str, PolicyBatch]]:
    for profile, lengths in PROFILES.items():
        yield profile, inputs.policy_batch(rng, len(lengths), max(lengths), lengths)


def _pieces(conventions: Conventions, rng: Generator) -> Iterator[Case]:
    """Split each batch under the declared aggregation and, if settable, the two common ones."""
    for profile, batch in _batches(rng):
        for name in dict.fromkeys((conventions.aggregation, "token_mean", "sequence_mean")):
            # There are 8 rows in 4 groups, which stay whole where they are aggregated.
            for n in (1, 2, 3, 4, *((8,) if name != "group_token_mean" else ())):
                told, changes = f"{name}, {profile}", {"aggregation": name}
                yield Case(profile, name, f"{n} pieces", changes=changes, batch=batch, n_pieces=n, told=told)
    _, batch = next(_batches(rng))
    uneven = replace(batch, group_ids=torch.tensor([0, 0, 0, 1, 1, 1, 1, 1]))
    for changes in _terms(conventions):
        told = Case(changes).label
        yield Case("groups of 3 and 5", changes, changes=changes, batch=uneven, n_pieces=2, told=told)
    three, changes = (
        replace(batch, group_ids=torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])),
        {"aggregation": "group_token_mean"},
    )
    yield Case("groups of 3, 2 and 3", changes=changes, batch=three, n_pieces=3, told=Case(changes).label)


def _pieces_and_shares(conventions: Conventions, rng: Generator) -> Iterator[Case]:
    yield from _pieces(conventions, rng)
    # A rank's part of an update, in micro-batches: the counts are those of the whole update.
    profile, batch = next(_batches(rng))
    share = replace(batch, global_tokens=2 * float(batch.mask.sum()), global_sequences=2 * float(len(batch.mask)))
    for name in dict.fromkeys((conventions.aggregation, "token_mean", "sequence_mean")):
        told, changes = f"{name}, half of an update", {"aggregation": name}
        yield Case("half of an update", name, profile, changes=changes, batch=share, n_pieces=2, told=told)


def _shards(conventions: Conventions, rng: Generator) -> Iterator[Case]:
    yield from _pieces(conventions, rng)
    # The entropy of a micro-batch is known when its turn comes, that of the ranks beside it at the same time.
    for profile, batch in _batches(rng):
        changes = {"top_entropy": 0.4}
        yield Case(profile, changes, changes=changes, batch=batch, n_pieces=2, told=f"top_entropy=0.4, {profile}")


def _drawn_pieces(conventions: Conventions, rng: Generator, size: int) -> Case:
    name = rows.one_of(rng, (conventions.aggregation, "token_mean", "sequence_mean"))
    changes = {"aggregation": name}
    batch = rows.policy_batch(rng, size, conventions.replace(**changes))
    return Case(changes=changes, batch=batch, n_pieces=_number(rng, batch), told=name)


def _number(rng: Generator, batch: PolicyBatch) -> int:
    """Draw a number of pieces, of at least one group each."""
    assert batch.group_ids is not None
    return rows.whole(rng, 1, len(batch.group_ids.unique()))


@check("split.micro_batches", needs=("accumulated_loss",), cases=_pieces_and_shares, draws=_drawn_pieces)
def micro_batches(adapter: Adapter, batch: PolicyBatch, n_pieces: int, told: str) -> None:
    """Micro-batches of uneven token counts give the loss and the gradient of the whole batch.

    Silent because the mean of means is also a mean: short micro-batches count as much as long ones, or the sum of means
    multiplies the learning rate by their number, and the logged loss is right. Look at what each piece is divided by, and
    whether the division comes before backward.
    """
    _assert_whole(adapter, adapter.accumulated_loss, batch, n_pieces, f"in {n_pieces} micro-batches ({told})")


@check("split.ranks", needs=("sharded_loss",), cases=_shards, draws=_drawn_pieces)
def ranks(adapter: Adapter, batch: PolicyBatch, n_pieces: int, told: str) -> None:
    """The reduced gradient over ranks with uneven token counts equals that of the whole batch on one rank.

    Silent because each rank normalises by its own tokens and the average over ranks looks like a mean: the same config
    trains differently on one node and on eight. Look at the token count that each rank divides by, at what the framework
    averages on top, and at a quantile or a standard deviation that each rank takes of its own tokens.
    """
    _assert_whole(adapter, adapter.sharded_loss, batch, n_pieces, f"over {n_pieces} ranks ({told})")


def in_pieces(split: Pieces, batch: Any, n_pieces: int, n_rows: int) -> LossOutput | None:
    """Split an update of so many rows; None if the code refuses pieces of unequal size, which is not silent."""
    given = inputs.fresh(batch)
    return split(given, n_pieces) if n_rows % n_pieces == 0 else unless_raised(split, given, n_pieces)


def _assert_whole(adapter: Adapter, split: Split, batch: PolicyBatch, n_pieces: int, place: str) -> None:
    expected, expected_BT = exact_loss(batch, adapter.conventions)
    output = in_pieces(split, batch, n_pieces, len(batch.mask))
    if output is None:
        return
    loss = output.loss
    with soft():
        assert_close(loss, expected, f"the loss {place} is not that of the whole batch")
    told = f"the gradient {place} is not that of the whole batch"
    assert_close(gradient(loss, batch.logprobs), expected_BT, told, quantity="gradient")


def _assert_metrics(adapter: Adapter, split: Split, batch: PolicyBatch, n_pieces: int, place: str) -> None:
    expected = exact_output(batch, adapter.conventions).metrics
    if (output := in_pieces(split, batch, n_pieces, len(batch.mask))) is not None:
        assert_metrics(output, expected, f"{place}; of all the data")


def _several_pieces(rng: Generator) -> Iterator[Case]:
    for profile, batch in _batches(rng):
        for n in (2, 3, 4):
            yield Case(profile, f"{n} pieces", batch=batch, n_pieces=n, profile=profile)
    _, batch = next(_batches(rng))
    for name, shift in (("largest", -2.0), ("smallest", 2.0)):
        old_BT = batch.old_logprobs.clone()
        old_BT[-1] += shift
        profile = f"the {name} ratio in the last row"
        yield Case(profile, batch=replace(batch, old_logprobs=old_BT), n_pieces=2, profile=profile)


def _drawn_metrics(conventions: Conventions, rng: Generator, size: int) -> Case:
    batch = rows.policy_batch(rng, size, conventions)
    return Case(batch=batch, n_pieces=_number(rng, batch), profile=f"{len(batch.mask)} rows")


@check(
    "split.metrics_over_micro_batches",
    severity="dashboard",
    needs=("accumulated_loss",),
    cases=_several_pieces,
    draws=_drawn_metrics,
)
def metrics_over_micro_batches(adapter: Adapter, batch: PolicyBatch, n_pieces: int, profile: str) -> None:
    """Metrics logged for an update in micro-batches equal those for the whole batch.

    Silent because metrics affect only people's decisions: a mean of means favours micro-batches with short completions,
    the metrics of the last micro-batch look plausible, and a sum of means grows with their number. Look at how the
    numbers of the micro-batches are put together, and at those that overwrite each other in a dictionary.
    """
    _assert_metrics(adapter, adapter.accumulated_loss, batch, n_pieces, f"in {n_pieces} micro-batches ({profile})")


@check(
    "split.metrics_over_ranks",
    severity="dashboard",
    needs=("sharded_loss",),
    cases=_several_pieces,
    draws=_drawn_metrics,
)
def metrics_over_ranks(adapter: Adapter, batch: PolicyBatch, n_pieces: int, profile: str) -> None:
    """Metrics logged over several ranks equal those of one rank with all the data.

    Silent because metrics affect only people's decisions: a mean of per-rank means favours ranks with short
    completions, and a numerator over all ranks with a denominator from one goes above 1. Look at gathers that cover
    only half of a ratio, and at minima and maxima that are averaged.
    """
    _assert_metrics(adapter, adapter.sharded_loss, batch, n_pieces, f"over {n_pieces} ranks ({profile})")


@check("split.pieces_agree", needs=("accumulated_loss",), cases=_several_pieces, draws=_drawn_metrics)
def pieces_agree(adapter: Adapter, batch: PolicyBatch, n_pieces: int, profile: str) -> None:
    """An update in several micro-batches has the loss, the gradient and the metrics of the same update in one.

    Silent because each number of micro-batches trains, with another learning rate for each. This holds whatever the
    objective is, so it needs no declaration. Look at what each piece is divided by.
    """
    _assert_agree(adapter.accumulated_loss, batch, n_pieces, f"{n_pieces} micro-batches ({profile})")


@check("split.ranks_agree", needs=("sharded_loss",), cases=_several_pieces, draws=_drawn_metrics)
def ranks_agree(adapter: Adapter, batch: PolicyBatch, n_pieces: int, profile: str) -> None:
    """An update over several ranks has the loss, the gradient and the metrics of the same update on one.

    Silent because each number of ranks trains, with another learning rate for each. This holds whatever the objective
    is, so it needs no declaration. Look at what each rank is divided by and at what is averaged on top.
    """
    _assert_agree(adapter.sharded_loss, batch, n_pieces, f"{n_pieces} ranks ({profile})")


def _assert_agree(split: Split, batch: PolicyBatch, n_pieces: int, told: str) -> None:
    one, several = split(inputs.fresh(batch), 1), in_pieces(split, batch, n_pieces, len(batch.mask))
    if several is None:
        return
    with soft():
        assert_close(several.loss, one.loss.detach(), f"{told} give another loss than one")
    expected_BT = gradient(one.loss, batch.logprobs)
    told_gradient = f"{told} give another gradient than one"
    assert_close(gradient(several.loss, batch.logprobs), expected_BT, told_gradient, quantity="gradient")
    shared = {name: value for name, value in one.metrics.items() if name in NAMES}
    assert_metrics(several, shared, f"in {told}; in one piece")


def _first_profile(rng: Generator) -> Iterator[Case]:
    _, batch = next(_batches(rng))
    for n in (1, 2, 4):
        yield Case(f"{n} ranks", batch=batch, n_ranks=n)


@check("split.extremes_are_ordered", severity="dashboard", needs=("sharded_loss",), cases=_first_profile)
def extremes_are_ordered(adapter: Adapter, batch: PolicyBatch, n_ranks: int) -> None:
    """Each logged minimum is at most its mean and each mean at most its maximum, over any number of ranks.

    Silent because two curves of one dashboard are rarely compared. Look for reductions that treat all metrics alike.
    """
    metrics = adapter.sharded_loss(inputs.fresh(batch), n_ranks).metrics
    for family in sorted({name.removesuffix("_mean") for name in metrics if name.endswith("_mean")}):
        names = [f"{family}_{part}" for part in ("min", "mean", "max") if f"{family}_{part}" in metrics]
        values = [float(metrics[name]) for name in names]
        if len(names) > 1 and not any(map(math.isnan, values)):
            is_ordered = all(low <= high + 1e-6 for low, high in pairwise(values))
            assert_true(is_ordered, f"{names} are logged as {values}")
