"""Data order: every item is visited by one rank, in an order that a resumed run reproduces."""

import copy
import random
from collections.abc import Callable, Iterator

import numpy
import torch

from rlcanary.checks.asserts import assert_equal, assert_true, leave_out, unless_raised
from rlcanary.checks.case import Case
from rlcanary.checks.check import Cases, check
from rlcanary.checks.worlds.training.states import seeded
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.conventions import Conventions


def _order(adapter: Adapter, n_items: int, epoch: int, rank: int = 0, world_size: int = 1) -> list[int]:
    return [int(index) for index in adapter.data_order(n_items, epoch, rank, world_size)]


def _visited(adapter: Adapter, n_items: int, epoch: int, world_size: int) -> list[int]:
    """Return all indices that the ranks visit in an epoch."""
    return [index for rank in range(world_size) for index in _order(adapter, n_items, epoch, rank, world_size)]


def _sizes(*sizes: tuple[int, int]) -> Cases:
    """Make one case of each number of items and ranks."""
    return lambda: [
        Case(f"{n_items} items, {world_size} ranks", n_items=n_items, world_size=world_size)
        for n_items, world_size in sizes
    ]


def _epochs() -> Iterator[Case]:
    for epoch in (0, 1):
        yield Case(f"epoch {epoch}", epoch=epoch)


def _is_sequential(conventions: Conventions) -> str | None:
    return "the order is declared as sequential" if conventions.data_order == "sequential" else None


def _even_sizes() -> Iterator[Case]:
    for n_items, world_size in ((1, 1), (4, 1), (4, 2), (6, 3), (16, 4), (600, 4)):
        for epoch in (0, 1, 5):
            told = f"{n_items} items, {world_size} ranks, epoch {epoch}"
            yield Case(told, n_items=n_items, world_size=world_size, epoch=epoch)


@check("order.every_item_once", needs=("data_order",), cases=_even_sizes)
def every_item_once(adapter: Adapter, n_items: int, world_size: int, epoch: int) -> None:
    """The ranks together visit every item once per epoch, if the items divide evenly among them.

    Silent because the loss does not show which prompts were never visited. Ranks that shuffle with different seeds
    visit some items twice and others never; a slice that is off by one omits the last item. Look at how the permutation
    is seeded on each rank, and at the ends of slices.
    """
    visited = sorted(_visited(adapter, n_items, epoch, world_size))
    told = f"{n_items} items, epoch {epoch}, {world_size} ranks: the ranks do not visit every item once"
    assert_equal(visited, list(range(n_items)), told)


@check("order.uneven_ranks", needs=("data_order",), cases=_sizes((5, 2), (7, 3), (7, 4), (13, 8)))
def uneven_ranks(adapter: Adapter, n_items: int, world_size: int) -> None:
    """Fewer than `world_size` items are repeated or left out if they do not divide evenly among the ranks.

    Silent because an epoch that is a little short looks like an epoch. Look for a remainder that is dropped per rank or
    per batch rather than once.
    """
    visited = _visited(adapter, n_items, 0, world_size)
    outside = sorted(set(visited) - set(range(n_items)))
    assert_equal(outside, [], f"an index outside the {n_items} items is visited")
    left_out, repeated = n_items - len(set(visited)), len(visited) - len(set(visited))
    told = f"{n_items} items on {world_size} ranks: {left_out} are left out and {repeated} repeated"
    assert_true(left_out + repeated < world_size, told, quantity="data")


@check("order.no_item_is_always_left_out", needs=("data_order",), cases=_sizes((5, 2), (7, 4)), applies=_is_sequential)
def no_item_is_always_left_out(adapter: Adapter, n_items: int, world_size: int) -> None:
    """Over many epochs every item is visited, also where each epoch drops a remainder.

    Silent because a remainder is small; dropped before shuffling, it is the same items every time and they are never
    trained. Look for a cut to a multiple of the batch size that comes before the permutation.
    """
    visited = {index for epoch in range(32) for index in _visited(adapter, n_items, epoch, world_size)}
    left_out = sorted(set(range(n_items)) - visited)
    assert_equal(left_out, [], "in 32 epochs these of the items were never visited")


@check("order.epochs_differ", needs=("data_order",), applies=_is_sequential)
def epochs_differ(adapter: Adapter) -> None:
    """Each epoch has a different order, and none is the order of the file.

    Silent because the first epoch is shuffled: a sampler that is never told the epoch repeats it, so that the same prompts
    meet in the same batch every time. Look for a missing `set_epoch` and for a generator that is made anew with the same
    seed. An implementation that goes from first to last on purpose declares `data_order="sequential"`.
    """
    orders = {tuple(_order(adapter, 20, epoch)) for epoch in range(150)}
    assert_equal(len(orders), 150, "epochs share an order: in 150 of them this many different ones")
    is_that_of_the_file = tuple(range(20)) in orders
    assert_equal(is_that_of_the_file, False, "the order is declared as shuffled and is that of the file")


def _sequential_epochs() -> Iterator[Case]:
    for epoch in (0, 1):
        yield Case(f"epoch {epoch}", changes={"data_order": "sequential"}, epoch=epoch)


@check("order.sequential", needs=("data_order",), cases=_sequential_epochs)
def sequential(adapter: Adapter, epoch: int) -> None:
    """A data order declared as sequential goes from the first item to the last in every epoch, on every rank.

    Silent because a shuffled order trains as well; only the curriculum, or the comparison with a sequential run, is
    lost. Look for a shuffling option that is on by default.
    """
    told = f"in epoch {epoch} the items are not visited from first to last"
    assert_equal(_order(adapter, 6, epoch), list(range(6)), told)
    second = _order(adapter, 6, epoch, rank=1, world_size=2)
    assert_equal(second, sorted(second), "rank 1 of 2 does not go forward through its items")


def _ranks() -> Iterator[Case]:
    for world_size in (1, 2):
        yield Case(f"{world_size} ranks", world_size=world_size)


@check("order.repeatable", needs=("data_order",), cases=_ranks)
def repeatable(adapter: Adapter, world_size: int) -> None:
    """The same epoch and rank always get the same order, regardless of random numbers drawn and epochs visited before.

    Silent because any order is plausible: a resumed run whose sampler permutes by the global random state, or counts epochs
    from its own start, repeats some prompts and never reaches others, and ranks whose random states have diverged overlap.
    Look for `randperm` and `shuffle` without a generator of their own, and for samplers whose state is not saved.
    """
    later = unless_raised(copy.deepcopy, adapter)
    first = seeded(_order, adapter, 12, 1, 0, world_size, seed=1)
    _order(adapter, 12, 2, 0, world_size)
    again = seeded(_order, adapter, 12, 1, 0, world_size, seed=2)
    told = "with another state of the global random generators, the same epoch has another order"
    assert_equal(again, first, told, quantity="property")
    if later is None:
        leave_out("the adapter cannot be copied, as it is in a new process")
        return
    # A number of items that no other check asks for.
    epochs = [_order(adapter, 14, epoch, 0, world_size) for epoch in range(3)]
    told = "a process that visits an epoch first has another order there than one that visited those before it"
    assert_equal(_order(later, 14, 2, 0, world_size), epochs[2], told, quantity="property")


def _stops() -> Iterator[Case]:
    for n_items, world_size, consumed in (
        (5, 1, 0),
        (5, 1, 3),
        (5, 1, 5),
        (6, 2, 1),
        (6, 2, 4),
        (7, 3, 8),
        (5, 1, 27),
        (600, 2, 700),
    ):
        told = f"{n_items} items, {world_size} ranks, stopped after {consumed}"
        yield Case(told, n_items=n_items, world_size=world_size, consumed=consumed)


@check("order.resumed", needs=("data_order", "resumed_order"), cases=_stops)
def resumed(adapter: Adapter, n_items: int, world_size: int, consumed: int) -> None:
    """A resumed run visits the items that follow those before the stop: none again, none left out, in this epoch and later.

    Silent because the items of a resumed run look like any others: some are trained twice and others never. Look for an
    epoch that begins again, for a count of batches that were prepared and not of those that were used, and for items that
    are skipped in every later epoch as well.
    """
    for rank in range(world_size):
        per_epoch = len(_order(adapter, n_items, 0, rank, world_size))
        epochs = range((consumed + 2 * per_epoch) // per_epoch + 1)
        whole = [index for epoch in epochs for index in _order(adapter, n_items, epoch, rank, world_size)]
        count = 2 * per_epoch
        visited = [int(index) for index in adapter.resumed_order(n_items, consumed, count, rank, world_size)]
        told = f"rank {rank} of {world_size}, stopped after {consumed} of its items, visits others than without a stop"
        assert_equal(visited, whole[consumed : consumed + count], told)


@check("order.leaves_the_global_random_state", severity="hardening", needs=("data_order",), cases=_epochs)
def leaves_the_global_random_state(adapter: Adapter, epoch: int) -> None:
    """Computing the order does not seed the global random generators.

    Silent because later random draws (sampling, dropout) are then the same after every epoch's start and on every rank.
    Look for `manual_seed`, `random.seed` and `numpy.random.seed` in the sampler.
    """
    states = (seeded(_states_after, _order, adapter, 8, epoch, seed=seed) for seed in (1, 2))
    same = [name for name, first, second in zip(("torch", "random", "numpy"), *states, strict=True) if first == second]
    assert_equal(same, [], "from two different states, data_order leaves the same state of", quantity="property")


def _states_after(function: Callable[..., object], *arguments: object) -> list[str]:
    """Call a function and return the states of the global random generators."""
    function(*arguments)
    numbers = numpy.random.get_state(legacy=False)["state"]["key"]
    return [str(state) for state in (torch.get_rng_state().tolist(), random.getstate(), numbers.tolist())]
