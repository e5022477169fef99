"""Output of `rlcanary launch`."""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from types import TracebackType

import click
from rich.table import Table
from rich.text import Text

from rlcanary.console import progress_bar, report_console
from rlcanary.jobs.job import Job
from rlcanary.jobs.outcomes import Outcome, Reading
from rlcanary.jobs.waiting import JobEnd, Waiting
from rlcanary.launch.experiment import Experiment
from rlcanary.launch.suite import Configuration
from rlcanary.system.files import read_end

STYLES = {Outcome.GOOD: "green", Outcome.BAD: "bold red"}
TAIL_BYTES = 4000


def exactly(hours: Fraction) -> str:
    """Format hours with up to two decimals if that is exact, or else in minutes."""
    return f"{float(hours):.2f}" if (hours * 100).denominator == 1 else f"{hours * 60} min"


def print_cost(configurations: Mapping[str, Configuration], executor: str) -> None:
    table = Table(title=f"Cost on {executor}")
    table.add_column("Script", overflow="fold")
    for column in ("Nodes", "GPUs a node", "Runs", "Minutes a run", "Node-hours", "GPU-hours"):
        table.add_column(column, justify="right")
    for name, own in configurations.items():
        numbers = (own.nodes, own.gpus_per_node, own.runs, own.minutes)
        table.add_row(name, *map(str, numbers), exactly(own.node_hours), exactly(own.gpu_hours))
    report_console(highlight=False).print(table)
    total = sum((own.gpu_hours for own in configurations.values()), Fraction())
    click.echo(f"GPU-hours: {exactly(total)}")


class Watcher:
    """Prints each job's state when it changes, and shows a bar of the jobs that have ended."""

    def __init__(self) -> None:
        self._bar = progress_bar()
        self._task = self._bar.add_task("jobs", total=None)
        self._states: dict[str, str] = {}

    def __enter__(self) -> "Watcher":
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._bar.stop()

    def seen(self, waiting: Waiting) -> None:
        states = {identity: waiting.states[identity].name for identity in waiting.open if identity in waiting.states}
        for identity, name in states.items():
            if self._states.get(identity) != name:
                self._print(f"{identity}: {name}")
        self._states |= states
        total = len({*waiting.states, *waiting.open})
        counts = ", ".join(f"{count} {name}" for name, count in Counter(states.values()).items())
        self._bar.update(self._task, description=counts or "jobs", total=total, completed=total - len(waiting.open))

    def ended(self, identity: str, job: Job, end: JobEnd) -> None:
        code = "no result" if end.result is None else f"exit {end.result.exit_code}"
        self._print(f"{identity}: {end.state}, {code}")
        if end.result is None or end.result.exit_code:
            self._print(end_of(job.output))

    def _print(self, text: str) -> None:
        """Print above the bar."""
        self._bar.console.print(Text(text), soft_wrap=True, highlight=False)


def end_of(output: Path) -> str:
    """Return the last whole lines of a job's output."""
    text = read_end(output, TAIL_BYTES)
    if output.is_file() and output.stat().st_size > TAIL_BYTES:
        text = text.partition("\n")[2]
    return f"--- the end of {output}\n{text.strip()}"


def print_next_steps(experiments: Sequence[Experiment]) -> None:
    """Print the command that shows how the launches end."""
    folders = shlex.join(_relative(experiment.folder) for experiment in experiments)
    click.echo(f"how they end: rlcanary launches {folders}", err=True)


def print_verdicts(readings: Mapping[Experiment, Reading]) -> None:
    _print_table(
        "Launched", "Script", [(_styled(own.outcome), run.script, own.reason) for run, own in readings.items()]
    )


def print_launches(
    experiments: Sequence[Experiment], readings: Mapping[Experiment, Reading], still: Mapping[Experiment, str]
) -> None:
    """Print a table of launches. `still` describes the progress of those that have not ended."""
    rows = []
    for own in experiments:
        reading = readings.get(own)
        outcome = Text("none yet") if reading is None else _styled(reading.outcome)
        rows.append((outcome, _relative(own.folder), still[own] if reading is None else reading.reason))
    _print_table("Launches", "Launch", rows)


def _print_table(title: str, column: str, rows: Sequence[tuple[Text, str, str]]) -> None:
    table = Table(title=title)
    for name in ("Outcome", column, "Reason"):
        table.add_column(name, overflow="fold")
    for outcome, name, reason in rows:
        table.add_row(outcome, Text(name), Text(reason))
    report_console(highlight=False).print(table)


def _styled(outcome: Outcome) -> Text:
    return Text(outcome, style=STYLES.get(outcome, "yellow"))


def _relative(folder: Path) -> str:
    """Return the path relative to the current folder if it is inside."""
    return str(folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder)
