"""Collect groups and single completions as they are completed, from several engines and across weight syncs.

All calls belong to one event loop. Rewards are computed in threads, so that a slow verifier does not stop the engines.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, TypeVar

from rlcanary.contract.adapter import Item
from rlcanary.contract.batch import Group
from rlcanary.grpo.data.items import ItemIterator, ItemType
from rlcanary.grpo.engines.engine_pool import EnginePool, RequestFailed
from rlcanary.grpo.rollout.group_assembler import GroupAssembler, Trajectory
from rlcanary.reference.data.scoring import score
from rlcanary.reference.rollout import AsyncEngine

Sample = TypeVar("Sample")
# The id of an item, and the fate of a group of it.
Lost = tuple[Hashable, RequestFailed]


class Collector:
    """Samples the items of an iterator and rewards them.

    An item whose request fails, or whose completions cannot all be scored, is tried again as the iterator allows. Items
    handed to the consumer stay in flight in the iterator until the consumer marks them.

    Attributes:
        items: the iterator.
        pool: the engines.
        counts: number of "yielded", "failed request", "aborted request", "unscored" and "given back" events.
        lost: the groups that failed, each with the id of its item, until `take_lost`.
    """

    def __init__(
        self,
        engines: Sequence[AsyncEngine] | EnginePool,
        items: ItemIterator[Any],
        sampling: Mapping[str, Any],
        *,
        slots: int = 8,
        ahead: int | None = None,
        request_timeout_s: float | None = None,
        patience: int = 3,
        one_by_one: bool = False,
    ) -> None:
        """Take the parts; nothing is sampled before a method is called.

        Args:
            engines: the engine's replicas, see `EnginePool`; or the pool of another collector, whose settings stay.
            items: an iterator whose epoch was started.
            sampling: the fields of `rlcanary.contract.sampling.Sampling`, `n` among them. A seed is that of the run: each
                request gets one of its own, made from it, the epoch, the item and the attempt.
            slots: requests that a replica takes at once.
            ahead: items that are drawn and not yet handed to the consumer; None is as many as there are slots.
            request_timeout_s: a request that takes longer has failed; None waits for ever.
            patience: failures in a row after which a replica is given up.
            one_by_one: `collect` and `feed` request each completion alone and assemble the groups, rows in order.
        """
        self.items = items
        self.lost: list[Lost] = []
        if not isinstance(engines, EnginePool):
            engines = EnginePool(engines, slots=slots, request_timeout_s=request_timeout_s, patience=patience)
        self.pool, self.counts = engines, engines.counts
        self._sampling = {"n": 1, **sampling}
        self._ahead = slots * len(self.pool.alive) if ahead is None else ahead
        self._one_by_one = one_by_one

    def paused(self, *, abort: bool = False) -> AbstractAsyncContextManager[None]:
        """Hold requests back as `EnginePool.paused` does, for a weight sync."""
        return self.pool.paused(abort=abort)

    def groups(
        self, limit: int | None = None, *, yield_completed_trajectories: bool = False
    ) -> AsyncGenerator[Group, None]:
        """Yield groups as they are completed, see `as_completed`; every token is tagged with its policy version.

        Args:
            limit: number of items that give groups; no further ones are drawn.
            yield_completed_trajectories: yield each completion as a group of its own as soon as it is there, instead of
                waiting for the slowest of its prompt.
        """
        return as_completed(
            self.items,
            self._trajectory if yield_completed_trajectories else self._group,
            self.pool,
            per_item=self._sampling["n"] if yield_completed_trajectories else 1,
            is_final=yield_completed_trajectories,
            ahead=self._ahead,
            limit=limit,
            lost=self.lost,
        )

    def take_lost(self) -> list[Lost]:
        """Return and clear `lost`."""
        lost, self.lost[:] = list(self.lost), []
        return lost

    async def collect(self, count: int) -> list[Group]:
        """Return the groups of the next `count` items that succeed, in the order of the epoch.

        There are fewer only if no item is pending any more.

        Raises:
            EnginesLost: there is no replica left.
        """
        async with aclosing(self._whole_groups(count)) as stream:
            groups = [group async for group in stream]
        return sorted(groups, key=lambda group: self.items.place(group.item_id))

    async def feed(self, put: Callable[[Group], Awaitable[Any]]) -> None:
        """Hand every group of the epoch to `put`, those of items that come back included, until the epoch is complete.

        Raises:
            EnginesLost: there is no replica left.
        """
        while await self.items.wait_pending():
            async with aclosing(self._whole_groups()) as stream:
                async for group in stream:
                    await put(group)

    def _whole_groups(self, limit: int | None = None) -> AsyncGenerator[Group, None]:
        return self._assembled(limit) if self._one_by_one else self.groups(limit)

    async def _assembled(self, limit: int | None) -> AsyncGenerator[Group, None]:
        async def placed(item: Item, index: int) -> tuple[Hashable, int, Group]:
            return item.id, index, await self._trajectory(item, index)

        n = self._sampling["n"]
        settings: dict[str, Any] = {"ahead": self._ahead, "limit": limit, "lost": self.lost}
        stream = as_completed(self.items, placed, self.pool, per_item=n, is_final=True, **settings)
        async with aclosing(in_full(stream, n)) as groups:
            async for of_item in groups:
                assembler = GroupAssembler(n)
                assembled = [assembler.add(Trajectory.of(each, self.items.epoch)) for each in of_item][-1]
                assert assembled is not None
                yield assembled

    async def _group(self, item: Item, index: int) -> Group:
        return await self._sample(item, self._sampling["n"], self.items.attempt(item.id), index)

    async def _trajectory(self, item: Item, index: int) -> Group:
        return await retried(self.items.retries, lambda attempt: self._sample(item, 1, attempt, index))

    async def _sample(self, item: Item, n: int, attempt: int, index: int) -> Group:
        sampling = seeded({**self._sampling, "n": n}, self.items.epoch, item.id, attempt, index)
        version, completions = await self.pool.request(item.prompt_ids, sampling)
        texts = [completion.text or "" for completion in completions]
        rewards = (await asyncio.to_thread(score, [item] * n, texts)).tolist()
        if missing := sum(map(math.isnan, rewards)):
            self.counts["unscored"] += 1
            raise RequestFailed(f"{missing} of {n} completions could not be scored", version, "unscored")
        return Group(item.prompt_ids, completions, rewards, item_id=item.id, policy_version=version)


async def as_completed(
    items: ItemIterator[ItemType],
    sample: Callable[[ItemType, int], Awaitable[Sample]],
    pool: EnginePool,
    *,
    per_item: int,
    is_final: bool,
    ahead: int,
    limit: int | None = None,
    lost: list[Lost] | None = None,
) -> AsyncGenerator[Sample, None]:
    """Yield samples of items as they are completed, until no item is pending; items in other hands are not waited for.

    Close the generator (`aclosing`) if it is left early: samples not handed over go back to the iterator.

    Args:
        items: an iterator whose epoch was started.
        sample: makes the sample of this index of an item; `RequestFailed` is told to the iterator.
        pool: the engines that `sample` uses.
        per_item: samples of each item.
        is_final: `sample` has tried as often as the iterator says. With several samples per item it has to, since the
            consumer may have others of the item.
        ahead: items under way at once.
        limit: number of items that do not fail; no further ones are drawn.
        lost: list that failed groups are added to.

    Raises:
        EnginesLost: there is no replica left.
    """
    tasks: dict[asyncio.Task[Sample], ItemType] = {}
    dropped: list[asyncio.Task[Sample]] = []
    unfinished: Counter[Hashable] = Counter()
    finished = 0
    next_pending: asyncio.Task[bool] | None = None
    try:
        while True:
            awaited: set[asyncio.Task[Any]] = set()
            while len(unfinished) < ahead and (limit is None or finished + len(unfinished) < limit):
                item = items.next_item()
                if item is None:
                    next_pending = next_pending or asyncio.create_task(items.wait_pending())
                    awaited = {next_pending}
                    break
                unfinished[item.id] = per_item
                for index in range(per_item):
                    tasks[asyncio.ensure_future(sample(item, index))] = item
            if not tasks:
                pool.require_alive()
                return
            done, _ = await asyncio.wait(awaited | tasks.keys(), return_when=asyncio.FIRST_COMPLETED)
            if next_pending in done:
                next_pending = None
            for task in [task for task in tasks if task in done]:
                if task in dropped:
                    continue
                item = tasks.pop(task)
                try:
                    completed = task.result()
                except RequestFailed as failure:
                    items.mark_failed(item.id, str(failure), final=is_final)
                    if lost is not None:
                        lost.append((item.id, failure))
                    del unfinished[item.id]
                    for other in [other for other, of in tasks.items() if of is item]:
                        other.cancel()
                        dropped.append(other)
                        del tasks[other]
                    continue
                unfinished[item.id] -= 1
                if not unfinished[item.id]:
                    del unfinished[item.id]
                    finished += 1
                pool.counts["yielded"] += 1
                yield completed
    finally:
        if next_pending:
            next_pending.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *dropped, return_exceptions=True)
        for id in reversed(unfinished):
            items.mark_pending(id)
            pool.counts["given back"] += 1


async def in_full(
    stream: AsyncGenerator[tuple[Hashable, int, Sample], None], n: int
) -> AsyncGenerator[list[Sample], None]:
    """Yield the n samples of an item together and in order, once the last of them is there.

    Args:
        stream: the item's id, the index and the sample.
        n: samples of each item.
    """
    waiting: dict[Hashable, dict[int, Sample]] = {}
    async with aclosing(stream):
        async for id, index, sample in stream:
            waiting.setdefault(id, {})[index] = sample
            if len(waiting[id]) == n:
                of_item = waiting.pop(id)
                yield [of_item[place] for place in range(n)]


async def retried(retries: int, sample: Callable[[int], Awaitable[Sample]]) -> Sample:
    """Return the first sample that succeeds, by the number of its attempt.

    Raises:
        RequestFailed: the last attempt failed.
    """
    for attempt in range(retries):
        try:
            return await sample(attempt)
        except RequestFailed:
            continue
    return await sample(retries)


def seeded(sampling: Mapping[str, Any], *request: Hashable) -> dict[str, Any]:
    """Return the sampling with a seed of the request's own, if it has a seed at all.

    Two prompts of a run do not draw the same random numbers, and a run that is resumed draws those that it would have.
    """
    if sampling.get("seed") is None:
        return dict(sampling)
    digest = hashlib.sha256(repr((sampling["seed"], *request)).encode()).digest()
    return {**sampling, "seed": int.from_bytes(digest[:4], "big")}
