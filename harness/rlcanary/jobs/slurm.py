"""Run jobs on a Slurm cluster, through its command-line tools."""

import os
import re
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from rlcanary.jobs.job import (
    LOST,
    Cluster,
    Job,
    QueryFailed,
    Record,
    Rejected,
    Resources,
    State,
    no_record,
    write_script,
)

UNFINISHED = {
    "COMPLETING",
    "CONFIGURING",
    "PENDING",
    "RESIZING",
    "RESV_DEL_HOLD",
    "REQUEUED",
    "REQUEUE_FED",
    "REQUEUE_HOLD",
    "RUNNING",
    "SIGNALING",
    "SPECIAL_EXIT",
    "STAGE_OUT",
    "STOPPED",
    "SUSPENDED",
}
BUSY = re.compile(
    r"socket timed out|unable to contact slurm controller|connection refused|temporarily unavailable", re.I
)
"""Errors of sbatch that mean that the controller did not answer. The job was not refused."""
OWN_JOB = ("SLURM_JOB", "SLURM_ARRAY", "SLURM_STEP", "SLURM_TASK")
"""Prefixes of variables that identify a step's job. A job submitted from inside another must not inherit them."""
MARKS = ("RLCANARY_BISECT_JOURNAL", "RLCANARY_BISECT_RUN")
"""Variables that mark the processes that bisect ends.

They are removed here: a scancel has to complete, and jobs are cancelled instead.
"""
ATTEMPTS = 5
ANSWER_SECONDS = 60.0


class SlurmExecutor:
    """Submits one Slurm job per `Job`. Jobs with the same resources and environment form an array.

    No job is requeued: a rerun would find files from the first attempt in its folder.
    """

    name = "slurm"
    address = ""
    has_containers = True  # through `srun --container-image` (Pyxis)
    outlives = True
    slowest_poll = 30.0

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def submit(self, jobs: Sequence[Job], record: Record = no_record) -> list[str]:
        ids: list[str] = []
        for _, same in groupby(jobs, key=lambda job: (job.resources, job.after, job.environment)):
            batch = list(same)
            for job in batch:
                write_script(job, self._container(job))
            try:
                ids += self._submit_batch(batch)
            except Rejected:
                self.cancel(ids)
                raise
            record(ids)
        return ids

    def states(self, ids: Sequence[str]) -> Mapping[str, State]:
        """Query the states from sacct, and from squeue for jobs that sacct does not know."""
        failures: list[str] = []
        names = self._ask(ids, failures, "sacct", "--noheader", "--parsable2", "--allocations", "--format=JobID,State")
        missing = [identity for identity in ids if identity not in names]
        if missing:
            queue = ("squeue", "--noheader", "--array", "--states=all", "--format=%i|%T")
            names |= self._ask(missing, failures, *queue)
        # If a source failed, a job unknown to the other is not lost.
        lost = [identity for identity in ids if identity not in names]
        if lost and failures and not (len(failures) == 1 and failures[0].startswith("sacct")):
            raise QueryFailed("; ".join(failures))
        return {identity: _state(names.get(identity, LOST)) for identity in ids}

    def cancel(self, ids: Sequence[str]) -> None:
        if ids:
            _slurm("scancel", *ids)

    def _submit_batch(self, batch: Sequence[Job]) -> list[str]:
        first = batch[0]
        if len(batch) == 1:
            return [self._sbatch(first, [], str(first.script), first.folder)]
        scripts = " ".join(shlex.quote(str(job.script)) for job in batch)
        array = first.folder / "array.sh"
        array.write_text(
            f'#!/bin/bash\nscripts=({scripts})\nexec "${{scripts[$SLURM_ARRAY_TASK_ID]}}"\n', encoding="utf-8"
        )
        identity = self._sbatch(first, [f"--array=0-{len(batch) - 1}"], str(array), first.folder)
        return [f"{identity}_{number}" for number in range(len(batch))]

    def _sbatch(self, job: Job, options: Sequence[str], script: str, folder: Path) -> str:
        """Submit a job and return its id.

        Raises:
            Rejected: sbatch refused the job.
        """
        command = [
            "sbatch",
            "--parsable",
            "--no-requeue",
            "--export=ALL",
            f"--job-name={job.name}",
            f"--output={folder}/slurm-%j.out",
        ]
        command += [f"--chdir={job.directory}", *_resource_options(job.resources), *options]
        for option, value in (
            ("account", self._cluster.account),
            ("partition", self._cluster.partition),
            ("dependency", None if job.after is None else f"afterany:{job.after}"),
        ):
            if value is not None:
                command.append(f"--{option}={value}")
        environment = {name: value for name, value in job.environment.items() if not name.startswith(OWN_JOB)}
        for attempt in range(1, ATTEMPTS + 1):
            try:
                printed = _slurm(*command, script, environment=environment)
            except QueryFailed as error:
                if attempt < ATTEMPTS and BUSY.search(str(error)):
                    time.sleep(min(2.0**attempt, 10.0))
                    continue
                raise Rejected(str(error)) from None
            identity = printed.strip().split(";")[0]
            if not identity.isdigit():
                raise Rejected(f"sbatch printed no job id but {printed.strip()!r}")
            return identity
        raise AssertionError

    def _ask(self, ids: Sequence[str], failures: list[str], *command: str) -> dict[str, str]:
        try:
            printed = _slurm(*command, f"--jobs={','.join(ids)}")
        except QueryFailed as error:
            if "invalid job id" not in str(error).lower():
                failures.append(str(error))
            return {}
        rows = (line.split("|") for line in printed.splitlines() if "|" in line)
        return {row[0].strip(): row[1].split()[0].rstrip("+") for row in rows if row[1].strip()}

    def _container(self, job: Job) -> list[str]:
        if self._cluster.container is None:
            return []
        words = ["srun", "--nodes=1", "--ntasks=1", f"--container-image={self._cluster.container}"]
        mounts = [f"{place}:{place}" for place in (job.directory, job.folder.parent)]
        words.append(f"--container-mounts={','.join(filter(None, [self._cluster.mounts, *mounts]))}")
        return [*words, f"--container-workdir={job.directory}"]


def _resource_options(resources: Resources) -> list[str]:
    options = [f"--nodes={resources.nodes}"]
    if resources.gpus_per_node:
        options.append(f"--gpus-per-node={resources.gpus_per_node}")
    if resources.minutes is not None:
        options.append(f"--time={resources.minutes}")
    return options


def _state(name: str) -> State:
    return State(name, name not in UNFINISHED)


def _slurm(*command: str, environment: Mapping[str, str] | None = None) -> str:
    """Run a Slurm command and return its output.

    Raises:
        QueryFailed: The command failed. The message is from its stderr.
    """
    try:
        finished = subprocess.run(
            command,
            env={name: value for name, value in (environment or os.environ).items() if name not in MARKS},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=ANSWER_SECONDS,
            start_new_session=True,  # A signal to our process group must not interrupt a scancel.
        )
    except subprocess.TimeoutExpired:
        raise QueryFailed(f"{command[0]} did not answer within {ANSWER_SECONDS:g} seconds") from None
    except OSError as error:
        raise QueryFailed(f"{command[0]}: {error.strerror}") from None
    if finished.returncode:
        lines = [line.strip() for line in finished.stderr.splitlines() if line.strip()]
        why = re.sub(rf"^{command[0]}: (error|fatal): ", "", lines[-1]) if lines else f"exit code {finished.returncode}"
        raise QueryFailed(f"{command[0]}: {why}")
    return finished.stdout
