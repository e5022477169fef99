"""Pool several engines: requests go to the least loaded, wait while weights move, and survive an engine that dies.

All calls belong to one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Literal

from rlcanary.contract.batch import Completion
from rlcanary.grpo.engines.router import LoadAwareRouter, NoReplicas
from rlcanary.reference.rollout import AsyncEngine

log = logging.getLogger(__name__)
log.addHandler(logging.NullHandler())


class EnginesLost(RuntimeError):
    """Every replica died, or failed so often in a row that it was given up; the last error is the cause."""


class EngineDied(RuntimeError):
    """The engine's process is gone; no request to it will ever be answered."""


class RequestRefused(ValueError):
    """An engine cannot take this request, such as one with a prompt that is too long; the engine itself is well."""


class RequestFailed(Exception):
    """A request failed, with the reason; another one may well succeed.

    Attributes:
        version: the policy version that the request went to.
        fate: "failed" without an answer, "unscored" with one.
    """

    def __init__(self, reason: str, version: int, fate: Literal["failed", "unscored"] = "failed") -> None:
        super().__init__(reason)
        self.version = version
        self.fate = fate


class EnginePool:
    """Replicas of an engine behind the `agenerate` of one.

    Every token comes tagged with the policy version that sampled it, or, where the engine does not say, with that of the
    moment the request was sent, so that no token looks younger than it is.

    Attributes:
        counts: number of "failed request" and "aborted request" events.
    """

    def __init__(
        self,
        engines: Sequence[AsyncEngine],
        *,
        slots: int = 8,
        request_timeout_s: float | None = None,
        patience: int = 3,
        counts: Counter[str] | None = None,
    ) -> None:
        """Take the engines; nothing is sent yet.

        Args:
            engines: the replicas; each is a `rlcanary.contract.engine.Engine`.
            slots: requests that a replica takes at once.
            request_timeout_s: a request that takes longer has failed; None waits for ever.
            patience: failures in a row after which a replica is given up; one that died (`EngineDied`) is so at once. All
                that were under way when one failed are one failure with it, and refusals (`RequestRefused`) are none.
            counts: counter to add to; None starts a new one.
        """
        self.counts: Counter[str] = Counter() if counts is None else counts
        self._engines = list(engines)
        self._router = LoadAwareRouter(len(self._engines), slots)
        self._request_timeout_s = request_timeout_s
        self._patience = patience
        self._failures_in_a_row: Counter[int] = Counter()
        self._failures: Counter[int] = Counter()
        self._last_error: Exception | None = None
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._requests: set[asyncio.Task[list[Completion]]] = set()
        self._aborted: set[asyncio.Task[list[Completion]]] = set()

    @property
    def version(self) -> int:
        """Return the oldest policy version among the replicas that are left.

        Raises:
            EnginesLost: none is.
        """
        self.require_alive()
        return min(self._engines[replica].version for replica in self._router.alive)

    @property
    def alive(self) -> list[int]:
        """List the indices of the replicas that are still in use."""
        return self._router.alive

    @property
    def is_paused(self) -> bool:
        """True while requests are held back."""
        return not self._open.is_set()

    def require_alive(self) -> None:
        """Raise unless a replica is left.

        Raises:
            EnginesLost: there is none.
        """
        if not self._router.alive:
            raise EnginesLost(f"no engine is left: {self._last_error!r}") from self._last_error

    def pause(self) -> None:
        """Hold back further requests; those in progress go on."""
        self._open.clear()

    def resume(self) -> None:
        """Send requests again."""
        self._open.set()

    async def drain(self) -> None:
        """Wait until no request is in progress."""
        await self._idle.wait()

    async def abort(self) -> None:
        """End the requests in progress and drop their samples; once not paused, each is sent again from its prompt."""
        self._aborted |= self._requests
        for request in self._requests:
            request.cancel()
        await self.drain()

    @asynccontextmanager
    async def paused(self, *, abort: bool = False) -> AsyncIterator[None]:
        """Hold requests back and wait until none is in progress, for a weight sync.

        After an exception inside, requests stay held back: engines whose sync failed are not to go on sampling.
        """
        self.pause()
        await (self.abort() if abort else self.drain())
        yield
        self.resume()

    async def agenerate(self, prompt: Sequence[int], sampling: Mapping[str, Any]) -> list[Completion]:
        """Sample the completions of one prompt, as `request` does."""
        return (await self.request(prompt, sampling))[1]

    async def request(self, prompt: Sequence[int], sampling: Mapping[str, Any]) -> tuple[int, list[Completion]]:
        """Send a request -> its policy version when sent and its completions; an aborted one is sent again.

        Raises:
            RequestFailed: the engine refused or raised, took too long or gave an answer that does not fit the request.
            EnginesLost: there is no replica left.
        """
        while True:
            try:
                slot = await self._router.acquire_slot()
            except NoReplicas:
                self.require_alive()
                raise
            engine = self._engines[slot.replica]
            version, before = engine.version, 0
            try:
                while not self._open.is_set():
                    await self._open.wait()
                version, before = engine.version, self._failures[slot.replica]
                completions = await self._send(engine, prompt, sampling)
                if completions is None:
                    self.counts["aborted request"] += 1
                    continue
            except RequestRefused as error:
                self.counts["failed request"] += 1
                raise RequestFailed(f"replica {slot.replica} refused it: {error}", version) from error
            except Exception as error:
                log.warning("a request to replica %d failed", slot.replica, exc_info=True)
                self._note_failure(slot.replica, error, before)
                reason = f"replica {slot.replica}: {type(error).__name__}: {error}"
                raise RequestFailed(reason, version) from error
            finally:
                self._router.release(slot)
            self._failures_in_a_row[slot.replica] = 0
            return version, [_tagged(completion, version) for completion in completions]

    async def _send(
        self, engine: AsyncEngine, prompt: Sequence[int], sampling: Mapping[str, Any]
    ) -> list[Completion] | None:
        """Return the engine's answer; None if the request was aborted, by the pool or, while paused, by the engine."""
        request = asyncio.ensure_future(engine.agenerate(prompt, sampling))
        self._requests.add(request)
        self._idle.clear()
        try:
            async with asyncio.timeout(self._request_timeout_s):
                completions = await request
        except asyncio.CancelledError:
            own = asyncio.current_task()
            if request in self._aborted and not (own and own.cancelling()):
                return None
            raise
        finally:
            request.cancel()
            self._requests.discard(request)
            self._aborted.discard(request)
            if not self._requests:
                self._idle.set()
        if self.is_paused and any(completion.finish_reason == "abort" for completion in completions):
            return None
        _require_whole(completions, sampling.get("n", 1))
        return completions

    def _note_failure(self, replica: int, error: Exception, before: int) -> None:
        """Count the failure of a request before which the replica had so many."""
        self.counts["failed request"] += 1
        self._last_error = error
        if self._failures[replica] == before:
            self._failures[replica] += 1
            self._failures_in_a_row[replica] += 1
        if isinstance(error, EngineDied) or self._failures_in_a_row[replica] >= self._patience:
            log.error("replica %d is given up after %d failures in a row", replica, self._failures_in_a_row[replica])
            self._router.remove(replica)


def _require_whole(completions: Sequence[Completion], n: int) -> None:
    """Reject answers that do not fit the request, before training: an aborted completion looks like a short one."""
    if len(completions) != n:
        raise ValueError(f"{n} completions requested, {len(completions)} returned")
    for completion in completions:
        if completion.finish_reason == "abort" or completion.text is None:
            raise ValueError(f"a completion came back without text or aborted: {completion.finish_reason!r}")


def _tagged(completion: Completion, version: int) -> Completion:
    if completion.token_versions is not None:
        return completion
    return replace(completion, token_versions=[version] * len(completion.token_ids))
