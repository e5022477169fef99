"""Deal out items over epochs and keep the status of each, in an iterator that can be saved and resumed.

All calls belong to one event loop, or to one thread without a loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, Literal, Protocol, TypeVar

from rlcanary.errors import UserError
from rlcanary.reference.data.ordering import data_order

Status = Literal["pending", "in flight", "done", "failed"]
# The ids that an epoch visits, in order; a function of the epoch alone, so that a resumed run visits the same.
Order = Callable[[int], Sequence[Hashable]]


class Identified(Protocol):
    """An item, such as `rlcanary.contract.adapter.Item`."""

    @property
    def id(self) -> Hashable: ...


ItemType = TypeVar("ItemType", bound=Identified)


def shuffled(ids: Sequence[Hashable], seed: int = 0) -> Order:
    """Every id once per epoch, in an order of the epoch's own (`rlcanary.reference.data.ordering.data_order`)."""
    return lambda epoch: [ids[index] for index in data_order(len(ids), epoch, rank=0, world_size=1, seed=seed)]


def fixed(ids: Sequence[Hashable]) -> Order:
    """The same ids in the same order in every epoch; they may be some of the items only."""
    return lambda _: ids


class ItemIterator(Generic[ItemType]):
    """Deals out items epoch by epoch and keeps the status of each.

    An item is pending, in flight from `next_item` until a caller marks it, then done or failed. Every id of
    an epoch ends in one of the two, and nothing else counts: an item that another epoch left pending is no part of this one.
    """

    def __init__(
        self, items: Iterable[ItemType], order: Order | None = None, retries: int = 2, most_in_flight: int | None = None
    ) -> None:
        """Take all items; `start_epoch` comes next.

        Args:
            items: with ids that are there and differ.
            order: the ids that an epoch visits; None visits all as they came.
            retries: times that an item is tried again in an epoch after `mark_failed`.
            most_in_flight: items in flight at once; None is no limit.

        Raises:
            UserError: there is no item, an id is missing, or two items share one: nothing is dropped instead.
        """
        listed = list(items)
        if not listed:
            raise UserError("there are no items to sample from")
        nameless = [index for index, item in enumerate(listed) if item.id is None or item.id == ""]
        if nameless:
            raise UserError(f"items without an id: {_some(nameless)} of {len(listed)}")
        repeated = [id for id, count in Counter(item.id for item in listed).items() if count > 1]
        if repeated:
            raise UserError(f"ids that several items share: {_some(repeated)}")
        self.items = {item.id: item for item in listed}
        self.retries = retries
        self.most_in_flight = most_in_flight
        self.epoch = -1
        self._order = order or fixed(list(self.items))
        self._queue: deque[Hashable] = deque()
        self._statuses: dict[Hashable, Status] = {}
        self._in_flight = 0
        self._places: dict[Hashable, int] = {}
        self._failures: Counter[Hashable] = Counter()
        self._reasons: dict[Hashable, str] = {}
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def is_complete(self) -> bool:
        """True if every item of the epoch is done or failed; false before the first epoch."""
        return self.epoch >= 0 and all(status in ("done", "failed") for status in self._statuses.values())

    def start_epoch(self) -> None:
        """Make the epoch's ids pending.

        Raises:
            RuntimeError: items of the epoch before are in flight, whose fate would be taken for that of the new ones.
            UserError: the order has no ids, repeats one or has one that no item has.
        """
        if "in flight" in self._statuses.values():
            in_flight = [id for id, status in self._statuses.items() if status == "in flight"]
            raise RuntimeError(f"still in flight: {_some(in_flight)}; mark them, or return all with `reclaim`")
        ids = list(self._order(self.epoch + 1))
        unknown = [id for id in ids if id not in self.items]
        if unknown:
            raise UserError(f"the order of epoch {self.epoch + 1} has unknown ids: {_some(unknown)}")
        repeated = [id for id, count in Counter(ids).items() if count > 1]
        if repeated or not ids:
            raise UserError(f"the order of epoch {self.epoch + 1} is empty or repeats ids: {_some(repeated)}")
        self.epoch += 1
        self._queue = deque(ids)
        self._statuses = dict.fromkeys(ids, "pending")
        self._in_flight = 0
        self._places = {id: place for place, id in enumerate(ids)}
        self._failures.clear()
        self._reasons.clear()
        self._wake()

    def next_item(self) -> ItemType | None:
        """Put the next pending item in flight; None if there is none, or no room for it among those in flight.

        Raises:
            RuntimeError: no epoch was started.
        """
        if self.epoch < 0:
            raise RuntimeError("start_epoch comes before the first item")
        if not self._has_next:
            return None
        id = self._queue.popleft()
        self._statuses[id] = "in flight"
        self._in_flight += 1
        return self.items[id]

    async def wait_pending(self) -> bool:
        """Wait until an item is pending and may be in flight -> True, or until the epoch is complete -> False."""
        while not self._has_next:
            if self.is_complete:
                return False
            changed = asyncio.get_running_loop().create_future()
            self._waiting.append(changed)
            await changed
        return True

    def mark_done(self, id: Hashable) -> None:
        """Mark an item in flight as done: it has served its purpose."""
        self._land(id, "done")

    def mark_failed(self, id: Hashable, reason: str, *, final: bool = False) -> bool:
        """Mark an item in flight as failed -> True if it is tried again, first of all; False if final or out of retries."""
        self._require_in_flight(id)
        self._failures[id] += 1
        self._reasons[id] = reason
        if final or self._failures[id] > self.retries:
            self._land(id, "failed")
            return False
        self.mark_pending(id)
        return True

    def mark_pending(self, id: Hashable) -> None:
        """Mark an item in flight as pending, through no fault of its own (stale, aborted): it is next again."""
        self._land(id, "pending")
        self._queue.appendleft(id)

    def reclaim(self) -> list[Hashable]:
        """Return all items in flight, which will be dealt out first and as before -> their ids."""
        in_flight = [id for id, status in self._statuses.items() if status == "in flight"]
        for id in reversed(in_flight):
            self.mark_pending(id)
        return in_flight

    def status(self, id: Hashable) -> Status:
        """Return the item's status in this epoch.

        Raises:
            KeyError: it is not in this epoch.
        """
        if id not in self._statuses:
            raise KeyError(f"item {id!r} is no part of epoch {self.epoch}")
        return self._statuses[id]

    def counts(self) -> dict[Status, int]:
        """Count the items of the epoch by status."""
        counts: dict[Status, int] = {"pending": 0, "in flight": 0, "done": 0, "failed": 0}
        for status in self._statuses.values():
            counts[status] += 1
        return counts

    def place(self, id: Hashable) -> int:
        """Return the item's place in the order of this epoch, from 0.

        Raises:
            KeyError: it is not in this epoch.
        """
        self.status(id)
        return self._places[id]

    def attempt(self, id: Hashable) -> int:
        """Return how often the item has failed in this epoch: 0 while it is tried for the first time."""
        return self._failures[id]

    def failures(self) -> dict[Hashable, str]:
        """Return the items that failed for good in this epoch, each with its last reason."""
        return {id: self._reasons[id] for id, status in self._statuses.items() if status == "failed"}

    def state(self) -> dict[str, Any]:
        """Return the state of the epoch, for a checkpoint; JSON if the ids are. Items in flight will be dealt out again."""
        return {
            "epoch": self.epoch,
            "done": [id for id, status in self._statuses.items() if status == "done"],
            "failed": [[id, reason] for id, reason in self.failures().items()],
            "failures": [[id, count] for id, count in self._failures.items()],
            "next": [id for id, status in self._statuses.items() if status == "in flight"] + list(self._queue),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Resume from the point where `state` was taken, with the same items and the same order.

        Raises:
            UserError: the state does not belong to these items and this order.
        """
        if state["epoch"] < 0:
            return
        done, failed, following = state["done"], dict(state["failed"]), state["next"]
        self._statuses.clear()
        self.epoch = state["epoch"] - 1
        self.start_epoch()
        if sorted(map(repr, [*done, *failed, *following])) != sorted(map(repr, self._statuses)):
            raise UserError(f"the saved state of epoch {self.epoch} belongs to other items or to another order")
        self._statuses |= dict.fromkeys(done, "done") | dict.fromkeys(failed, "failed")
        self._failures = Counter(dict(state["failures"]))
        self._reasons = failed
        self._queue = deque(following)
        self._wake()

    def _require_in_flight(self, id: Hashable) -> None:
        if self.status(id) != "in flight":
            raise ValueError(f"item {id!r} is {self.status(id)}, not in flight: it was marked already")

    @property
    def _has_next(self) -> bool:
        return bool(self._queue) and (self.most_in_flight is None or self._in_flight < self.most_in_flight)

    def _land(self, id: Hashable, status: Status) -> None:
        self._require_in_flight(id)
        self._statuses[id] = status
        self._in_flight -= 1
        self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for changed in waiting:
            if not changed.done():
                changed.set_result(None)


def _some(ids: Sequence[object], most: int = 5) -> str:
    shown = ", ".join(repr(id) for id in ids[:most])
    return f"{shown} and {len(ids) - most} more" if len(ids) > most else shown
