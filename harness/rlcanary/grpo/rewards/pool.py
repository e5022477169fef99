"""Run a verifier in Ray actors: several calls at once, and a hard limit on the time of each, whatever it does."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlcanary.errors import UserError
from rlcanary.grpo.rewards.verifier import Problem, Score, Verifier, judge


@dataclass(frozen=True)
class Span:
    """The time and place of one call.

    Attributes:
        worker: number of the place in the pool; a worker that was replaced leaves its number to the next.
        began_s: seconds since the epoch.
        seconds: wall time, including the way to the actor and back.
        problem: as in the call's `Score`.
    """

    worker: int
    began_s: float
    seconds: float
    problem: Problem | None


@dataclass
class _Worker:
    number: int
    actor: Any
    is_ready: Any


class VerifierPool:
    """A verifier whose calls run in processes of their own. It may be called from any number of threads.

    A call that takes too long is a timeout, and one whose process dies is a dead worker: neither is a reward of zero. Both
    cost the process, which is replaced by a new one; its start does not count towards a timeout.
    """

    def __init__(
        self,
        factory: Callable[[], Verifier],
        *,
        workers: int = 2,
        timeout_s: float = 10.0,
        warm_up: tuple[str, Any] = ("", ""),
        start_timeout_s: float = 120.0,
    ) -> None:
        """Start all workers and wait for them; Ray has to be connected.

        Args:
            factory: makes the verifier, in the worker.
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
        self._factory, self._warm_up = factory, warm_up
        self._timeout_s, self._start_timeout_s = timeout_s, start_timeout_s
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._is_closed = False
        self._workers = {number: self._start(number) for number in range(workers)}
        # None wakes callers that wait for a worker of a pool that was closed.
        self._free: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()
        for worker in self._workers.values():
            why_not, self.bounds = self._wait_ready(worker)
            if why_not:
                self.close()
                raise UserError(f"the verifier's worker did not start: {why_not}")
        for worker in self._workers.values():
            self._free.put(worker)

    def verify(self, completion: str, target: Any) -> Score:
        """Return the verifier's score, from the next worker that is free.

        Raises:
            UserError: as `Verifier.verify`.
            RuntimeError: the pool is closed.
        """
        worker = self._free.get()
        if worker is None or self._is_closed:
            self._free.put(None)
            raise RuntimeError("the verifier pool is closed")
        try:
            why_not, _ = self._wait_ready(worker)
            if why_not:
                worker = self._replace(worker)
                return Score(None, "worker died", detail=f"it did not start: {why_not}")
            began_s, began = time.time(), time.perf_counter()
            score = self._call(worker, completion, target)
            with self._lock:
                self._spans.append(Span(worker.number, began_s, time.perf_counter() - began, score.problem))
            if score.problem in ("timeout", "worker died"):
                worker = self._replace(worker)
            return score
        finally:
            self._free.put(worker)

    def drain_spans(self) -> list[Span]:
        """Return the spans of the calls that ended since the last call, for the trace of the run."""
        with self._lock:
            spans, self._spans = self._spans, []
        return spans

    def close(self) -> None:
        """End all workers, whatever they are doing."""
        import ray

        with self._lock:
            self._is_closed = True
            for worker in self._workers.values():
                ray.kill(worker.actor)
            self._workers.clear()
        self._free.put(None)

    def _call(self, worker: _Worker, completion: str, target: Any) -> Score:
        import ray

        try:
            score: Score = ray.get(worker.actor.verify.remote(completion, target), timeout=self._timeout_s)
        except ray.exceptions.GetTimeoutError:
            return Score(None, "timeout", detail=f"no score within {self._timeout_s:g} seconds")
        except ray.exceptions.RayActorError as error:
            return Score(None, "worker died", detail=str(error).partition("\n")[0])
        return score

    def _start(self, number: int) -> _Worker:
        import ray

        actor = ray.remote(_Judge).options(num_cpus=0).remote()
        return _Worker(number, actor, actor.get_ready.remote(self._factory, *self._warm_up))

    def _wait_ready(self, worker: _Worker) -> tuple[str, tuple[float, float]]:
        """Wait for a worker -> the reason why it did not start, or "", and the bounds of its verifier."""
        import ray

        try:
            return "", ray.get(worker.is_ready, timeout=self._start_timeout_s)
        except ray.exceptions.GetTimeoutError:
            return f"it took more than {self._start_timeout_s:g} seconds", (0.0, 0.0)
        except ray.exceptions.RayError as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            return lines[-1].strip(), (0.0, 0.0)

    def _replace(self, worker: _Worker) -> _Worker:
        import ray

        with self._lock:
            ray.kill(worker.actor)
            if self._is_closed:
                return worker
            self._workers[worker.number] = self._start(worker.number)
            return self._workers[worker.number]


class _Judge:
    """Runs a verifier in an actor."""

    _verifier: Verifier

    def get_ready(self, factory: Callable[[], Verifier], completion: str, target: Any) -> tuple[float, float]:
        # Not in the constructor: of one that fails Ray sometimes reports only that the process has ended.
        self._verifier = factory()
        judge(self._verifier, completion, target)
        return self._verifier.bounds

    def verify(self, completion: str, target: Any) -> Score:
        return judge(self._verifier, completion, target)
