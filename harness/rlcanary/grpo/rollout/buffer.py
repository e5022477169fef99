"""Hold sampled groups for the trainer, and record the end of each: in this process, or as a Ray actor."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import astuple, dataclass
from typing import Any, Literal, get_args

from rlcanary.contract.batch import Completion, Group
from rlcanary.reference.data.filters import is_stale

Fate = Literal["used", "stale", "dropped", "filtered", "unscored", "failed"]
FATES: tuple[Fate, ...] = get_args(Fate)
# The fates of groups that are not put: they were judged before.
OUTSIDE: tuple[Fate, ...] = ("filtered", "unscored", "failed")


class BufferClosed(RuntimeError):
    """The buffer was closed: groups are neither put nor taken any more."""


@dataclass(frozen=True)
class FateRecord:
    """The end of one group.

    Attributes:
        number: unique number of the group, in the order in which groups were put or settled.
        item_id: the item that it came from.
        version: the policy version that sampled it.
        fate: "used" for training; "stale" when its turn came; "dropped" by a reset; the others never entered.
    """

    number: int
    item_id: Hashable
    version: int
    fate: Fate


@dataclass(frozen=True)
class Account:
    """The account of all groups: `entered` is always the sum of `fates` and `waiting`.

    Attributes:
        entered: groups that were put, or settled without being put.
        waiting: groups in the buffer.
        waiting_by_version: the same for each policy version that sampled.
        fates: number of groups by end.
        by_version: the same for each policy version that sampled.
    """

    entered: int
    waiting: int
    waiting_by_version: dict[int, int]
    fates: dict[Fate, int]
    by_version: dict[int, dict[Fate, int]]


@dataclass(frozen=True)
class Taken:
    """The result of `take`.

    Attributes:
        groups: to train on, oldest first; the full count, or none because some grew stale.
        stale: groups that were evicted on the way; their items should be sampled again.
    """

    groups: list[Group]
    stale: list[Group]


@dataclass(eq=False)
class _Entry:
    number: int
    group: Group
    ages: Group


class GroupBuffer:
    """A first-in first-out buffer. Stale groups are evicted when their turn comes, and every group has one fate.

    All methods belong to one event loop: that of the process, or of the actor that `start_buffer` makes.
    """

    def __init__(self, capacity: int, max_staleness: int, state: Mapping[str, Any] | None = None) -> None:
        """Start empty.

        Args:
            capacity: groups that it holds; `put` waits while it is full.
            max_staleness: policy versions that a token may be older than the trainer (`is_stale`).
            state: the account of an earlier buffer, see `state`, to continue. Groups that waited there are dropped.

        Raises:
            ValueError: a number out of range.
        """
        if capacity < 1 or max_staleness < 0:
            raise ValueError(f"capacity={capacity}, max_staleness={max_staleness}: out of range")
        self.capacity = capacity
        self.max_staleness = max_staleness
        self._entries: deque[_Entry] = deque()
        self._changed = asyncio.Condition()
        self._is_closed = False
        self._entered = 0
        self._stale: list[Group] = []
        self._records: list[FateRecord] = []
        self._by_version: dict[int, Counter[Fate]] = {}
        if state:
            self._entered = state["entered"]
            for version, fate, count in state["fates"]:
                self._by_version.setdefault(version, Counter())[fate] = count
            self._records = [FateRecord(*record) for record in state["records"]]
            for number, item_id, version in state["waiting"]:
                self._record(FateRecord(number, item_id, version, "dropped"))

    async def put(self, group: Group) -> None:
        """Add a group, as soon as there is room.

        Raises:
            BufferClosed: before or while waiting; the group is in no account.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._is_closed or len(self._entries) < self.capacity)
            self._require_open()
            self._entries.append(_Entry(self._entered, group, _ages(group)))
            self._entered += 1
            self._changed.notify_all()

    async def take(self, count: int, trainer_version: int, timeout_s: float | None = None) -> Taken:
        """Take the next `count` groups that are fresh enough, as soon as there are so many.

        It does not wait once a group grew stale: the missing one may be that of an item which is sampled again only when
        the caller learns of it.

        Args:
            count: groups, at most the capacity.
            trainer_version: version of the trainer, by which groups are stale or fresh.
            timeout_s: None waits for ever.

        Raises:
            ValueError: `count` exceeds the capacity, or a group is newer than the trainer, which stays in the buffer.
            TimeoutError: there were not so many in time.
            BufferClosed: before or while waiting.
        """
        if not 1 <= count <= self.capacity:
            raise ValueError(f"{count} groups of a buffer that holds {self.capacity}")
        async with self._changed:

            def is_ready() -> bool:
                self._evict(trainer_version)
                return self._is_closed or bool(self._stale) or len(self._entries) >= count

            async with asyncio.timeout(timeout_s):
                await self._changed.wait_for(is_ready)
            self._require_open()
            entries = [self._entries.popleft() for _ in range(count)] if len(self._entries) >= count else []
            for entry in entries:
                self._settle(entry, "used")
            stale, self._stale = self._stale, []
            self._changed.notify_all()
            return Taken([entry.group for entry in entries], stale)

    async def settle(self, item_id: Hashable, version: int, fate: Fate) -> None:
        """Record a group that is not put, such as one without signal.

        Raises:
            ValueError: the fate is one that the buffer itself gives.
        """
        if fate not in OUTSIDE:
            raise ValueError(f"fate {fate!r} is not one of {', '.join(OUTSIDE)}")
        self._record(FateRecord(self._entered, item_id, version, fate))
        self._entered += 1

    async def reset(self) -> list[Group]:
        """Drop everything -> the groups that were not taken, whose items should be sampled again."""
        async with self._changed:
            for entry in self._entries:
                self._settle(entry, "dropped")
            returned, self._stale = [*self._stale, *(entry.group for entry in self._entries)], []
            self._entries.clear()
            self._changed.notify_all()
            return returned

    async def close(self) -> None:
        """Wake all waiting calls with an error; groups in the buffer stay accounted for as waiting."""
        async with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    async def account(self) -> Account:
        """Return the account of all groups."""
        fates: Counter[Fate] = sum(self._by_version.values(), Counter())
        return Account(
            entered=self._entered,
            waiting=len(self._entries),
            waiting_by_version=dict(sorted(Counter(entry.group.policy_version for entry in self._entries).items())),
            fates={fate: fates[fate] for fate in FATES},
            by_version={version: dict(counts) for version, counts in sorted(self._by_version.items())},
        )

    async def drain_records(self) -> list[FateRecord]:
        """Return the ends of groups since the last call, for the run log."""
        records, self._records = self._records, []
        return records

    async def state(self) -> dict[str, Any]:
        """Return the account, with the records not drained yet, for a checkpoint; JSON if the ids are."""
        counts = sorted(self._by_version.items())
        return {
            "entered": self._entered,
            "fates": [[version, fate, count] for version, fates in counts for fate, count in fates.items()],
            "records": [list(astuple(record)) for record in self._records],
            "waiting": [[entry.number, entry.group.item_id, entry.group.policy_version] for entry in self._entries],
        }

    def _evict(self, trainer_version: int) -> None:
        stale = [entry for entry in self._entries if is_stale(entry.ages, trainer_version, self.max_staleness)]
        for entry in stale:
            self._entries.remove(entry)
            self._settle(entry, "stale")
            self._stale.append(entry.group)
        if stale:
            self._changed.notify_all()

    def _settle(self, entry: _Entry, fate: Fate) -> None:
        self._record(FateRecord(entry.number, entry.group.item_id, entry.group.policy_version, fate))

    def _record(self, record: FateRecord) -> None:
        self._records.append(record)
        self._by_version.setdefault(record.version, Counter())[record.fate] += 1

    def _require_open(self) -> None:
        if self._is_closed:
            raise BufferClosed("the buffer was closed")


def _ages(group: Group) -> Group:
    """Reduce a group to its ages: as stale as the group at any time, without a look at each of its tokens."""
    versions = [
        version for completion in group.completions for version in completion.token_versions or (group.policy_version,)
    ]
    extremes = Completion((), token_versions=(min(versions), max(versions)))
    return Group((), [extremes], (), policy_version=group.policy_version)


class RemoteBuffer:
    """A `GroupBuffer` in an actor, with the same methods."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        """Look up a method of the buffer.

        Raises:
            BufferClosed: the actor is gone. The method's own errors are raised, too.
        """

        async def ask(*arguments: Any) -> Any:
            import ray

            try:
                return await getattr(self.actor, method).remote(*arguments)
            except ray.exceptions.RayActorError as error:
                reason = str(error).partition("\n")[0]
                raise BufferClosed(f"the buffer's actor is gone: {reason}") from error

        return ask


def start_buffer(
    capacity: int,
    max_staleness: int,
    state: Mapping[str, Any] | None = None,
    *,
    name: str | None = None,
) -> Any:
    """Start a `GroupBuffer` as a Ray actor -> its handle.

    It takes no CPU. Ray starts the calls of an asyncio actor in any order: to keep groups in order, wait for each put. The
    actor ends with `ray.kill`, or with the process that started it.

    Raises:
        ValueError: as `GroupBuffer`.
    """
    import ray

    GroupBuffer(capacity, max_staleness, state)  # refuses here arguments that would only kill the actor
    actor = ray.remote(GroupBuffer).options(num_cpus=0, name=name)
    return actor.remote(capacity, max_staleness, state)
