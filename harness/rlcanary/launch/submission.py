"""The jobs of several scripts: submitted together, one after another per script, and cancelled together."""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from rlcanary.errors import UserError
from rlcanary.jobs.job import LOST, Executor, Job, QueryFailed, Rejected, State
from rlcanary.jobs.outcomes import Reading
from rlcanary.jobs.waiting import SILENCE_SECONDS, JobEnd, NoAnswer, Waiting
from rlcanary.launch.experiment import Experiment
from rlcanary.launch.record import Record
from rlcanary.system.sessions import Stop

CANCEL_ATTEMPTS = 3
ANSWER_SECONDS = 5.0
"""The time limit for an unresponsive scheduler if the launch does not wait for its jobs."""


class Submission:
    def __init__(self, executor: Executor, ids: Mapping[Experiment, Sequence[str]]) -> None:
        """Set up the jobs of some scripts. `ids` holds the jobs that were submitted earlier."""
        self._executor = executor
        self.ids = {experiment: list(own) for experiment, own in ids.items()}
        self._jobs: dict[str, Job] = {}
        self._open: Mapping[str, State] = {}
        for experiment, own in self.ids.items():
            for number, (after, identity) in enumerate(zip([None, *own], own, strict=False), start=1):
                self._jobs[identity] = experiment.job(number, (), {}, after)

    def submit(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Submit the first runs of all scripts, then the second ones, and so on.

        Raises:
            UserError: A job was rejected. The caller has to cancel the others.
        """
        for number in range(1, 1 + max(experiment.configuration.runs for experiment in self.ids)):
            jobs = {
                experiment: experiment.job(number, arguments, environment, own[-1] if own else None)
                for experiment, own in self.ids.items()
                if number <= experiment.configuration.runs
            }
            try:
                self._executor.submit(list(jobs.values()), partial(self._record, jobs))
            except Rejected as error:
                for experiment, job in jobs.items():
                    self.ids[experiment] = [own for own in self.ids[experiment] if self._jobs[own] is not job]
                raise UserError(f"the job was rejected: {error} (EXECUTOR=local runs it on this machine)") from None

    def judge(
        self,
        stop: Stop,
        seen: Callable[[Waiting], None],
        ended: Callable[[str, Job, JobEnd], None],
        wait: bool = True,
    ) -> dict[Experiment, Reading]:
        """Return the verdicts of all scripts, or without `wait` of those whose jobs have ended.

        Raises:
            Stopped: A stop was requested.
            UserError: A job was rejected, or the scheduler does not answer.
        """
        waiting = Waiting(self._executor, self._jobs, SILENCE_SECONDS if wait else ANSWER_SECONDS)
        ends: dict[str, JobEnd] = {}
        try:
            while waiting.open if wait else waiting.undecided:
                for identity, end in waiting.look().items():
                    ends[identity] = end
                    ended(identity, self._jobs[identity], end)
                seen(waiting)
                if waiting.open:
                    waiting.pause(stop)
        except Rejected as error:
            raise UserError(f"the job was rejected: {error}") from None
        except NoAnswer as error:
            raise UserError(f"the scheduler gave {error}; the jobs may still run: {', '.join(waiting.open)}") from None
        self._open = {identity: waiting.states[identity] for identity in waiting.open if identity in waiting.states}
        return {
            experiment: self._read(experiment, [ends[identity] for identity in own])
            for experiment, own in self.ids.items()
            if ends.keys() >= set(own)
        }

    def describe_open(self, experiment: Experiment) -> str:
        """Describe the progress of a script with unfinished jobs."""
        own = self.ids[experiment]
        number, identity = next(
            (number, identity) for number, identity in enumerate(own, start=1) if identity in self._open
        )
        run = f"run {number} of {len(own)}: " if len(own) > 1 else ""
        return f"{run}job {identity} {self._open[identity].name}"

    def withdraw(self) -> None:
        """Cancel all jobs, and delete the folders of scripts without a submitted job.

        Raises:
            UserError: Jobs could not be cancelled.
        """
        self.cancel()
        for experiment, own in self.ids.items():
            if not own:
                shutil.rmtree(experiment.folder)

    def cancel(self) -> None:
        """Cancel all jobs.

        Raises:
            UserError: Jobs could not be cancelled.
        """
        for attempt in range(1, CANCEL_ATTEMPTS + 1):
            try:
                self._executor.cancel(list(self._jobs))
            except QueryFailed as error:
                if attempt == CANCEL_ATTEMPTS:
                    raise UserError(f"jobs could not be cancelled: {error}; they are {', '.join(self._jobs)}") from None
                time.sleep(attempt)
            else:
                return

    def _record(self, jobs: Mapping[Experiment, Job], ids: Sequence[str]) -> None:
        """Record the ids of the first of these jobs in the folders of their scripts."""
        for (experiment, job), identity in zip(jobs.items(), ids, strict=False):
            if identity not in self._jobs:
                self.ids[experiment].append(identity)
                self._jobs[identity] = job
                Record(experiment, self._executor.name, self._executor.address, self.ids[experiment]).write()

    def _read(self, experiment: Experiment, ends: Sequence[JobEnd]) -> Reading:
        reading = experiment.read(ends)
        if all(end.state != LOST for end in ends):  # The fate of a lost job is unknown; a later query may find it.
            experiment.write_verdict(reading)
        return reading
