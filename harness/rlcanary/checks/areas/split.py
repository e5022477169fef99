"""Splitting an update over micro-batches or ranks changes nothing."""

import math
from collections.abc import Iterator
from itertools import pairwise

from torch import Generator

from rlcanary.checks.check import check
from rlcanary.checks.subject import Subject
from rlcanary.checks.worlds import inputs as cases
from rlcanary.checks.worlds.oracle import exact_loss, exact_output
from rlcanary.contract.batch import PolicyBatch

# Trained tokens of each row. Pieces of as many rows differ in tokens, and pieces of as many tokens differ in rows, so that
# a mean of the pieces' means is not the mean, by whichever of the two an implementation cuts.
PROFILES: dict[str, tuple[int, ...]] = {
    "short rows last": (5, 5, 4, 1, 3, 1, 1, 1),
    "one long row": (1, 1, 12, 1, 2, 1, 1, 3),
    "rows of no token": (6, 0, 1, 2, 0, 0, 3, 0),
    "a last piece of no token": (4, 1, 2, 3, 0, 0, 0, 0),
}


@check("split.micro_batches", needs=("accumulated_loss",))
def micro_batches(subject: Subject, rng: Generator) -> None:
    """Micro-batches of uneven token counts give the loss and the gradient of the whole batch.

    Silent because the mean of means is also a mean: short micro-batches count as much as long ones, or the sum of means
    multiplies the learning rate by their number, and the logged loss is right. Look at what each piece is divided by, and
    whether the division comes before backward.
    """
    _expect_whole(subject, rng, "accumulated_loss", "in {} micro-batches")


@check("split.ranks", needs=("sharded_loss",))
def ranks(subject: Subject, rng: Generator) -> None:
    """The reduced gradient over ranks with uneven token counts equals that of the whole batch on one rank.

    Silent because each rank normalises by its own tokens and the average over ranks looks like a mean: the same config
    trains differently on one node and on eight. Look at the token count that each rank divides by, and at what the
    framework averages on top.
    """
    _expect_whole(subject, rng, "sharded_loss", "over {} ranks")


def _batches(rng: Generator) -> Iterator[tuple[str, PolicyBatch]]:
    for name, lengths in PROFILES.items():
        yield name, cases.policy_batch(rng, len(lengths), max(lengths), lengths)


def _expect_whole(subject: Subject, rng: Generator, capability: str, told: str) -> None:
    """Compare the split update with the whole under the declared aggregation and, if settable, the two common ones."""
    declared = subject.conventions.aggregation
    for profile, batch in _batches(rng):
        for aggregation in dict.fromkeys((declared, "token_mean", "sequence_mean")):
            for n_pieces in (1, 2, 4):
                with subject.case(profile, aggregation, f"{n_pieces} pieces"):
                    option = subject.configured(aggregation=aggregation)
                    loss, gradient_BT = exact_loss(batch, option.conventions)
                    call = option.call(capability, batch, n_pieces)
                    where = f"{told.format(n_pieces)} ({aggregation}, {profile})"
                    call.expect(loss, f"the loss {where} is not that of the whole batch")
                    call.expect_gradient(
                        gradient_BT, f"the gradient {where} is not that of the whole batch", "logprobs"
                    )


@check("split.metrics_over_micro_batches", needs=("accumulated_loss",))
def metrics_over_micro_batches(subject: Subject, rng: Generator) -> None:
    """Metrics logged for an update in micro-batches equal those for the whole batch.

    Silent because metrics affect only people's decisions: a mean of means favours micro-batches with short completions,
    the metrics of the last micro-batch look plausible, and a sum of means grows with their number. Look at how the
    numbers of the micro-batches are put together, and at those that overwrite each other in a dictionary.
    """
    _expect_metrics_of_whole(subject, rng, "accumulated_loss", "in {} micro-batches")


@check("split.metrics_over_ranks", needs=("sharded_loss",))
def metrics_over_ranks(subject: Subject, rng: Generator) -> None:
    """Metrics logged over several ranks equal those of one rank with all the data.

    Silent because metrics affect only people's decisions: a mean of per-rank means favours ranks with short
    completions, and a numerator over all ranks with a denominator from one goes above 1. Look at gathers that cover
    only half of a ratio, and at minima and maxima that are averaged.
    """
    _expect_metrics_of_whole(subject, rng, "sharded_loss", "over {} ranks")


def _expect_metrics_of_whole(subject: Subject, rng: Generator, capability: str, told: str) -> None:
    for profile, batch in _batches(rng):
        expected = exact_output(batch, subject.conventions).metrics
        for n_pieces in (2, 4):
            with subject.case(profile, f"{n_pieces} pieces"):
                call = subject.call(capability, batch, n_pieces)
                for name in sorted(set(expected) & set(call.output.metrics)):
                    where = f"{told.format(n_pieces)} ({profile}); of all the data"
                    call.expect_metric(name, expected[name], where)


@check("split.extremes_are_ordered", needs=("sharded_loss",))
def extremes_are_ordered(subject: Subject, rng: Generator) -> None:
    """Each logged minimum is at most its mean and each mean at most its maximum, over any number of ranks.

    Silent because two curves of one dashboard are rarely compared. Look for reductions that treat all metrics alike.
    """
    _, batch = next(_batches(rng))
    for n_ranks in (1, 2, 4):
        with subject.case(f"{n_ranks} ranks"):
            call = subject.call("sharded_loss", batch, n_ranks)
            metrics = call.output.metrics
            for family in sorted({name.removesuffix("_mean") for name in metrics if name.endswith("_mean")}):
                names = [f"{family}_{part}" for part in ("min", "mean", "max") if f"{family}_{part}" in metrics]
                values = [float(metrics[name]) for name in names]
                if len(names) == 1 or any(map(math.isnan, values)):
                    continue
                ordered = all(low <= high + 1e-6 for low, high in pairwise(values))
                condition = (
                    f"(lambda values: values == sorted(values))([round(float(adapter.sharded_loss(*arguments)"
                    f".metrics[name]), 5) for name in {names!r}])"
                )
                call.expect_true(ordered, f"{names} are logged as {values}", condition)
