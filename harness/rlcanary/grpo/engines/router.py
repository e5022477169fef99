"""Route each request to the least loaded replica of an engine that has a free slot."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Slot:
    """A place in a replica, held from `acquire_slot` to `release`. No two acquisitions are equal.

    Attributes:
        replica: index of the replica.
        slot: lowest free slot of the replica.
        ticket: number of the acquisition; a slot that was reset or released is known by it.
    """

    replica: int
    slot: int
    ticket: int


class NoReplicas(RuntimeError):
    """Every replica was removed: no request will ever be answered."""


@dataclass
class _Replica:
    free: list[int]
    tickets: set[int] = field(default_factory=set)
    is_removed: bool = False


class LoadAwareRouter:
    """Slots of replicas, handed out to the least loaded replica first, the lowest index among equals.

    Callers wait in line when all slots are taken. Releasing is idempotent: a slot that was released, or handed out before
    a reset, does not free a slot that another caller now holds. Everything happens on one event loop.
    """

    def __init__(self, replicas: int, slots: int) -> None:
        """Start with every slot free.

        Args:
            replicas: number of replicas.
            slots: requests that a replica takes at once.

        Raises:
            ValueError: there is no replica or no slot.
        """
        if replicas < 1 or slots < 1:
            raise ValueError(f"{replicas} replicas with {slots} slots each can take no request")
        self.slots = slots
        self._replicas = [_Replica(list(range(slots))) for _ in range(replicas)]
        self._waiting: deque[asyncio.Future[Slot]] = deque()
        self._next_ticket = 0

    @property
    def loads(self) -> list[int]:
        """Count the requests in progress on each replica."""
        return [len(replica.tickets) for replica in self._replicas]

    @property
    def alive(self) -> list[int]:
        """List the replicas that were not removed."""
        return [index for index, replica in enumerate(self._replicas) if not replica.is_removed]

    async def acquire_slot(self) -> Slot:
        """Acquire a slot on the least loaded replica, first come first served.

        Raises:
            NoReplicas: all replicas were removed, before or while waiting.
        """
        if not self.alive:
            raise NoReplicas("no replica is left")
        slot = None if self._waiting else self._take()
        if slot is not None:
            return slot
        place: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            return await place
        except asyncio.CancelledError:
            # The slot may have been handed over in the very step in which the wait was cancelled.
            if place.done() and not place.cancelled() and place.exception() is None:
                self.release(place.result())
            raise

    def release(self, slot: Slot) -> bool:
        """Free a slot -> true if it was still held; a second release, or one after a reset, does nothing."""
        replica = self._replicas[slot.replica]
        if slot.ticket not in replica.tickets:
            return False
        replica.tickets.remove(slot.ticket)
        replica.free.append(slot.slot)
        replica.free.sort()
        self._hand_out()
        return True

    def reset(self) -> None:
        """Forget all holders; callers that wait in line get the slots."""
        for replica in self._replicas:
            replica.tickets.clear()
            replica.free = list(range(self.slots))
        self._hand_out()

    def remove(self, replica: int) -> None:
        """Stop routing to a replica that died; requests in progress there may still be released."""
        self._replicas[replica].is_removed = True
        if not self.alive:
            while self._waiting:
                place = self._waiting.popleft()
                if not place.done():
                    place.set_exception(NoReplicas(f"replica {replica} was the last one, and it was removed"))

    def _take(self) -> Slot | None:
        free = [index for index in self.alive if self._replicas[index].free]
        if not free:
            return None
        index = min(free, key=lambda index: (len(self._replicas[index].tickets), index))
        replica = self._replicas[index]
        slot = Slot(index, replica.free.pop(0), self._next_ticket)
        replica.tickets.add(slot.ticket)
        self._next_ticket += 1
        return slot

    def _hand_out(self) -> None:
        while self._waiting:
            if self._waiting[0].done():
                self._waiting.popleft()
                continue
            slot = self._take()
            if slot is None:
                return
            self._waiting.popleft().set_result(slot)
