"""What an executor is: it submits jobs, tells their states and cancels them. What a job found is in its result file."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rlcanary.system.files import write_whole

LOST = "LOST"
"""The state of a job that its scheduler no longer knows."""


class Rejected(Exception):
    """The scheduler does not take the job: a quota, an account, a wrong option. Trying again would not help."""


class QueryFailed(Exception):
    """The scheduler did not answer. It says nothing about any job."""


@dataclass(frozen=True)
class Resources:
    nodes: int = 1
    gpus_per_node: int = 0
    minutes: int | None = None
    """Longest run; None leaves it to the scheduler."""


@dataclass(frozen=True)
class Job:
    """A command, and the folder that holds its script, its result and what its scheduler prints.

    What the command may write outside of its directory lies beside the folder: in a container both are mounted.
    The folder, the directory and the output file have to be on a disk that the machine which runs the job sees as well.
    """

    name: str
    command: Sequence[str]
    directory: Path
    folder: Path
    output: Path
    environment: Mapping[str, str]
    """The whole environment."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of this job alone, on top of `environment`, which the jobs of a batch share."""
    resources: Resources = field(default_factory=Resources)
    after: str | None = None
    """The id of a job that must have ended, however it ended, before this one starts."""

    @property
    def script(self) -> Path:
        return self.folder / "job.sh"

    @property
    def result(self) -> Path:
        return self.folder / "result.json"


@dataclass(frozen=True)
class State:
    name: str
    """In Slurm's words: PENDING, RUNNING, COMPLETED, FAILED, PREEMPTED, …; LOST."""
    is_final: bool

    @property
    def has_started(self) -> bool:
        return self.is_final or self.name not in ("PENDING", "CONFIGURING")


@dataclass(frozen=True)
class Result:
    """The file that a job writes last. Without it there is no verdict."""

    exit_code: int
    seconds: float
    host: str


class Executor(Protocol):
    name: str
    address: str
    """Of the cluster; empty where the machine knows it."""
    slowest_poll: float
    """The longest time in seconds between two looks at a job."""

    def submit(self, jobs: Sequence[Job]) -> list[str]:
        """Start the jobs, as one batch where that is possible; returns their ids.

        Raises Rejected, with all of them cancelled.
        """
        ...

    def states(self, ids: Sequence[str]) -> Mapping[str, State]:
        """The state of each job. Raises QueryFailed, and Rejected for a job whose turn came only now."""
        ...

    def cancel(self, ids: Sequence[str]) -> None:
        """End the jobs, waiting or running; one that has ended already is left alone. Raises QueryFailed."""
        ...


# The result is written under another name and renamed: a job that is killed on the way leaves none. A job that its
# scheduler asked to end writes none either, because its command may turn the signal into any exit code.
SCRIPT = """\
#!/bin/bash
trap 'asked_to_end=1' TERM INT HUP
asked_to_end=
{exports}cd {directory} || exit 1
exec >{output} 2>&1 </dev/null
started=$(date +%s.%N)
{command}
code=$?
if [ -n "$asked_to_end" ]; then
  exit 143
fi
seconds=$(echo "$(date +%s.%N) $started" | awk '{{printf "%.3f", $1 - $2}}')
temporary={folder}/.result.json.$$.tmp
printf '{{"exit_code": %d, "seconds": %s, "host": "%s"}}\\n' "$code" "$seconds" "$(hostname)" >"$temporary" &&
  sync "$temporary" && mv "$temporary" {result}
exit "$code"
"""


def write_script(job: Job, wrapper: Sequence[str] = ()) -> None:
    """Write the job's script; `wrapper` comes before the command, as a container's `srun` does."""
    job.folder.mkdir(parents=True, exist_ok=True)
    exports = [f"export {name}={shlex.quote(value)}\n" for name, value in job.variables.items()]
    words = {
        "exports": "".join(exports),
        "directory": shlex.quote(str(job.directory)),
        "output": shlex.quote(str(job.output)),
        "folder": shlex.quote(str(job.folder)),
        "result": shlex.quote(str(job.result)),
        "command": shlex.join([*wrapper, *job.command]),
    }
    write_whole(job.script, SCRIPT.format(**words))
    job.script.chmod(0o755)


def read_result(job: Job) -> Result | None:
    """What the job wrote last, None where there is nothing. Raises ValueError for a file that is not a result."""
    try:
        text = job.result.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        document = json.loads(text)
        return Result(int(document["exit_code"]), float(document["seconds"]), str(document["host"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{job.result} is not a result: {error!r}") from None
