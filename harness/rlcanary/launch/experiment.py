"""One launched script: its folder, its consecutive runs, its verdict."""

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from rlcanary.jobs.job import Job
from rlcanary.jobs.outcomes import Outcome, Reading
from rlcanary.jobs.verdict_file import write_verdict_file
from rlcanary.jobs.waiting import JobEnd
from rlcanary.launch.suite import Configuration
from rlcanary.launch.verdict import CHECKS_VARIABLE, read_verdict
from rlcanary.system.import_paths import find_import_paths


@dataclass(frozen=True)
class Experiment:
    """One launch of a script. Its runs share the folders EXP_DIR, CKPT_DIR and LOG_DIR, which no other launch uses."""

    script: str
    """The script's path relative to the checkout."""
    configuration: Configuration
    snapshot: Path
    python_path: str
    folder: Path
    launched: str
    """The time of the launch, in ISO 8601."""

    @classmethod
    def make(
        cls, script: str, configuration: Configuration, snapshot: Path, python_path: str, launches: Path
    ) -> "Experiment":
        now = datetime.now().astimezone()
        folder = launches / f"{Path(script).stem}-{now:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
        for part in ("checkpoints", "logs"):
            (folder / part).mkdir(parents=True)
        return cls(script, configuration, snapshot, python_path, folder, now.isoformat(timespec="seconds"))

    @property
    def checks(self) -> Path:
        return self.folder / "metric-checks.jsonl"

    @property
    def verdict(self) -> Path:
        return self.folder / "verdict.json"

    def job(self, number: int, arguments: Sequence[str], environment: Mapping[str, str], after: str | None) -> Job:
        """Make the job of one run. `number` starts at 1."""
        folder = self.folder / f"run{number}"
        variables = {
            "EXP_DIR": str(self.folder),
            "CKPT_DIR": str(self.folder / "checkpoints"),
            "LOG_DIR": str(self.folder / "logs"),
            "JSON_METRICS": str(self.folder / "metrics.json"),
            CHECKS_VARIABLE: str(self.checks),
            "PYTHONPATH": self.python_path,
        }
        return Job(
            name=Path(self.script).stem,
            command=["bash", str(self.snapshot / self.script), *arguments],
            directory=self.snapshot,
            folder=folder,
            output=folder / "output.log",
            environment=environment,
            variables=variables,
            resources=self.configuration.resources,
            after=after,
        )

    @property
    def last_output(self) -> Path | None:
        """The output file of the last run that has one."""
        files = (self.job(number, (), {}, None).output for number in range(self.configuration.runs, 0, -1))
        return next((file for file in files if file.is_file()), None)

    def write_verdict(self, reading: Reading) -> None:
        """Write the verdict file, which remains when the scheduler has forgotten the jobs."""
        write_verdict_file(self.verdict, reading)

    def read(self, ends: Sequence[JobEnd]) -> Reading:
        """Return the outcome of all runs: that of the last run, unless an infrastructure failure hit any of them."""
        if len(ends) < self.configuration.runs:
            return Reading(Outcome.INFRA, f"{len(ends)} of {self.configuration.runs} runs were submitted")
        readings = [read_verdict(end, self.checks) for end in ends]
        lost = [(number, own) for number, own in enumerate(readings, start=1) if own.outcome is Outcome.INFRA]
        if not lost:
            return readings[-1]
        number, reading = lost[0]
        return replace(reading, reason=f"run {number} of {len(ends)}: {reading.reason}") if len(ends) > 1 else reading


def python_path(toplevel: Path, given: str, snapshot: Path) -> str:
    """Build a job's PYTHONPATH. Import folders of the checkout are replaced by those of the snapshot."""
    found = find_import_paths(["python3"], toplevel, toplevel).relative
    folders = [
        *(toplevel / relative for relative in found),
        *(Path(entry) for entry in given.split(os.pathsep) if entry),
    ]
    return os.pathsep.join(dict.fromkeys(_moved(folder, toplevel, snapshot) for folder in folders))


def _moved(folder: Path, toplevel: Path, snapshot: Path) -> str:
    place = folder.resolve()
    return str(snapshot / place.relative_to(toplevel)) if place.is_relative_to(toplevel) else str(folder)
