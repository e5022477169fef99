"""Bring each step's groups to the trainer: sampled on demand, or ahead while it trains."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import torch

from rlcanary.contract.batch import Group
from rlcanary.grpo.plan.schedule import Schedule
from rlcanary.grpo.rollout.buffer import FATES, Account, GroupBuffer, RemoteBuffer, Taken
from rlcanary.grpo.rollout.collector import Collector
from rlcanary.grpo.training.run_log import RunLog
from rlcanary.reference.data.filters import has_signal


class NothingSampled(Exception):
    """A whole epoch of items gave no group to train on."""


class Rollout:
    """Takes groups from the collector through the buffer to the trainer, epoch after epoch, and accounts for them."""

    def __init__(
        self, collector: Collector, buffer: GroupBuffer | RemoteBuffer, schedule: Schedule, log: RunLog
    ) -> None:
        """Take the parts; nothing is sampled before `start` or `groups`.

        Args:
            collector: samples and scores.
            buffer: empty, with room for a step's groups, or for all that are sampled ahead.
            schedule: says how many groups make a step, and whether they are sampled ahead.
            log: the run's log.
        """
        self.buffer = buffer
        self._collector, self._items, self._schedule, self._log = collector, collector.items, schedule, log
        self._given: int | None = None
        self._producer: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to sample ahead, if the schedule says so."""
        if self._schedule.versions_ahead:
            self._producer = asyncio.create_task(self._produce())

    async def groups(self, version: int) -> list[Group]:
        """Return the groups of the next step, from as many epochs as it takes; items of stale ones are sampled again.

        Args:
            version: the policy version that the trainer is at.

        Raises:
            NothingSampled: a whole epoch went by without one group.
            EnginesLost: no engine is left.
            BufferClosed: the buffer's actor is gone.
        """
        groups: list[Group] = []
        while missing := self._schedule.prompts_per_step - len(groups):
            # One by one where they are sampled ahead: the epoch may end before as many are there as are missing.
            count = 1 if self._producer else await self._sample(missing)
            if count:
                taken = await self._take(count, version)
                for group in taken.stale:
                    self._items.mark_pending(group.item_id)
                for group in taken.groups:
                    self._items.mark_done(group.item_id)
                groups += taken.groups
        return groups

    async def report(self, step: int) -> dict[str, float]:
        """Log the ends of groups since the last call -> number of groups by end, and of those that wait."""
        for item_id, failure in self._collector.take_lost():
            await self.buffer.settle(item_id, failure.version, failure.fate)
        records = await self.buffer.drain_records()
        self._log.log_groups(step, records)
        counts = Counter(record.fate for record in records)
        account: Account = await self.buffer.account()
        waiting = account.waiting_by_version
        return {
            **{f"groups/{fate}": counts[fate] for fate in FATES},
            "groups/waiting": account.waiting,
            **({"groups/oldest_waiting_version": min(waiting)} if waiting else {}),
        }

    async def close(self, step: int) -> Account:
        """Stop sampling and log the groups left in the buffer as dropped -> the account of the run's groups.

        Args:
            step: the next one, which is not taken.
        """
        if self._producer:
            self._producer.cancel()
            await asyncio.gather(self._producer, return_exceptions=True)
        await self.buffer.close()
        await self.buffer.reset()
        await self.report(step)
        account: Account = await self.buffer.account()
        return account

    async def _take(self, count: int, version: int) -> Taken:
        taking: asyncio.Future[Taken] = asyncio.ensure_future(self.buffer.take(count, version))
        if self._producer:
            either: set[asyncio.Future[Any]] = {taking, self._producer}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not taking.done():
                taking.cancel()
                self._producer.result()
        return await taking

    async def _sample(self, count: int) -> int:
        """Sample up to `count` groups into the buffer -> how many there are."""
        if self._items.is_complete or self._items.epoch < 0:
            self._start_epoch()
        return sum([await self._put(group) for group in await self._collector.collect(count)])

    async def _produce(self) -> None:
        """Sample without end; an epoch is over when the trainer has taken its last group."""
        while True:
            if self._items.is_complete or self._items.epoch < 0:
                self._start_epoch()
            await self._collector.feed(self._put)

    def _start_epoch(self) -> None:
        if self._given == 0:
            reasons = [f"{id!r}: {reason}" for id, reason in self._items.failures().items()]
            raise NothingSampled(
                f"none of the {len(self._items.items)} items could be sampled and scored to be trained on; "
                + (reasons or ["the rewards of no group differ"])[0]
            )
        self._items.start_epoch()
        self._given = 0

    async def _put(self, group: Group) -> bool:
        """Hand a group to the trainer, or settle it -> true if it was handed over."""
        if self._schedule.dynamic_sampling and not has_signal(torch.tensor(group.rewards)):
            await self.buffer.settle(group.item_id, group.policy_version, "filtered")
            self._items.mark_done(group.item_id)
            return False
        await self.buffer.put(group)
        self._given = (self._given or 0) + 1
        return True
