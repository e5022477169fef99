"""The batches and updates of a whole run."""

from rlcanary.contract.conventions import Conventions
from rlcanary.contract.records.building import PlanSettings, RunPlan
from rlcanary.reference.data.ordering import data_order


def run_plan(settings: PlanSettings, conventions: Conventions) -> RunPlan:
    """Deal out each epoch's items in rollout batches, and each batch to the ranks in turn.

    Args:
        settings: all of them are used.
        conventions: `data_order`, and `epochs_per_rollout`, `mini_batches` and `schedule_advances`, which give the updates
            of a batch and the steps of the schedule.

    Raises:
        ValueError: there are no items, or less than one batch of them and `drop_last`.
    """
    whole: list[list[int]] = []
    size = settings.prompts_per_batch
    for epoch in range(settings.epochs):
        order = data_order(settings.n_items, epoch, 0, 1, shuffle=conventions.data_order == "shuffled")
        used = len(order) - len(order) % size if settings.drop_last else len(order)
        whole += [order[start : start + size] for start in range(0, used, size)]
    if not whole:
        raise ValueError(f"{settings.n_items} items are less than one batch of {size}")
    whole = whole[: settings.max_batches]
    updates = len(whole) * conventions.epochs_per_rollout * conventions.mini_batches
    return RunPlan(
        batches=[[batch[rank :: settings.ranks] for batch in whole] for rank in range(settings.ranks)],
        updates=updates,
        schedule_updates=updates if conventions.schedule_advances == "update" else len(whole),
    )
