"""Data order: every item is visited by one rank, in an order that a resumed run reproduces."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch
from torch import Generator

from rlcanary.checks.check import check
from rlcanary.checks.subject import Call, Finding, Subject
from rlcanary.contract.conventions import Conventions

SEEDING = ["torch.manual_seed({0})", "random.seed({0})", "numpy.random.seed({0})"]
STATE = "(torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist())"


def _visited(n_items: int, world_size: int, epoch: str = "0") -> str:
    """Write Python for all indices that the ranks visit in an epoch."""
    return (
        f"[int(index) for rank in range({world_size}) "
        f"for index in adapter.data_order({n_items}, {epoch}, rank, {world_size})]"
    )


def _is_sequential(conventions: Conventions) -> str | None:
    return "the order is declared as sequential" if conventions.data_order == "sequential" else None


@check("order.every_item_once", needs=("data_order",))
def every_item_once(subject: Subject, rng: Generator) -> None:
    """The ranks together visit every item once per epoch, if the items divide evenly among them.

    Silent because the loss does not show which prompts were never visited. Ranks that shuffle with different seeds
    visit some items twice and others never; a slice that is off by one omits the last item. Look at how the permutation
    is seeded on each rank, and at the ends of slices.
    """
    for n_items, world_size in ((1, 1), (4, 1), (4, 2), (6, 3), (16, 4)):
        for epoch in (0, 1, 5):
            with subject.case(f"{n_items} items, {world_size} ranks, epoch {epoch}"):
                call = subject.call("data_order", n_items, epoch, 0, world_size)
                call.expect_equal(
                    f"sorted({_visited(n_items, world_size, str(epoch))})",
                    list(range(n_items)),
                    f"{n_items} items, epoch {epoch}, {world_size} ranks: the ranks do not visit every item once",
                )


@check("order.uneven_ranks", needs=("data_order",))
def uneven_ranks(subject: Subject, rng: Generator) -> None:
    """Fewer than `world_size` items are repeated or left out if they do not divide evenly among the ranks.

    Silent because an epoch that is a little short looks like an epoch. Look for a remainder that is dropped per rank or
    per batch rather than once.
    """
    for n_items, world_size in ((5, 2), (7, 3), (7, 4), (13, 8)):
        with subject.case(f"{n_items} items, {world_size} ranks"):
            call = subject.call("data_order", n_items, 0, 0, world_size)
            visited = _visited(n_items, world_size)
            call.expect_equal(
                f"sorted(set({visited}) - set(range({n_items})))",
                [],
                f"an index outside the {n_items} items is visited",
            )
            call.expect_equal(
                f"{n_items} - len(set({visited})) + len({visited}) - len(set({visited})) < {world_size}",
                True,
                f"{n_items} items on {world_size} ranks: {world_size} or more are left out or repeated",
            )


@check("order.no_item_is_always_left_out", needs=("data_order",), applies=_is_sequential)
def no_item_is_always_left_out(subject: Subject, rng: Generator) -> None:
    """Over many epochs every item is visited, also where each epoch drops a remainder.

    Silent because a remainder is small; dropped before shuffling, it is the same items every time and they are never
    trained. Look for a cut to a multiple of the batch size that comes before the permutation.
    """
    for n_items, world_size in ((5, 2), (7, 4)):
        with subject.case(f"{n_items} items, {world_size} ranks"):
            call = subject.call("data_order", n_items, 0, 0, world_size)
            visited = f"{{index for epoch in range(32) for index in {_visited(n_items, world_size, 'epoch')}}}"
            call.expect_equal(
                f"sorted(set(range({n_items})) - {visited})", [], "in 32 epochs these of the items were never visited"
            )


@check("order.epochs_differ", needs=("data_order",), applies=_is_sequential)
def epochs_differ(subject: Subject, rng: Generator) -> None:
    """Each epoch has a different order, and none is the order of the file.

    Silent because the first epoch is shuffled: a sampler that is never told the epoch repeats it, so that the same prompts
    meet in the same batch every time. Look for a missing `set_epoch` and for a generator that is made anew with the same
    seed. An implementation that goes from first to last on purpose declares `data_order="sequential"`.
    """
    call = subject.call("data_order", 20, 0, 0, 1)
    orders = "{tuple(int(index) for index in adapter.data_order(20, epoch, 0, 1)) for epoch in range(6)}"
    call.expect_equal(f"len({orders})", 6, "epochs share an order: in six of them this many different ones")
    call.expect_equal(
        f"tuple(range(20)) in {orders}", False, "the order is declared as shuffled and is that of the file"
    )


@check("order.sequential", needs=("data_order",))
def sequential(subject: Subject, rng: Generator) -> None:
    """A data order declared as sequential goes from the first item to the last in every epoch, on every rank.

    Silent because a shuffled order trains as well; only the curriculum, or the comparison with a sequential run, is
    lost. Look for a shuffling option that is on by default.
    """
    subject = subject.configured(data_order="sequential")
    for epoch in (0, 1):
        with subject.case(f"epoch {epoch}"):
            call = subject.call("data_order", 6, epoch, 0, 1)
            call.expect_equal(
                "list(output)", list(range(6)), f"in epoch {epoch} the items are not visited from first to last"
            )
            call = subject.call("data_order", 6, epoch, 1, 2)
            call.expect_equal(
                "list(output) == sorted(output)", True, "rank 1 of 2 does not go forward through its items"
            )


@check("order.repeatable", needs=("data_order",))
def repeatable(subject: Subject, rng: Generator) -> None:
    """The same epoch and rank always get the same order, regardless of random numbers drawn before.

    Silent because any order is plausible: a resumed run whose sampler permutes by the global random state repeats some
    prompts and never reaches others, and ranks whose random states have diverged overlap. Look for `randperm` and
    `shuffle` without a generator of their own, and for samplers whose state is not saved.
    """
    for world_size in (1, 2):
        with subject.case(f"{world_size} ranks"):
            orders = []
            for seed in (1, 2):
                with _global_seed(seed):
                    call = subject.call("data_order", 12, 1, 0, world_size)
                    orders.append([int(index) for index in call.output])
                subject.call("data_order", 12, 2, 0, world_size)
            subject.compared(len(orders[0]))
            if orders[0] != orders[1]:
                lines = _seeded("first = [int(index) for index in adapter.data_order(*arguments)]", 1)
                lines += _seeded("again = [int(index) for index in adapter.data_order(*arguments)]", 2)
                raise Finding(
                    "with another state of the global random generators, the same epoch has another order\n"
                    f"  first: {orders[0]}\n  again: {orders[1]}",
                    _snippet(call, [*lines, "assert first == again, (first, again)"]),
                )


@check("order.leaves_the_global_random_state", needs=("data_order",))
def leaves_the_global_random_state(subject: Subject, rng: Generator) -> None:
    """Computing the order does not seed the global random generators.

    Silent because later random draws (sampling, dropout) are then the same after every epoch's start and on every rank.
    Look for `manual_seed`, `random.seed` and `numpy.random.seed` in the sampler.
    """
    for epoch in (0, 1):
        with subject.case(f"epoch {epoch}"):
            states = []
            for seed in (1, 2):
                with _global_seed(seed):
                    call = subject.call("data_order", 8, epoch, 0, 1)
                    states.append(_states())
            seeded = [
                name
                for name, first, second in zip(("torch", "random", "numpy"), *states, strict=True)
                if first == second
            ]
            subject.compared()
            if seeded:
                lines = [*_seeded("adapter.data_order(*arguments)", 1), f"first = {STATE}"]
                lines += [*_seeded("adapter.data_order(*arguments)", 2), f"second = {STATE}"]
                lines += [
                    "same = [str(one) == str(other) for one, other in zip(first, second)]",
                    "assert not any(same), dict(zip(('torch', 'random', 'numpy'), same))",
                ]
                raise Finding(
                    f"from two different states, data_order leaves the same state of: {', '.join(seeded)}",
                    _snippet(call, lines),
                )


@contextmanager
def _global_seed(seed: int) -> Iterator[None]:
    """Seed the global random generators inside the block, and restore them after it."""
    python, numbers = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)
        yield
    random.setstate(python)
    numpy.random.set_state(numbers)


def _states() -> tuple[str, str, str]:
    return (
        str(torch.get_rng_state().tolist()),
        str(random.getstate()),
        str(numpy.random.get_state(legacy=False)["state"]["key"].tolist()),
    )


def _seeded(line: str, seed: int) -> list[str]:
    return [*(template.format(seed) for template in SEEDING), line]


def _snippet(call: Call, lines: list[str]) -> str:
    return call.snippet(["import random", "import numpy", *lines])
