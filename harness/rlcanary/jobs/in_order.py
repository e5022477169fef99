"""Base of executors that start jobs themselves, one after another, and enforce time limits themselves."""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from rlcanary.jobs.job import Cluster, Job, Record, Rejected, State, no_record

CANCELLED = State("CANCELLED", True)


class InOrder(ABC):
    """An executor that queues jobs in memory.

    Each query of states starts the jobs that are due, and ends those over their time limit.
    """

    has_containers = False
    outlives = False

    def __init__(self, cluster: Cluster | None = None) -> None:
        self.address = (cluster or Cluster()).address or ""
        self._waiting: dict[str, Job] = {}
        self._seconds: dict[str, float] = {}
        """The time limit of each job, in seconds."""
        self._running_since: dict[str, float] = {}
        self._ended: dict[str, State] = {}
        """The final states of jobs that this object ended."""

    @abstractmethod
    def start(self, identity: str, job: Job) -> None:
        """Start a job.

        Raises:
            Rejected: The job cannot be started.
        """

    @abstractmethod
    def state(self, identity: str) -> State:
        """Return the state of a started job.

        Raises:
            QueryFailed: The scheduler did not answer.
        """

    @abstractmethod
    def end(self, identity: str) -> None:
        """End a started job. A job that has ended is left alone.

        Raises:
            QueryFailed: The scheduler did not answer.
        """

    def submit(self, jobs: Sequence[Job], record: Record = no_record) -> list[str]:
        ids = [f"{job.name}-{secrets.token_hex(4)}" for job in jobs]
        record(ids)
        for identity, job in zip(ids, jobs, strict=True):
            self._waiting[identity] = job
            if job.resources.minutes is not None:
                self._seconds[identity] = job.resources.minutes * 60
        try:
            self._start_ready()
        except Rejected:
            self.cancel(ids)
            raise
        return ids

    def states(self, ids: Sequence[str]) -> Mapping[str, State]:
        self._start_ready()
        return {identity: self._state(identity) for identity in ids}

    def cancel(self, ids: Sequence[str]) -> None:
        for identity in ids:
            if self._state(identity).is_final:
                continue
            if self._waiting.pop(identity, None) is None:
                self.end(identity)
            self._ended[identity] = CANCELLED

    def _start_ready(self) -> None:
        for identity, job in list(self._waiting.items()):
            if job.after is None or self._state(job.after).is_final:
                del self._waiting[identity]
                self._ended[identity] = CANCELLED  # Holds if `start` raises.
                self.start(identity, job)
                del self._ended[identity]

    def _state(self, identity: str) -> State:
        if identity in self._ended:
            return self._ended[identity]
        if identity in self._waiting:
            return State("PENDING", False)
        state = self.state(identity)
        if state.name == "RUNNING" and identity in self._seconds:
            since = self._running_since.setdefault(identity, time.monotonic())
            if time.monotonic() - since > self._seconds[identity]:
                self.end(identity)
                state = self._ended[identity] = State("TIMEOUT", True)
        return state
