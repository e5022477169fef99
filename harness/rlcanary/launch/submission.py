"""Jobs of several scripts: submitted together, those of one script one after another, all cancelled together."""

import time
from collections.abc import Callable, Mapping, Sequence

from rlcanary.bisect.executors.job import Executor, Job, QueryFailed, Rejected
from rlcanary.bisect.executors.waiting import JobEnd, NoAnswer, Waiting
from rlcanary.bisect.outcomes import Reading
from rlcanary.bisect.process import Stop
from rlcanary.errors import UserError
from rlcanary.launch.experiment import Experiment

CANCEL_ATTEMPTS = 3


class Submission:
    def __init__(
        self,
        executor: Executor,
        experiments: Sequence[Experiment],
        arguments: Sequence[str],
        environment: Mapping[str, str],
    ) -> None:
        self._executor = executor
        self._experiments = experiments
        self._arguments = arguments
        self._environment = environment
        self._jobs: dict[str, Job] = {}
        self._ids: list[list[str]] = [[] for _ in experiments]

    @property
    def ids(self) -> dict[Experiment, list[str]]:
        return dict(zip(self._experiments, self._ids, strict=True))

    def submit(self) -> None:
        """The first runs of all scripts, then the second ones. Raises UserError, with what was submitted cancelled."""
        for number in range(1, 1 + max(experiment.configuration.runs for experiment in self._experiments)):
            pairs = [
                (ids, experiment.job(number, self._arguments, self._environment, ids[-1] if ids else None))
                for ids, experiment in zip(self._ids, self._experiments, strict=True)
                if number <= experiment.configuration.runs
            ]
            try:
                new = self._executor.submit([job for _, job in pairs])
            except Rejected as error:
                self.cancel()
                raise UserError(f"the job was rejected: {error}") from None
            for (ids, job), identity in zip(pairs, new, strict=True):
                ids.append(identity)
                self._jobs[identity] = job

    def judge(
        self, stop: Stop, seen: Callable[[Waiting], None], ended: Callable[[str, Job, JobEnd], None]
    ) -> dict[Experiment, Reading]:
        """Wait for all. Raises Stopped and UserError, with what runs cancelled."""
        waiting = Waiting(self._executor, self._jobs)
        ends: dict[str, JobEnd] = {}
        try:
            while waiting.open:
                for identity, end in waiting.look().items():
                    ends[identity] = end
                    ended(identity, self._jobs[identity], end)
                seen(waiting)
                if waiting.open:
                    waiting.pause(stop)
        except Rejected as error:
            raise UserError(f"the job was rejected: {error}") from None
        except NoAnswer as error:
            raise UserError(f"the scheduler gives {error}; the jobs may still run: {', '.join(waiting.open)}") from None
        finally:
            if waiting.open:
                self.cancel()
        return {
            experiment: experiment.read([ends[identity] for identity in ids]) for experiment, ids in self.ids.items()
        }

    def cancel(self) -> None:
        """Raises UserError for jobs that could not be cancelled."""
        for attempt in range(1, CANCEL_ATTEMPTS + 1):
            try:
                self._executor.cancel(list(self._jobs))
            except QueryFailed as error:
                if attempt == CANCEL_ATTEMPTS:
                    raise UserError(f"jobs could not be cancelled: {error}; they are {', '.join(self._jobs)}") from None
                time.sleep(attempt)
            else:
                return
