"""Run a verifier in processes of its own: several calls at once, and a hard limit on the time of each, whatever it does."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlcanary.errors import UserError
from rlcanary.grpo.rewards.verifier import Problem, Score
from rlcanary.grpo.rewards.workers import DidNotStart, Factory, RayWorker, Worker


@dataclass(frozen=True)
class Span:
    """The time and place of one call.

    Attributes:
        worker: number of the place in the pool; a worker that was replaced leaves its number to the next.
        began_s: seconds since the epoch.
        seconds: wall time, including the way to the worker and back.
        problem: as in the call's `Score`.
    """

    worker: int
    began_s: float
    seconds: float
    problem: Problem | None


MakeWorker = Callable[[Factory, str, Any], Worker]
"""Starts a worker with a verifier and what it judges first."""


class VerifierPool:
    """A verifier whose calls run in processes of their own. It may be called from any number of threads.

    A call that takes too long is a timeout, and one whose process dies is a dead worker: neither is a reward of zero. Both
    cost the process, which is replaced by a new one; its start does not count towards a timeout.
    """

    def __init__(
        self,
        factory: Factory,
        *,
        make_worker: MakeWorker = RayWorker,
        workers: int = 2,
        timeout_s: float = 10.0,
        warm_up: tuple[str, Any] = ("", ""),
        start_timeout_s: float = 120.0,
    ) -> None:
        """Start all workers and wait for them.

        Args:
            factory: makes the verifier, in the worker.
            make_worker: starts a worker, `RayWorker` or `ChildWorker`.
            workers: calls that run at once.
            timeout_s: limit of one call.
            warm_up: a completion and a target that every new worker judges first, so that modules imported at the first
                call are loaded; the score does not matter.
            start_timeout_s: limit for a worker to start and warm up.

        Raises:
            UserError: a number out of range, or a worker that does not start, with the reason.
        """
        if workers < 1 or timeout_s <= 0:
            raise UserError(f"a verifier pool needs workers and a time limit: workers={workers}, timeout_s={timeout_s}")
        self._factory, self._make_worker, self._warm_up = factory, make_worker, warm_up
        self._timeout_s, self._start_timeout_s = timeout_s, start_timeout_s
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._is_closed = False
        self._workers = [self._start() for _ in range(workers)]
        # The numbers of free workers. None wakes callers that wait for a worker of a pool that was closed.
        self._free: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        try:
            for number, worker in enumerate(self._workers):
                self.bounds = worker.wait_ready(start_timeout_s)
                self._free.put(number)
        except DidNotStart as error:
            self.close()
            raise UserError(f"the verifier's worker did not start: {error}") from error

    def verify(self, completion: str, target: Any) -> Score:
        """Return the verifier's score, from the next worker that is free.

        Raises:
            UserError: as `Verifier.verify`.
            RuntimeError: the pool is closed.
        """
        number = self._free.get()
        if number is None or self._is_closed:
            self._free.put(None)
            raise RuntimeError("the verifier pool is closed")
        try:
            worker = self._workers[number]
            try:
                worker.wait_ready(self._start_timeout_s)
            except DidNotStart as error:
                self._replace(number)
                return Score(None, "worker died", detail=f"it did not start: {error}")
            began_s, began = time.time(), time.perf_counter()
            score = worker.verify(completion, target, self._timeout_s)
            with self._lock:
                self._spans.append(Span(number, began_s, time.perf_counter() - began, score.problem))
            if score.problem in ("timeout", "worker died"):
                self._replace(number)
            return score
        finally:
            self._free.put(number)

    def drain_spans(self) -> list[Span]:
        """Return the spans of the calls that ended since the last call, for the trace of the run."""
        with self._lock:
            spans, self._spans = self._spans, []
        return spans

    def close(self) -> None:
        """End all workers, whatever they are doing."""
        with self._lock:
            was_open, self._is_closed = not self._is_closed, True
            for worker in self._workers if was_open else ():
                worker.kill()
        self._free.put(None)

    def _start(self) -> Worker:
        return self._make_worker(self._factory, *self._warm_up)

    def _replace(self, number: int) -> None:
        with self._lock:
            if not self._is_closed:
                self._workers[number].kill()
                self._workers[number] = self._start()
