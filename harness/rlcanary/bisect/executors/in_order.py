"""Executors whose jobs we start ourselves, each when the one before it has ended."""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from rlcanary.bisect.executors.job import Job, Rejected, State


class InOrder(ABC):
    """Jobs that wait for others wait in this object, and are started when states are asked for."""

    def __init__(self) -> None:
        self._waiting: dict[str, Job] = {}
        self._cancelled: set[str] = set()

    @abstractmethod
    def start(self, identity: str, job: Job) -> None:
        """Raises Rejected."""

    @abstractmethod
    def state(self, identity: str) -> State:
        """Of a job that was started. Raises QueryFailed."""

    @abstractmethod
    def end(self, identity: str) -> None:
        """End a job that was started; nothing happens to one that has ended. Raises QueryFailed."""

    def submit(self, jobs: Sequence[Job]) -> list[str]:
        ids = [f"{job.name}-{secrets.token_hex(4)}" for job in jobs]
        self._waiting.update(zip(ids, jobs, strict=True))
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
            self._cancelled.add(identity)

    def _start_ready(self) -> None:
        for identity, job in list(self._waiting.items()):
            if job.after is None or self._state(job.after).is_final:
                del self._waiting[identity]
                self._cancelled.add(identity)  # Unless it starts.
                self.start(identity, job)
                self._cancelled.remove(identity)

    def _state(self, identity: str) -> State:
        if identity in self._cancelled:
            return State("CANCELLED", True)
        return State("PENDING", False) if identity in self._waiting else self.state(identity)
