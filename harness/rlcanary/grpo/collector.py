"""Groups from engines as they are completed: prompts under way together, on several replicas, across weight syncs.

All calls belong to one event loop. Rewards are computed in threads, so that a slow verifier does not stop the engines.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any, Literal

from rlcanary.batch import Completion, Group
from rlcanary.contract import Item
from rlcanary.grpo.items import ItemIterator
from rlcanary.grpo.router import LoadAwareRouter, NoReplicas
from rlcanary.reference.rollout import AsyncEngine
from rlcanary.reference.scoring import score

log = logging.getLogger(__name__)
log.addHandler(logging.NullHandler())

Event = Literal["yielded", "failed request", "aborted request", "unscored", "given back"]


class EnginesLost(RuntimeError):
    """Every replica failed so often in a row that it was given up; the last error is the cause."""


class _Failed(Exception):
    """Why a sample came to nothing."""


class Collector:
    """Samples the items of an iterator and rewards them.

    An item whose request fails, or whose completions cannot all be scored, is tried again as the iterator allows. A
    replica that fails several times in a row is given up. What the consumer gets stays in flight in the iterator until the
    consumer says what became of it.

    Attributes:
        counts: how often each event took place.
    """

    def __init__(
        self,
        engines: Sequence[AsyncEngine],
        items: ItemIterator[Item],
        sampling: Mapping[str, Any],
        *,
        slots: int = 8,
        ahead: int | None = None,
        request_timeout_s: float | None = None,
        patience: int = 3,
    ) -> None:
        """Nothing is sampled before somebody asks.

        Args:
            engines: the replicas; each is a `rlcanary.engine.Engine`.
            items: whose epoch was started.
            sampling: the fields of `rlcanary.engine.Sampling`, `n` among them. A seed is that of the run: each request gets
                one of its own, made from it, the epoch, the item and the attempt.
            slots: requests that a replica takes at once.
            ahead: items that are drawn and not yet handed to the consumer; None is as many as there are slots.
            request_timeout_s: a request that takes longer has failed; None waits for ever.
            patience: failures in a row after which a replica is given up.
        """
        self.items = items
        self.counts: Counter[Event] = Counter()
        self._engines = list(engines)
        self._sampling = {"n": 1, **sampling}
        self._router = LoadAwareRouter(len(self._engines), slots)
        self._ahead = slots * len(self._engines) if ahead is None else ahead
        self._request_timeout_s = request_timeout_s
        self._patience = patience
        self._failures_in_a_row: Counter[int] = Counter()
        self._last_error: Exception | None = None
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._requests: set[asyncio.Task[list[Completion]]] = set()
        self._aborted: set[asyncio.Task[list[Completion]]] = set()

    @property
    def is_paused(self) -> bool:
        """Whether requests are held back."""
        return not self._open.is_set()

    def pause(self) -> None:
        """Send no further requests; those under way go on."""
        self._open.clear()

    def resume(self) -> None:
        """Send requests again."""
        self._open.set()

    async def drain(self) -> None:
        """Wait until no request is under way."""
        await self._idle.wait()

    async def abort(self) -> None:
        """End the requests under way and drop what they sampled; once not paused, each is sent again from its prompt."""
        self._aborted |= self._requests
        for request in self._requests:
            request.cancel()
        await self.drain()

    @asynccontextmanager
    async def paused(self, *, abort: bool = False) -> AsyncIterator[None]:
        """No request is under way inside: the place of a weight sync.

        After an exception inside, requests stay held back: engines whose sync failed are not to go on sampling.
        """
        self.pause()
        await (self.abort() if abort else self.drain())
        yield
        self.resume()

    async def groups(
        self, limit: int | None = None, *, yield_completed_trajectories: bool = False
    ) -> AsyncGenerator[Group, None]:
        """Groups as they are completed, until no item is pending; items of other hands are not waited for.

        Every token is tagged with the policy version that sampled it, or, where the engine does not say, with that of the
        moment the request was sent, so that no token looks younger than it is. Close the generator (`aclosing`) if it is
        left early: its items are given back.

        Args:
            limit: number of groups; no further items are drawn.
            yield_completed_trajectories: yield each completion as a group of its own as soon as it is there, instead of
                waiting for the slowest of its prompt. An item that fails for good may have yielded some before.

        Raises:
            EnginesLost: there is no replica left.
        """
        tasks: dict[asyncio.Task[Group], Item] = {}
        dropped: list[asyncio.Task[Group]] = []
        unfinished: Counter[Hashable] = Counter()
        finished = 0
        per_item = self._sampling["n"] if yield_completed_trajectories else 1
        try:
            while True:
                while len(unfinished) < self._ahead and (limit is None or finished + len(unfinished) < limit):
                    item = self.items.next_item()
                    if item is None:
                        break
                    unfinished[item.id] = per_item
                    for index in range(per_item):
                        sample = self._trajectory(item, index) if yield_completed_trajectories else self._group(item)
                        tasks[asyncio.create_task(sample)] = item
                if not tasks and not self._router.alive:
                    raise NoReplicas
                if not tasks:
                    return
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in tasks if task in done]:
                    if task in dropped:
                        continue
                    item = tasks.pop(task)
                    try:
                        group = task.result()
                    except _Failed as failure:
                        self.items.mark_failed(item.id, str(failure), final=yield_completed_trajectories)
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
                    self.counts["yielded"] += 1
                    yield group
        except NoReplicas as error:
            raise EnginesLost(f"no engine is left: {self._last_error!r}") from (self._last_error or error)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, *dropped, return_exceptions=True)
            for id in reversed(unfinished):
                self.items.mark_pending(id)
                self.counts["given back"] += 1

    async def collect(self, count: int) -> list[Group]:
        """The groups of the next `count` items that succeed, in the order in which the items were first drawn.

        Fewer only if no item is pending any more.

        Raises:
            EnginesLost: there is no replica left.
        """
        async with aclosing(self.groups(limit=count)) as stream:
            groups = [group async for group in stream]
        return sorted(groups, key=lambda group: self.items.place(group.item_id))

    async def feed(self, put: Callable[[Group], Awaitable[Any]]) -> None:
        """Hand every group of the epoch to `put`, those of items that come back included, until the epoch is complete.

        Raises:
            EnginesLost: there is no replica left.
        """
        while await self.items.wait_pending():
            async with aclosing(self.groups()) as stream:
                async for group in stream:
                    await put(group)

    async def _group(self, item: Item) -> Group:
        return await self._sample(item, self._sampling["n"], self.items.attempt(item.id), 0)

    async def _trajectory(self, item: Item, index: int) -> Group:
        """One completion of the item. It is tried again on its own, since others of the item may have been yielded."""
        for attempt in range(self.items.retries):
            try:
                return await self._sample(item, 1, attempt, index)
            except _Failed:
                continue
        return await self._sample(item, 1, self.items.retries, index)

    async def _sample(self, item: Item, n: int, attempt: int, index: int) -> Group:
        sampling = {**self._sampling, "n": n}
        if sampling.get("seed") is not None:
            sampling["seed"] = _seed(sampling["seed"], self.items.epoch, item.id, attempt, index)
        version, completions = await self._request(item, sampling)
        texts = [completion.text or "" for completion in completions]
        rewards = (await asyncio.to_thread(score, [item] * n, texts)).tolist()
        if missing := sum(map(math.isnan, rewards)):
            self.counts["unscored"] += 1
            raise _Failed(f"{missing} of {n} completions could not be scored")
        tagged = [_tagged(completion, version) for completion in completions]
        return Group(item.prompt_ids, tagged, rewards, item_id=item.id, policy_version=version)

    async def _request(self, item: Item, sampling: Mapping[str, Any]) -> tuple[int, list[Completion]]:
        """The version at the moment of sending and the completions; a request that was aborted is sent again."""
        while True:
            async with self._router.slot() as slot:
                while not self._open.is_set():
                    await self._open.wait()
                engine = self._engines[slot.replica]
                version = engine.version
                request = asyncio.ensure_future(engine.agenerate(item.prompt_ids, sampling))
                self._requests.add(request)
                self._idle.clear()
                try:
                    async with asyncio.timeout(self._request_timeout_s):
                        completions = await request
                    if not self._open.is_set() and any(
                        completion.finish_reason == "abort" for completion in completions
                    ):
                        self.counts["aborted request"] += 1
                        continue
                    _require_whole(completions, sampling["n"])
                except asyncio.CancelledError:
                    own = asyncio.current_task()
                    if request not in self._aborted or (own and own.cancelling()):
                        raise
                    self.counts["aborted request"] += 1
                    continue
                except Exception as error:
                    log.warning("item %r failed on replica %d", item.id, slot.replica, exc_info=True)
                    self._note_failure(slot.replica, error)
                    raise _Failed(f"replica {slot.replica}: {type(error).__name__}: {error}") from error
                finally:
                    request.cancel()
                    self._requests.discard(request)
                    self._aborted.discard(request)
                    if not self._requests:
                        self._idle.set()
                self._failures_in_a_row[slot.replica] = 0
                return version, completions

    def _note_failure(self, replica: int, error: Exception) -> None:
        self.counts["failed request"] += 1
        self._failures_in_a_row[replica] += 1
        self._last_error = error
        if self._failures_in_a_row[replica] == self._patience:
            log.error("replica %d is given up after %d failures in a row", replica, self._patience)
            self._router.remove(replica)


def _require_whole(completions: Sequence[Completion], n: int) -> None:
    """Nothing is trained on that is not what was asked for: an aborted completion looks like a short one."""
    if len(completions) != n:
        raise ValueError(f"{n} completions were asked for, {len(completions)} came back")
    for completion in completions:
        if completion.finish_reason == "abort" or completion.text is None:
            raise ValueError(f"a completion came back without text or aborted: {completion.finish_reason!r}")


def _tagged(completion: Completion, version: int) -> Completion:
    if completion.token_versions is not None:
        return completion
    return replace(completion, token_versions=[version] * len(completion.token_ids))


def _seed(seed: int, *request: Hashable) -> int:
    """A seed of the request's own: two prompts of a run do not draw the same random numbers, a resumed run draws its own."""
    return int.from_bytes(hashlib.sha256(repr((seed, *request)).encode()).digest()[:4], "big")
