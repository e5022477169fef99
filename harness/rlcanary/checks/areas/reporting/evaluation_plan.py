"""Which items an evaluation counts, and after which updates it runs."""

from collections.abc import Iterator

from rlcanary.checks.asserts import assert_equal
from rlcanary.checks.case import Case
from rlcanary.checks.check import check
from rlcanary.contract.adapter import Adapter


def _sizes() -> Iterator[Case]:
    for n_items, batch_size, n_ranks in (
        (1, 1, 1),
        (4, 2, 1),
        (8, 2, 2),
        (5, 2, 1),
        (7, 3, 2),
        (9, 2, 4),
        (2, 1, 3),
        (600, 16, 4),
    ):
        told = f"{n_items} items, batches of {batch_size}, {n_ranks} ranks"
        yield Case(told, n_items=n_items, batch_size=batch_size, n_ranks=n_ranks)


@check("evaluation_plan.every_item_once", severity="dashboard", needs=("evaluation_items",), cases=_sizes)
def every_item_once(adapter: Adapter, n_items: int, batch_size: int, n_ranks: int) -> None:
    """Each evaluation counts each item once, over all ranks, whatever the sizes; the second evaluation too.

    Silent because a score over most of the items, or with a few of them twice, is near the right one and moves with the
    number of GPUs. Look for `drop_last`, for samplers that repeat items so that ranks get equally many, and for a data
    loader that is used up after the first evaluation.
    """
    for evaluation in ("first", "second"):
        counted = [
            int(item)
            for rank in range(n_ranks)
            for item in adapter.evaluation_items(n_items, batch_size, rank, n_ranks)
        ]
        told = f"the {evaluation} evaluation does not count each of {n_items} items once"
        assert_equal(sorted(counted), list(range(n_items)), told, quantity=f"items of the {evaluation} evaluation")


def _runs() -> Iterator[Case]:
    for n_steps, every in ((4, 2), (6, 1), (7, 3), (2, 5)):
        for at_start, at_end in ((False, False), (True, False), (False, True), (True, True)):
            told = f"{n_steps} updates, every {every}", *["start"] * at_start, *["end"] * at_end
            yield Case(*told, n_steps=n_steps, every=every, at_start=at_start, at_end=at_end)


@check("evaluation_plan.declared_steps", severity="dashboard", needs=("evaluation_steps",), cases=_runs)
def declared_steps(adapter: Adapter, n_steps: int, every: int, at_start: bool, at_end: bool) -> None:
    """A run evaluates after each multiple of the interval, before the first update and after the last one as configured.

    Silent because a curve that starts after the first interval looks like any other, and the score that all later ones are
    compared with is missing. Look for the option of the first evaluation in a condition that the interval also has to
    meet, and for step counts that start at 0 in one place and at 1 in another.
    """
    steps = [int(step) for step in adapter.evaluation_steps(n_steps, every, at_start, at_end)]
    due = [step for step in range(1, n_steps + 1) if step % every == 0 or (at_end and step == n_steps)]
    told = f"with at_start={at_start} and at_end={at_end}, {n_steps} updates are evaluated elsewhere"
    assert_equal(steps, [0] * at_start + due, told, quantity="steps")
