"""The batch schedule: an optimizer update has the configured number of rows."""

from collections.abc import Iterator

from rlcanary.checks.asserts import assert_equal, assert_true, unless_raised
from rlcanary.checks.case import Case
from rlcanary.checks.check import check
from rlcanary.contract.adapter import Adapter


def _layouts() -> Iterator[Case]:
    for batch, micro, ranks, shared in (
        (1, 1, 1, 1),
        (8, 2, 1, 1),
        (8, 1, 2, 1),
        (48, 3, 4, 1),
        (64, 16, 2, 1),
        (8, 2, 4, 2),
        (96, 2, 32, 4),
        (128, 4, 64, 4),
        (24, 3, 8, 8),
    ):
        yield Case(batch, micro, ranks, shared, batch=batch, micro=micro, ranks=ranks, shared=shared)


@check("schedule.update_has_batch_size", needs=("accumulation_steps",), cases=_layouts)
def update_has_batch_size(adapter: Adapter, batch: int, micro: int, ranks: int, shared: int) -> None:
    """Accumulation steps × micro-batch size × data-parallel ranks is the batch size.

    Silent because a smaller update also trains: with floor divisions in the wrong order, or a micro-batch size that
    never reached the trainer, the effective batch differs from the configured one, and with it the noise and the best
    learning rate. Look at the order of the floor divisions and at default arguments.
    """
    data_parallel = ranks // shared
    told = f"a batch of {batch} in micro-batches of {micro} on {data_parallel} data-parallel ranks ({ranks} in all)"
    steps = int(adapter.accumulation_steps(batch, micro, ranks, shared))
    assert_equal(steps, batch // (micro * data_parallel), f"{told} takes another number of steps")


def _sequence_parallel() -> Iterator[Case]:
    for batch, micro, ranks in ((8, 2, 1), (16, 1, 2), (48, 3, 4)):
        for shared in (2, 4):
            yield Case(ranks * shared, shared, batch=batch, micro=micro, ranks=ranks, shared=shared)


@check("schedule.sequence_parallel_ranks_share_rows", needs=("accumulation_steps",), cases=_sequence_parallel)
def sequence_parallel_ranks_share_rows(adapter: Adapter, batch: int, micro: int, ranks: int, shared: int) -> None:
    """Sequence-parallel ranks count as one: doubling their number leaves the number of steps unchanged.

    Silent because dividing by all ranks only makes the update smaller, by the number of ranks per sequence. Look
    for `world_size` where the number of data-parallel ranks is meant.
    """
    alone = int(adapter.accumulation_steps(batch, micro, ranks, 1))
    together = int(adapter.accumulation_steps(batch, micro, ranks * shared, shared))
    told = f"{ranks} data-parallel ranks take {alone} steps, with {shared} ranks to each another number"
    assert_equal(together, alone, told)


def _impossible() -> Iterator[Case]:
    for batch, micro, ranks, shared, told in (
        (10, 4, 1, 1, "10 rows are not a multiple of 4"),
        (4, 8, 1, 1, "4 rows do not fill one micro-batch of 8"),
        (8, 2, 3, 1, "8 rows cannot be dealt out to 3 ranks in twos"),
        (8, 2, 16, 1, "16 ranks with 2 rows each take more than 8 rows"),
        (8, 1, 6, 4, "6 ranks are not a multiple of 4 to a sequence"),
    ):
        yield Case(told, batch=batch, micro=micro, ranks=ranks, shared=shared, told=told)


@check("schedule.impossible_is_refused", severity="hardening", needs=("accumulation_steps",), cases=_impossible)
def impossible_is_refused(adapter: Adapter, batch: int, micro: int, ranks: int, shared: int, told: str) -> None:
    """A batch that does not divide evenly is rejected.

    Silent because floor division always has an answer: rows are left over and never trained, or the number of steps is
    zero and the optimizer never moves. Look for `//` without a test of the remainder.
    """
    steps = unless_raised(adapter.accumulation_steps, batch, micro, ranks, shared)
    assert_true(steps is None, f"{told}, and {steps} steps are taken", quantity="data")
