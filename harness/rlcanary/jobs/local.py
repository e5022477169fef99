"""Run jobs as processes of this machine."""

import contextlib
import subprocess

from rlcanary.jobs.in_order import InOrder
from rlcanary.jobs.job import LOST, Cluster, Job, State, write_script
from rlcanary.system.sessions import end_marked, end_session, is_marked_running

JOB_VARIABLE = "RLCANARY_JOB"
"""The variable that identifies the processes of one job."""


class LocalExecutor(InOrder):
    """Runs each job in its own process session, watched by the process that started it.

    For a job that another process started, only whether it runs is known.
    """

    name = "local"
    slowest_poll = 0.5

    def __init__(self, cluster: Cluster | None = None) -> None:
        super().__init__(cluster)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, identity: str, job: Job) -> None:
        write_script(job)
        self._processes[identity] = subprocess.Popen(
            [job.script],
            env={**job.environment, JOB_VARIABLE: identity},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def state(self, identity: str) -> State:
        process = self._processes.get(identity)
        if process is None:
            return State("RUNNING", False) if is_marked_running({JOB_VARIABLE: identity}) else State(LOST, True)
        code = process.poll()
        if code is None:
            return State("RUNNING", False)
        end_session(process.pid, {JOB_VARIABLE: identity})  # End the processes that the job left behind.
        return State("COMPLETED" if code == 0 else "FAILED", True)

    def end(self, identity: str) -> None:
        process = self._processes.get(identity)
        if process is None:
            end_marked({JOB_VARIABLE: identity})
            return
        end_session(process.pid, {JOB_VARIABLE: identity})
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)
