"""What `rlcanary launch` shows."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from fractions import Fraction
from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from rlcanary.bisect.executors.job import Job
from rlcanary.bisect.executors.waiting import JobEnd, Waiting
from rlcanary.bisect.outcomes import Outcome, Reading
from rlcanary.bisect.probe import read_end
from rlcanary.console import report_console
from rlcanary.launch.experiment import Experiment
from rlcanary.launch.suite import Configuration

STYLES = {Outcome.GOOD: "green", Outcome.BAD: "bold red"}
TAIL_BYTES = 2000


def exactly(hours: Fraction) -> str:
    """Hours with up to two decimals where they are exact, as a fraction of minutes where they are not."""
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


def show_states() -> Callable[[Waiting], None]:
    """Prints each job's state when it is another one."""
    shown: dict[str, str] = {}

    def show(waiting: Waiting) -> None:
        for identity in waiting.open:
            state = waiting.states.get(identity)
            if state is not None and shown.get(identity) != state.name:
                shown[identity] = state.name
                click.echo(f"{identity}: {state.name}", err=True)

    return show


def show_end(identity: str, job: Job, end: JobEnd) -> None:
    code = "no result" if end.result is None else f"exit {end.result.exit_code}"
    click.echo(f"{identity}: {end.state}, {code}", err=True)
    if end.result is None or end.result.exit_code:
        print_end(job.output)


def print_end(output: Path | None) -> None:
    if output is not None and (text := read_end(output, TAIL_BYTES).strip()):
        click.echo(f"--- the end of {output}\n{text}", err=True)


def print_next_steps(experiments: Sequence[Experiment]) -> None:
    """Of a launch that nobody waits for."""
    folders = shlex.join(_relative(experiment.folder) for experiment in experiments)
    click.echo(f"how they end: rlcanary launches {folders}", err=True)


def print_verdicts(readings: Mapping[Experiment, Reading]) -> None:
    table = Table(title="Launched")
    for column in ("Outcome", "Script", "Reason"):
        table.add_column(column, overflow="fold")
    for experiment, reading in readings.items():
        table.add_row(_styled(reading.outcome), experiment.script, Text(reading.reason))
    report_console(highlight=False).print(table)


def print_launches(
    experiments: Sequence[Experiment], readings: Mapping[Experiment, Reading], still: Mapping[Experiment, str]
) -> None:
    """`still` tells where those are that have not ended."""
    table = Table(title="Launches")
    for column in ("Outcome", "Launched", "Launch", "Reason"):
        table.add_column(column, overflow="fold")
    for own in experiments:
        ended = own in readings
        outcome = _styled(readings[own].outcome) if ended else Text("none yet")
        when = f"{datetime.fromisoformat(own.launched):%Y-%m-%d %H:%M}"
        reason = readings[own].reason if ended else still[own]
        table.add_row(outcome, when, Text(_relative(own.folder)), Text(reason))
    report_console(highlight=False).print(table)


def _styled(outcome: Outcome) -> Text:
    return Text(outcome, style=STYLES.get(outcome, "yellow"))


def _relative(folder: Path) -> str:
    """As one types it here."""
    return str(folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder)
