"""Run a probe's command as a job of an executor, with the signature of `sessions.run`."""

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rlcanary.jobs.job import Executor, Job, QueryFailed, Rejected
from rlcanary.jobs.waiting import JobEnd, NoAnswer, Waiting
from rlcanary.system.ending import Ending
from rlcanary.system.sessions import Call, Stop


class RemoteRun:
    """Submits one job per call. Several threads may call it at once: each call makes its own executor."""

    def __init__(self, make_executor: Callable[[], Executor], name: str) -> None:
        self._make_executor = make_executor
        self._name = name

    def __call__(self, call: Call, stop: Stop) -> Ending:
        """Run a command as a job. It is cancelled if it is still open at the end.

        The timeout counts from the start of the job. Time in the queue does not count.

        Raises:
            Stopped: The search was asked to stop.
        """
        folder = call.output.with_suffix(".job")
        job = Job(self._name, call.command, call.directory, folder, call.output, {**call.environment, **call.mark})
        executor = self._make_executor()
        began = time.monotonic()
        try:
            (identity,) = executor.submit([job], partial(_record, folder))
        except Rejected as error:
            return Ending(0, 0.0, state="REJECTED", why=str(error))
        waiting = Waiting(executor, {identity: job})
        try:
            end = self._wait(waiting, identity, call.timeout, stop)
        except (NoAnswer, Rejected) as error:
            return Ending(0, time.monotonic() - began, state="UNKNOWN", why=str(error))
        finally:
            if waiting.open:
                _cancel(executor, identity)
        seconds = time.monotonic() - began
        if end is None:
            return Ending(0, seconds, timed_out=True)
        if end.result is None:
            return Ending(0, seconds, state=end.state, why=end.broken or "no result file")
        return Ending(end.result.exit_code, end.result.seconds)

    def _wait(self, waiting: Waiting, identity: str, timeout: float | None, stop: Stop) -> JobEnd | None:
        """Wait for the job to end. Returns None after the timeout."""
        started: float | None = None
        while True:
            ends = waiting.look()
            if identity in ends:
                return ends[identity]
            state = waiting.states.get(identity)
            if started is None and state is not None and state.has_started:
                started = time.monotonic()
            if timeout is not None and started is not None and time.monotonic() - started > timeout:
                return None
            waiting.pause(stop)

    def cancel_left(self, outputs: Path) -> None:
        """Cancel the jobs that a killed search left in this folder."""
        for file in outputs.glob("*.job/id"):
            if not (file.parent / "result.json").exists():
                _cancel(self._make_executor(), file.read_text(encoding="utf-8").strip())


def _record(folder: Path, ids: Sequence[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "id").write_text(f"{ids[0]}\n", encoding="utf-8")


def _cancel(executor: Executor, identity: str) -> None:
    # A job that cannot be cancelled now ends by its own time limit; its result is not used.
    with contextlib.suppress(QueryFailed):
        executor.cancel([identity])
