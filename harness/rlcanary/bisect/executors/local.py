"""Jobs as processes of this machine."""

import contextlib
import subprocess

from rlcanary.bisect.executors.in_order import InOrder
from rlcanary.bisect.executors.job import LOST, Job, State, write_script
from rlcanary.bisect.process import end_session


class LocalExecutor(InOrder):
    """Every job is a process session of its own. Jobs are watched by the process that started them."""

    name = "local"
    slowest_poll = 0.5

    def __init__(self) -> None:
        super().__init__()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, identity: str, job: Job) -> None:
        write_script(job)
        self._processes[identity] = subprocess.Popen(
            [job.script],
            env=dict(job.environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def state(self, identity: str) -> State:
        process = self._processes.get(identity)
        if process is None:
            return State(LOST, True)
        code = process.poll()
        if code is None:
            return State("RUNNING", False)
        end_session(process.pid)  # What the job left behind.
        return State("COMPLETED" if code == 0 else "FAILED", True)

    def end(self, identity: str) -> None:
        process = self._processes[identity]
        end_session(process.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)
