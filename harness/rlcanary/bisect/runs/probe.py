"""One run of the command on one commit."""

import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rlcanary.bisect.record.journal import Observation, now
from rlcanary.bisect.runs.environments import EnvironmentCache, building_variables
from rlcanary.bisect.runs.measured_value import NotMeasured, read_metric
from rlcanary.bisect.runs.outputs import compress_large
from rlcanary.bisect.runs.pinned_files import Command
from rlcanary.bisect.runs.places import Place
from rlcanary.bisect.runs.worktree import Untestable
from rlcanary.jobs.outcomes import Outcome, OutcomeTable, Reading
from rlcanary.jobs.verdict_file import VERDICT_VARIABLE, read_verdict_file
from rlcanary.system.ending import Ending
from rlcanary.system.files import read_end
from rlcanary.system.git import Commit, environment_without_repository
from rlcanary.system.sessions import Call, Stop

RUN_VARIABLE = "RLCANARY_BISECT_RUN"
SEED_VARIABLE = "RLCANARY_BISECT_SEED"
"""A number that differs from run to run, for commands that would repeat the same flake under a fixed seed."""
DRIVER_VARIABLE = "RLCANARY_BISECT_DRIVER"
READ_BYTES = 4_000_000
Run = Callable[[Call, Stop], Ending]
"""The type of `sessions.run` and of `RemoteRun`."""
MEASURABLE_CODES = (0, 1)
"""Exit codes of a run that completed. A metric from such a run counts."""


@dataclass(frozen=True)
class Probe:
    """The settings that all runs share. Several threads may run probes at once, each in its own place."""

    command: Command
    toplevel: Path
    directory: Path
    """The command's working directory, relative to the checkout."""
    outputs: Path
    """The folder for output files."""
    table: OutcomeTable
    runners: tuple[str, ...]
    timeout: float | None
    import_paths: tuple[str, ...]
    mark: Mapping[str, str]
    """Environment variables that identify the processes of this search."""
    run_command: Run
    metric: str | None = None
    environments: EnvironmentCache | None = None

    def run(self, commit: Commit, number: int, place: Place, stop: Stop) -> Observation:
        """Run the command once on a commit.

        Raises:
            GitError: git cannot make a place to run in.
            Stopped: The search was asked to stop.
        """
        stop.check()
        output = self.outputs / f"{datetime.now():%H%M%S}-{number:03d}-{commit.short}.log"
        began = time.monotonic()
        value = None
        try:
            call = self._prepare(commit, number, place, output, stop)
        except Untestable as error:
            reading, seconds = Reading(Outcome.UNTESTABLE, str(error)), time.monotonic() - began
        else:
            reading, seconds, value = self._run(call, place, stop)
        file = str(compress_large(output)) if output.exists() else ""
        key = "" if self.environments is None else self.environments.key(commit.sha)
        return Observation(
            commit.sha, reading.outcome, reading.reason, round(seconds, 3), now(), file, value, number, key
        )

    def _prepare(self, commit: Commit, number: int, place: Place, output: Path, stop: Stop) -> Call:
        place.prepare(commit.sha, self.command.pinned, stop)
        directory = place.path / self.directory
        if not directory.is_dir():
            raise Untestable(f"the folder {self.directory} does not exist at this commit")
        mark = {**self.mark, RUN_VARIABLE: str(number)}
        told = {VERDICT_VARIABLE: str(output.with_suffix(".verdict.json")), SEED_VARIABLE: str(number)}
        variables = {**self._variables(commit, place, directory, output, stop, mark), **told}
        return Call(self.command.inside(place.path, self.toplevel), directory, variables, mark, output, self.timeout)

    def _run(self, call: Call, place: Place, stop: Stop) -> tuple[Reading, float, float | None]:
        """Run the command. Returns its outcome, its duration in seconds and the value of the metric."""
        since = time.time_ns()
        ending = self.run_command(call, stop)
        printed = read_end(call.output, READ_BYTES)
        reading = read_verdict_file(Path(call.environment[VERDICT_VARIABLE]))
        reading = reading or self.table.read(ending, self.runners, printed)
        if self.metric is None:
            return reading, ending.seconds, None
        if reading.outcome in (Outcome.INFRA, Outcome.ABORT) or ending.code not in MEASURABLE_CODES:
            outcome = Outcome.UNTESTABLE if reading.outcome is Outcome.BAD else reading.outcome
            return Reading(outcome, reading.reason), ending.seconds, None
        try:
            value = read_metric(self.metric, place.path, call.directory, since, printed)
        except NotMeasured as error:
            return Reading(Outcome.UNTESTABLE, f"{reading.reason}, and {error}"), ending.seconds, None
        return Reading(Outcome.MEASURED, f"{value:.6g}"), ending.seconds, value

    def _variables(
        self,
        commit: Commit,
        place: Place,
        directory: Path,
        output: Path,
        stop: Stop,
        mark: Mapping[str, str],
    ) -> Mapping[str, str]:
        variables = environment_without_repository() | {"PWD": str(directory)}
        variables.pop(DRIVER_VARIABLE, None)
        paths = [str(place.path / relative) for relative in self.import_paths]
        if paths:
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, [*paths, variables.get("PYTHONPATH")]))
        if self.environments is None:
            return variables
        log = output.with_suffix(".environment.log")
        environment = self.environments.get(commit.sha, place.path, log, stop, building_variables(), mark)
        variables = environment.variables(variables, place.path)
        program = self.command.arguments[0]
        if "/" not in program and is_foreign(program, variables["PATH"], environment.folder):
            raise Untestable(
                f"{program} is not in the environment that was built for this commit: its dependencies do not name it"
            )
        return variables


def is_foreign(program: str, path: str, environment: Path) -> bool:
    """Whether a program on `path` is a Python script of another environment, which would import that one's packages."""
    place = shutil.which(program, path=path)
    if place is None or Path(place).is_relative_to(environment):
        return False
    with Path(place).open("rb") as stream:
        first = stream.readline(4096)
    return first.startswith(b"#!") and b"python" in first
