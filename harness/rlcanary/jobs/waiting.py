"""Wait for jobs: query less and less often, retry failed queries, and report each end with a reason."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlcanary.jobs.job import LOST, Executor, Job, QueryFailed, Result, State, read_result
from rlcanary.jobs.outcomes import SLURM_STATES
from rlcanary.system.sessions import LOOK_SECONDS, Stop

FIRST_LOOK = 0.2
SLOWER = 1.3
SETTLE_SECONDS = 5.0
"""The longest delay of a result on a shared disk, or of a final state after its result."""
SILENCE_SECONDS = 1800.0
"""The time after which a scheduler that answers no query is given up."""


class NoAnswer(Exception):
    """The scheduler answered no query for longer than the limit of the `Waiting`."""


@dataclass(frozen=True)
class JobEnd:
    """The end of a job. Without a result, the state says why there is none."""

    state: str
    result: Result | None
    broken: str = ""
    """The error in an unreadable result file."""


class Waiting:
    """Polls some jobs of one executor until they have ended."""

    def __init__(self, executor: Executor, jobs: Mapping[str, Job], silence: float = SILENCE_SECONDS) -> None:
        self._executor = executor
        self._open = dict(jobs)
        self._states: dict[str, State] = {}
        self._settling: dict[str, float] = {}
        self._silence = silence
        self._answered = time.monotonic()
        self.interval = FIRST_LOOK
        """Seconds until the next poll."""

    @property
    def states(self) -> Mapping[str, State]:
        """The latest known states."""
        return self._states

    @property
    def open(self) -> Sequence[str]:
        return list(self._open)

    @property
    def undecided(self) -> Sequence[str]:
        """The jobs of `open` that may have ended: their state is still unknown, or their result is late."""
        return [identity for identity in self._asked() if identity not in self._states or identity in self._settling]

    def look(self) -> dict[str, JobEnd]:
        """Poll once and return the jobs that have ended since the last poll.

        Raises:
            NoAnswer: The scheduler has not answered for too long.
        """
        if not self._open:
            return {}
        before = dict(self._states)
        try:
            heard = self._executor.states(self._asked())
        except QueryFailed as error:
            if time.monotonic() - self._answered > self._silence:
                raise NoAnswer(f"no answer for {self._silence:.0f} seconds: {error}") from None
            return {}
        self._answered = time.monotonic()
        self._states.update(heard)
        ended = {identity: end for identity in heard if (end := self._end(identity)) is not None}
        for identity in ended:
            del self._open[identity]
        changed = bool(ended or self._settling) or before != self._states
        self.interval = FIRST_LOOK if changed else min(self.interval * SLOWER, self._executor.slowest_poll)
        return ended

    def pause(self, stop: Stop) -> None:
        """Sleep until the next poll.

        Raises:
            Stopped: A stop was requested.
        """
        until = time.monotonic() + self.interval
        while (left := until - time.monotonic()) > 0:
            stop.check()
            time.sleep(min(left, LOOK_SECONDS))
        stop.check()

    def _asked(self) -> list[str]:
        """List the jobs to poll.

        Executors that start jobs one by one may not know a job that waits for another.
        """
        return [identity for identity, job in self._open.items() if job.after not in self._open]

    def _end(self, identity: str) -> JobEnd | None:
        """Return the end of a job once its scheduler's state and its result file agree. Either may be late."""
        state = self._states[identity]
        broken = ""
        try:
            result = read_result(self._open[identity])
        except ValueError as error:
            result, broken = None, str(error)
        if not state.is_final and result is None and not broken:
            self._settling.pop(identity, None)
            return None
        interrupted = state.is_final and state.name in SLURM_STATES
        agreed = state.is_final and (result is not None or interrupted) and state.name != LOST
        since = self._settling.setdefault(identity, time.monotonic())
        if not agreed and time.monotonic() - since < SETTLE_SECONDS:
            return None
        self._settling.pop(identity, None)
        return JobEnd(state.name, None if interrupted else result, broken)
