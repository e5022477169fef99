"""Show how launches ended, or cancel them."""

from collections.abc import Sequence
from pathlib import Path

import click

from rlcanary.errors import UserError
from rlcanary.jobs.choose import make_executor
from rlcanary.jobs.job import Cluster
from rlcanary.jobs.outcomes import Outcome, Reading
from rlcanary.jobs.verdict_file import read_verdict_file
from rlcanary.launch.display import Watcher, end_of, print_launches
from rlcanary.launch.experiment import Experiment
from rlcanary.launch.record import Record, find_launches, read_record
from rlcanary.launch.submission import Submission
from rlcanary.launch.verdict import EXIT_CODES, combine
from rlcanary.system.git import Repository
from rlcanary.system.sessions import Interrupted, Interrupts

PATH = click.Path(path_type=Path)
NOT_ENDED = 75
"""The exit code while a job waits or runs: EX_TEMPFAIL of sysexits.h."""


@click.command("launches")
@click.option("--watch", is_flag=True, envvar="WATCH", help="Wait until all launches have ended.  [$WATCH]")
@click.option("--cancel", is_flag=True, help="Cancel waiting and running jobs.")
@click.option("--folder", type=PATH, envvar="LAUNCH_DIR", metavar="DIR", help="Folder of launches.  [$LAUNCH_DIR]")
@click.argument("launches", nargs=-1, type=PATH, metavar="[LAUNCH]...")
def launches(launches: Sequence[Path], watch: bool, cancel: bool, folder: Path | None) -> int:
    """Show how each LAUNCH ended; without LAUNCH, how all launches of this checkout did.

    A LAUNCH is a folder that `rlcanary launch` printed.

    Exit codes: those of `rlcanary launch`, over all that are shown; 75 while jobs wait or run and no metric check failed.
    """
    if cancel and not launches:
        raise UserError("name the launches to cancel: `rlcanary launches` shows them")
    records = sorted(map(read_record, launches or _find(folder)), key=lambda record: record.experiment.launched)
    readings = _verdicts(records)
    still: dict[Experiment, str] = {}
    try:
        with Interrupts() as interrupts, Watcher() as watcher:
            seen, ended = (watcher.seen, watcher.ended) if watch else (_ignore, _ignore)
            for submission in _submissions([record for record in records if record.experiment not in readings]):
                if cancel:
                    submission.cancel()
                readings |= submission.judge(interrupts, seen, ended, wait=watch or cancel)
                still |= {own: submission.describe_open(own) for own in submission.ids if own not in readings}
    except Interrupted as interruption:
        click.echo("the jobs continue; --cancel ends them", err=True)
        return interruption.exit_code
    shown = [record.experiment for record in records]
    for own in shown if launches and not watch else ():
        if own in readings and readings[own].outcome is not Outcome.GOOD and own.last_output is not None:
            click.echo(end_of(own.last_output), err=True)
    print_launches(shown, readings, still)
    found = combine(list(readings.values())) if readings else None
    if found is None or (still and found.outcome is not Outcome.BAD):
        return NOT_ENDED
    return EXIT_CODES[found.outcome]


def _ignore(*seen: object) -> None:
    """Ignore progress: without --watch, the table at the end is enough."""


def _find(folder: Path | None) -> Sequence[Path]:
    where = folder if folder is not None else Repository.around(Path.cwd()).toplevel / "launches"
    found = list(find_launches(where))
    if not found:
        raise UserError(f"nothing was launched in {where}")
    return found


def _verdicts(records: Sequence[Record]) -> dict[Experiment, Reading]:
    """Read the verdicts that are already known."""
    read = {record.experiment: read_verdict_file(record.experiment.verdict) for record in records}
    return {own: reading for own, reading in read.items() if reading is not None}


def _submissions(records: Sequence[Record]) -> list[Submission]:
    """Group the launches into one submission per cluster."""
    clusters = sorted({(record.executor, record.address) for record in records})
    return [
        Submission(
            make_executor(executor, Cluster(address=address)),
            {own.experiment: own.ids for own in records if (own.executor, own.address) == (executor, address)},
        )
        for executor, address in clusters
    ]
