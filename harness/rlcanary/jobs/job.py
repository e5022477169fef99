"""The executor protocol: submit jobs, query their states, cancel them. Each job leaves a result file."""

import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rlcanary.system.files import write_whole

LOST = "LOST"
"""The state of a job that its scheduler has forgotten."""


class Rejected(Exception):
    """The scheduler refused the job: a quota, an account, a wrong option. Trying again would not help."""


class QueryFailed(Exception):
    """The scheduler did not answer. The jobs may be in any state."""


@dataclass(frozen=True)
class Resources:
    nodes: int = 1
    gpus_per_node: int = 0
    minutes: int | None = None
    """The time limit. None leaves it to the scheduler."""


@dataclass(frozen=True)
class Job:
    """A command and the folder for its script, its result and the scheduler's output.

    The command may write to its directory and beside the folder: a container mounts both. The folder, the directory and
    the output file must be on a disk that the machine running the job can see.
    """

    name: str
    command: Sequence[str]
    directory: Path
    folder: Path
    output: Path
    environment: Mapping[str, str]
    """All environment variables of the command."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables of this job alone, on top of `environment`, which the jobs of a batch share."""
    resources: Resources = field(default_factory=Resources)
    after: str | None = None
    """The id of a job that must have ended, in any state, before this one starts."""

    @property
    def script(self) -> Path:
        return self.folder / "job.sh"

    @property
    def result(self) -> Path:
        return self.folder / "result.json"


@dataclass(frozen=True)
class State:
    name: str
    """Slurm's name for the state: PENDING, RUNNING, COMPLETED, FAILED, PREEMPTED, …; or LOST."""
    is_final: bool

    @property
    def has_started(self) -> bool:
        return self.is_final or self.name not in ("PENDING", "CONFIGURING")


@dataclass(frozen=True)
class Result:
    """The contents of the file that a job writes last. Without it there is no verdict."""

    exit_code: int
    seconds: float
    host: str


Record = Callable[[Sequence[str]], None]
"""Notes the ids of the first of the jobs that are being submitted."""


def no_record(ids: Sequence[str]) -> None:
    """Note nothing."""


@dataclass(frozen=True)
class Cluster:
    """The settings of a cluster. An executor ignores those that it does not have."""

    account: str | None = None
    partition: str | None = None
    container: str | None = None
    """The image to run in."""
    mounts: str | None = None
    """The container's mounts, as `A:B,C:D`."""
    address: str | None = None
    """None takes the executor's default."""

    @classmethod
    def of_environment(cls) -> "Cluster":
        """Read ACCOUNT, PARTITION, CONTAINER and MOUNTS."""
        return cls(*(os.environ.get(name) or None for name in ("ACCOUNT", "PARTITION", "CONTAINER", "MOUNTS")))


class Executor(Protocol):
    name: str
    address: str
    """The cluster's address. Empty if it is this machine's default."""
    has_containers: bool
    """Whether jobs can run in a container."""
    outlives: bool
    """Whether submitted jobs go on after the process that submitted them has ended."""
    slowest_poll: float
    """The longest interval in seconds between two queries of a job."""

    def submit(self, jobs: Sequence[Job], record: Record = no_record) -> list[str]:
        """Submit the jobs, as one batch if possible, and return their ids.

        `record` is called as soon as ids are known, and before any job starts where the executor chooses the ids: a job
        of a process that is killed here can then be found.

        Raises:
            Rejected: A job was refused. All of them are cancelled.
        """
        ...

    def states(self, ids: Sequence[str]) -> Mapping[str, State]:
        """Return the state of each job.

        Raises:
            QueryFailed: The scheduler did not answer.
            Rejected: A job that waited for another was refused when its turn came.
        """
        ...

    def cancel(self, ids: Sequence[str]) -> None:
        """Cancel the jobs, waiting or running. A job that has ended is left alone.

        Raises:
            QueryFailed: The scheduler did not answer.
        """
        ...


# The result is written under another name and renamed, so a killed job leaves no partial result. A job that its scheduler
# asked to end writes none either, because its command may turn the signal into any exit code.
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
seconds=$(echo "$(date +%s.%N) $started" | LC_ALL=C awk '{{printf "%.3f", $1 - $2}}')
temporary={folder}/.result.json.$$.tmp
printf '{{"exit_code": %d, "seconds": %s, "host": "%s"}}\\n' "$code" "$seconds" "$(hostname)" >"$temporary" &&
  sync "$temporary" && mv "$temporary" {result}
exit "$code"
"""


def write_script(job: Job, wrapper: Sequence[str] = ()) -> None:
    """Write the job's script. The words of `wrapper`, such as a container's `srun`, precede the command."""
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
    """Read the job's result file.

    Returns:
        None if the file is missing.

    Raises:
        ValueError: The file is not a result.
    """
    try:
        text = job.result.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        document = json.loads(text)
        return Result(int(document["exit_code"]), float(document["seconds"]), str(document["host"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{job.result} is not a result: {error!r}") from None
