"""Run calls from many threads together: each caller gives one item and gets its own result back.

A batch runs once it has `min_batch_size` items, or once its first item has waited for `timeout` seconds, so that a lone
caller is never left waiting for company that does not come. A batch that fails fails its own callers only.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class BatchingState:
    """The state of a `Batcher`, for debugging.

    Attributes:
        waiting: items that no batch has taken yet.
        running: items of the batch that is being run.
        batches: number of batches run.
        failed: number of batches that raised.
        oldest_wait: seconds that the first waiting item has waited; 0 without one.
    """

    waiting: int
    running: int
    batches: int
    failed: int
    oldest_wait: float


@dataclass
class _Call(Generic[Item, Result]):
    item: Item
    key: Hashable
    future: Future[Result] = field(default_factory=Future)
    since: float = field(default_factory=time.monotonic)


class Batcher(Generic[Item, Result]):
    """Runs items of concurrent callers in batches, one batch at a time, on a thread that lives while there is work."""

    def __init__(
        self,
        run: Callable[[Sequence[Item]], Sequence[Result]],
        *,
        min_batch_size: int = 1,
        max_batch_size: int | None = None,
        timeout: float = 0.1,
        key: Callable[[Item], Hashable] = lambda _: None,
    ) -> None:
        """Start without work.

        Args:
            run: items -> one result for each, in order.
            min_batch_size: a batch waits for this many items, for at most `timeout` seconds.
            max_batch_size: a batch has at most this many; None takes all that wait.
            timeout: seconds, 0 or more.
            key: only items of equal keys share a batch, such as those with the same sampling parameters.

        Raises:
            ValueError: the sizes or the timeout make no sense.
        """
        if min_batch_size < 1 or (max_batch_size is not None and max_batch_size < min_batch_size):
            raise ValueError(
                f"min_batch_size={min_batch_size} and max_batch_size={max_batch_size}: 1 <= min <= max is needed"
            )
        if not 0 <= timeout < threading.TIMEOUT_MAX:
            raise ValueError(f"timeout={timeout!r} has to be a number of seconds, 0 or more")
        self._run = run
        self._min, self._max, self._timeout, self._key = min_batch_size, max_batch_size, timeout, key
        self._waiting: deque[_Call[Item, Result]] = deque()
        self._running: list[_Call[Item, Result]] = []
        self._batches = self._failed = 0
        self._flush_until = -math.inf
        self._thread: threading.Thread | None = None
        # Guards all of the above; never held while a batch runs.
        self._changed = threading.Condition()

    def submit(self, item: Item) -> Future[Result]:
        """Queue an item -> its future result. Cancelling the future withdraws an item that no batch has taken yet."""
        call: _Call[Item, Result] = _Call(item, self._key(item))
        with self._changed:
            self._waiting.append(call)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="rlcanary-batcher", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return call.future

    def __call__(self, item: Item, timeout: float | None = None) -> Result:
        """Queue one item and wait for its result.

        Args:
            item: an argument of `run`.
            timeout: seconds to wait for the result at most; None waits until the batch has run.

        Raises:
            TimeoutError: the result did not come in time; an item that no batch had taken is withdrawn.
            CancelledError: `cleanup` dropped the item.
            RuntimeError: called from within `run`, which would wait for itself; or `run` gave another number of results.
            Exception: `run` raised it for the batch of this item.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("a batch that waits for a further batch would wait for ever")
        future = self.submit(item)
        try:
            return future.result(timeout)
        finally:
            future.cancel()

    def cleanup(self, *, flush: bool = False) -> None:
        """Wait until the present items, waiting or running, are done; later ones are not. The batcher can be used again.

        Args:
            flush: run what waits, in batches of at most `max_batch_size`, instead of failing it with `CancelledError`.
        """
        with self._changed:
            calls = [*self._waiting, *self._running]
            dropped = [] if flush else list(self._waiting)
            if flush:
                self._flush_until = time.monotonic()
            else:
                self._waiting.clear()
            self._changed.notify_all()
            is_own_batch = threading.current_thread() is self._thread
        for call in dropped:
            if call.future.set_running_or_notify_cancel():
                call.future.set_exception(CancelledError("dropped by cleanup before a batch took it"))
        if not is_own_batch:
            wait([call.future for call in calls])

    def state(self) -> BatchingState:
        """Return the waiting, running and finished work."""
        with self._changed:
            oldest = time.monotonic() - self._waiting[0].since if self._waiting else 0.0
            return BatchingState(len(self._waiting), len(self._running), self._batches, self._failed, oldest)

    def _work(self) -> None:
        """Run batches until nothing waits."""
        while batch := self._next_batch():
            error: BaseException | None = None
            results: Sequence[Any] = ()
            try:
                results = self._run([call.item for call in batch])
                if len(results) != len(batch):
                    raise RuntimeError(f"a batch of {len(batch)} items gave {len(results)} results")
            except BaseException as raised:  # noqa: BLE001 - handed to the callers of this batch
                error = raised
            with self._changed:
                self._running = []
                self._batches += 1
                self._failed += error is not None
            for index, call in enumerate(batch):
                if error is None:
                    call.future.set_result(results[index])
                else:
                    call.future.set_exception(error)

    def _next_batch(self) -> list[_Call[Item, Result]]:
        with self._changed:
            while True:
                self._drop_cancelled()
                if not self._waiting:
                    self._thread = None
                    return []
                alike = [call for call in self._waiting if call.key == self._waiting[0].key]
                since = self._waiting[0].since
                left = since + self._timeout - time.monotonic()
                if len(alike) >= self._min or left <= 0 or since <= self._flush_until:
                    break
                self._changed.wait(left)
            # From here on a caller can no longer withdraw its item.
            batch = [call for call in alike[: self._max] if call.future.set_running_or_notify_cancel()]
            taken = set(map(id, alike[: self._max]))
            self._waiting = deque(call for call in self._waiting if id(call) not in taken)
            self._running = batch
            return batch or self._next_batch()

    def _drop_cancelled(self) -> None:
        # A waiter for a withdrawn item, such as `cleanup`, has to be told that it is over.
        self._waiting = deque(
            call for call in self._waiting if not call.future.cancelled() or call.future.set_running_or_notify_cancel()
        )
