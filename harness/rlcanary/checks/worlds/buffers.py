"""Groups that wait between sampler and trainer, and histories of a buffer."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Generator

from rlcanary.checks.asserts import assert_equal
from rlcanary.checks.worlds.rows import one_of, whole
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.batch import Completion, Group
from rlcanary.contract.records.buffering import BufferSettings

Step = tuple[str, int]
"""One step of a history: `("put", 3)` puts a group that version 3 sampled, `("take", 4)` takes a batch for a trainer of
version 4, `("save", 0)` saves the buffer and goes on with the one that is loaded."""


def group(number: int, version: int = 0, rewards: Sequence[float] = (1.0, 0.0), item: int | None = None) -> Group:
    """Make a group of two completions, whose first token is its number."""
    completions = [Completion([number], [-0.5]), Completion([number, 2], [-0.5, -0.25])]
    named = f"item {number if item is None else item}"
    return Group([5, 6, 7], completions, list(rewards), item_id=named, policy_version=version)


def numbers(groups: Sequence[Group]) -> list[int]:
    """Return the numbers of groups that `group` made."""
    return [int(each.completions[0].token_ids[0]) for each in groups]


def saved_and_loaded(adapter: Adapter, settings: BufferSettings, buffer: Any) -> Any:
    """Save a buffer and load it."""
    with TemporaryDirectory() as folder:
        adapter.save_buffer(buffer, Path(folder))
        return adapter.load_buffer(settings, Path(folder))


def assert_history(adapter: Adapter, settings: BufferSettings, steps: Sequence[Step]) -> None:
    """Assert of each batch of a history that it is whole, of groups that wait and are fresh, and the next in order.

    Groups have the number of their step, counted from 1. The order is judged by the versions that sampled the groups, where
    they were put in that order: then the first ones are also the oldest. No history fills a buffer in which groups grew too
    old.

    Raises:
        Finding: a batch is another one.
    """
    buffer, order = adapter.new_buffer(settings), adapter.conventions.buffer_order
    put = [version for step, version in steps if step == "put"]
    waiting: dict[int, int] = {}
    for number, (step, version) in enumerate(steps, 1):
        if step == "put":
            adapter.put_groups(buffer, [group(number, version)])
            is_full = len(waiting) == settings.capacity
            if is_full and adapter.conventions.buffer_full == "drop_oldest":
                del waiting[next(iter(waiting))]
            if not is_full or adapter.conventions.buffer_full == "drop_oldest":
                waiting[number] = version
        elif step == "save":
            buffer = saved_and_loaded(adapter, settings, buffer)
        else:
            fresh = {each: age for each, age in waiting.items() if age >= version - settings.max_staleness}
            count = settings.groups_per_batch if len(fresh) >= settings.groups_per_batch else 0
            got = numbers(adapter.take_groups(buffer, version).groups)
            told = (
                f"step {number}, a trainer of version {version} takes a batch while {list(fresh)} wait that are fresh: "
            )
            assert_equal(len(got), count, f"{told}number of groups", quantity="groups")
            wrong = [each for place, each in enumerate(got) if each not in fresh or each in got[:place]]
            told_wrong = f"{told}groups in it that are too old, or were trained before"
            assert_equal(wrong, [], told_wrong, quantity="groups")
            if count and order and put == sorted(put):
                versions = list(fresh.values())
                following = versions[:count] if order == "oldest_first" else versions[-count:]
                told_order = f"{told}versions of the next groups, {order}"
                assert_equal(sorted(fresh[each] for each in got), following, told_order, quantity="order")
            waiting = {each: age for each, age in fresh.items() if each not in got}


def drawn_history(rng: Generator, length: int) -> tuple[BufferSettings, list[Step]]:
    """Draw settings and the first steps of a history; a greater length has further steps behind the same ones.

    Versions move on one at a time, mostly after a batch was taken, and some groups come late.
    """
    settings = BufferSettings(groups_per_batch=whole(rng, 1, 3), max_staleness=whole(rng, 0, 2))
    has_stragglers = one_of(rng, (False, False, True))
    version, sampled, steps = 0, 0, list[Step]()
    for _ in range(length):
        kind, lag = one_of(rng, ("put", "put", "put", "take", "take", "move")), whole(rng, 0, 2)
        if kind == "put":
            age = max(0, version - lag) if has_stragglers else max(sampled, version - lag)
            sampled = max(sampled, age)
            steps.append(("put", age))
        else:
            version += kind == "move" or lag > 0
            steps.append(("take", version))
    return settings, steps
