"""The plan of a run: the items of each batch of each rank, its updates, and the length of its learning-rate schedule."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from rlcanary.checks.asserts import assert_equal, assert_true, soft
from rlcanary.checks.case import Case
from rlcanary.checks.check import Cases, check
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.records.building import PlanSettings, RunPlan

EVEN = (PlanSettings(8, 2), PlanSettings(8, 4, epochs=2, ranks=2), PlanSettings(12, 4, epochs=3, ranks=4))
UNEVEN = (
    PlanSettings(7, 2),
    PlanSettings(10, 4, epochs=2, ranks=2),
    PlanSettings(7, 2, epochs=2, drop_last=False),
    PlanSettings(10, 4, epochs=3, ranks=2, drop_last=False),
)


def _cases(*all_settings: PlanSettings) -> Cases:
    return lambda: [Case(_told(settings), settings=settings) for settings in all_settings]


def _told(settings: PlanSettings) -> str:
    per = f"{settings.n_items} items, {settings.prompts_per_batch} per batch"
    rest = "" if settings.drop_last else ", the rest kept"
    return f"{per}, {settings.epochs} epochs, {settings.ranks} ranks{rest}"


def _epochs(plan: RunPlan, settings: PlanSettings) -> list[list[list[int]]]:
    """Return the batches of each epoch, each with the items of all its ranks."""
    whole = [[int(item) for item in chain(*parts)] for parts in zip(*plan.batches, strict=False)]
    size = batches_per_epoch(settings)
    return [whole[start : start + size] for start in range(0, len(whole), size)]


def batches_per_epoch(settings: PlanSettings) -> int:
    whole, rest = divmod(settings.n_items, settings.prompts_per_batch)
    return whole + (rest > 0 and not settings.drop_last)


@check("plan.every_item_once", needs=("run_plan",), cases=_cases(*EVEN, *UNEVEN))
def every_item_once(adapter: Adapter, settings: PlanSettings) -> None:
    """In every epoch the batches of all ranks together have each item once, but for the rest of the last batch.

    Silent because a batch looks like any other: prompts that two ranks share are trained twice, others never. Look at
    how the sampler is told rank and world, at a rank that is counted again in every call, and for a last batch that is
    lost when the iterator is exhausted. At most the rest of a batch is dropped; one that is kept may be filled up.
    """
    plan = adapter.run_plan(settings)
    allowed = settings.n_items % settings.prompts_per_batch
    filled = -settings.n_items % settings.prompts_per_batch
    for epoch, batches in enumerate(_epochs(plan, settings)):
        items = list(chain(*batches))
        left_out = sorted(set(range(settings.n_items)) - set(items))
        repeated, outside = len(items) - len(set(items)), sorted(set(items) - set(range(settings.n_items)))
        told = f"epoch {epoch}: {left_out} are left out, {repeated} repeated, {outside} are no items"
        dropped, again = (allowed, 0) if settings.drop_last else (0, filled)
        with soft():
            assert_true(len(left_out) <= dropped and repeated <= again and not outside, told, quantity="items")


@check("plan.batches", needs=("run_plan",), cases=_cases(*EVEN, *UNEVEN))
def batches(adapter: Adapter, settings: PlanSettings) -> None:
    """A run has as many batches as its epochs give, each of `prompts_per_batch` items, of which all ranks have as many.

    Silent because fewer updates look like faster ones, and a ragged batch has another learning rate per row; a rank with a
    batch less ends early or lets the others wait. Look at whether `drop_last` reaches the sampler, the loader or both, at a
    size that is per rank in one place and over all ranks in another, and for an epoch that is counted short.
    """
    plan = adapter.run_plan(settings)
    counts = [len(of_rank) for of_rank in plan.batches]
    expected = settings.epochs * batches_per_epoch(settings)
    with soft():
        assert_equal(counts, [expected] * settings.ranks, "number of batches by rank", quantity="batches")
    share = settings.prompts_per_batch // settings.ranks
    for epoch in range(settings.epochs):
        for number in range(settings.n_items // settings.prompts_per_batch):
            place = epoch * batches_per_epoch(settings) + number
            sizes = [len(of_rank[place]) for of_rank in plan.batches if place < len(of_rank)]
            with soft():
                assert_true(
                    set(sizes) <= {share}, f"batch {place}: items by rank are {sizes}, not {share}", quantity="size"
                )


def _orders() -> Iterator[Case]:
    for data_order in ("shuffled", "sequential"):
        yield Case(data_order, changes={"data_order": data_order}, settings=PlanSettings(20, 4, epochs=3))


@check("plan.order", needs=("run_plan",), cases=_orders)
def order(adapter: Adapter, settings: PlanSettings) -> None:
    """The batches of a run take its items in the declared order: from first to last, or anew in every epoch.

    Silent because every epoch is whole. Where the sampler is not told the epoch, the same prompts meet in the same batches
    each time; where it shuffles by default, a curriculum is lost. Look for a missing `set_epoch`, and at what the loader is
    given besides its sampler.
    """
    epochs = [[sorted(batch) for batch in batches] for batches in _epochs(adapter.run_plan(settings), settings)]
    items, size = list(range(settings.n_items)), settings.prompts_per_batch
    in_turn = [items[start : start + size] for start in range(0, settings.n_items, size)]
    if adapter.conventions.data_order == "sequential":
        assert_equal(epochs, [in_turn] * settings.epochs, "the batches of each epoch, sorted", quantity="order")
        return
    repeated = [number for number, batches in enumerate(epochs) if batches in [in_turn, *epochs[:number]]]
    told = "epochs that repeat the batches of an earlier one, or take the items from first to last"
    assert_equal(repeated, [], told, quantity="order")


def _updates() -> Iterator[Case]:
    settings = PlanSettings(8, 2, epochs=2)
    yield Case(settings=settings)
    for changes in (
        {"epochs_per_rollout": 3},
        {"mini_batches": 2},
        {"epochs_per_rollout": 2, "mini_batches": 2},
        {"schedule_advances": "rollout", "mini_batches": 2},
        {"schedule_advances": "rollout", "epochs_per_rollout": 2},
    ):
        yield Case(changes, changes={"schedule_advances": "update", **changes}, settings=settings)


@check("plan.updates", needs=("run_plan",), cases=_updates)
def updates(adapter: Adapter, settings: PlanSettings) -> None:
    """A run has as many updates as its batches have passes and mini-batches.

    Silent because everything that is counted in updates follows: schedule, evaluations, checkpoints. Look for a product
    that lacks the passes over a rollout batch or its mini-batches, and for the epochs of the dataset in their place.
    """
    plan = adapter.run_plan(settings)
    per_batch = adapter.conventions.epochs_per_rollout * adapter.conventions.mini_batches
    told = f"updates of {len(plan.batches[0])} batches with {per_batch} updates each"
    assert_equal(plan.updates, len(plan.batches[0]) * per_batch, told, quantity="updates")


@check("plan.schedule_length", needs=("run_plan",), cases=_updates)
def schedule_length(adapter: Adapter, settings: PlanSettings) -> None:
    """The learning-rate schedule is as long as the run, in the steps in which it is advanced.

    Silent because a rate that falls too slowly, or arrives at its end before the run does, is a rate. Look for a length in
    batches where each update advances the schedule, in samples or micro-batches, or of one epoch alone.
    """
    plan = adapter.run_plan(settings)
    per_update = adapter.conventions.schedule_advances == "update"
    expected = plan.updates if per_update else len(plan.batches[0])
    told = f"steps of the schedule of {len(plan.batches[0])} batches and {plan.updates} updates"
    assert_equal(plan.schedule_updates, expected, told, quantity="schedule")


def _limits() -> Iterator[Case]:
    for max_batches in (1, 5, 8):
        yield Case(max_batches, settings=PlanSettings(8, 2, epochs=2, ranks=2), max_batches=max_batches)


@check("plan.limit", needs=("run_plan",), cases=_limits)
def limit(adapter: Adapter, settings: PlanSettings, max_batches: int) -> None:
    """A limit of batches ends the run there, in the middle of an epoch too, and the updates and the schedule with it.

    Silent because the run ends where it was asked to, at a learning rate that is still high: its schedule is that of all
    epochs. Look at which of the two numbers the scheduler is given, and at a limit that is read as one of updates.
    """
    plan = adapter.run_plan(replace(settings, max_batches=max_batches))
    per_batch = adapter.conventions.epochs_per_rollout * adapter.conventions.mini_batches
    for rank, of_rank in enumerate(plan.batches):
        with soft():
            assert_equal(len(of_rank), max_batches, f"batches of rank {rank}", quantity="batches")
    with soft():
        assert_equal(plan.updates, max_batches * per_batch, "updates of a run that is limited", quantity="updates")
    length = max_batches * (per_batch if adapter.conventions.schedule_advances == "update" else 1)
    assert_equal(plan.schedule_updates, length, "steps of the schedule of a run that is limited", quantity="schedule")
