"""Run test scripts as jobs on a snapshot of the code, and judge them."""

import os
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from rlcanary.errors import UserError
from rlcanary.jobs.choose import EXECUTORS, make_executor
from rlcanary.jobs.job import Cluster, Executor
from rlcanary.jobs.outcomes import Outcome, Reading
from rlcanary.jobs.verdict_file import write_verdict
from rlcanary.launch.display import Watcher, print_cost, print_next_steps, print_verdicts
from rlcanary.launch.edits import Edits
from rlcanary.launch.experiment import Experiment, python_path
from rlcanary.launch.snapshot import take_snapshot
from rlcanary.launch.submission import Submission
from rlcanary.launch.suite import Configuration, expand_lists, read_configuration
from rlcanary.launch.verdict import EXIT_CODES, combine
from rlcanary.system.files import make_folder
from rlcanary.system.git import Repository, environment_without_repository
from rlcanary.system.sessions import Interrupted, Interrupts, Stopped

PATH = click.Path(path_type=Path)


@click.command("launch")
@click.option(
    "--executor",
    type=click.Choice(["auto", *EXECUTORS]),
    default="auto",
    envvar="EXECUTOR",
    help="Run the jobs here, on Slurm or on Ray; auto: Slurm if sbatch is installed, else local.  [$EXECUTOR]",
)
@click.option("--dry-run", is_flag=True, envvar="DRYRUN", help="Print the cost, then exit.  [$DRYRUN]")
@click.option("--watch", is_flag=True, envvar="WATCH", help="Wait until the metrics are judged.  [$WATCH]")
@click.option(
    "--folder", type=PATH, envvar="LAUNCH_DIR", metavar="DIR", help="Folder of snapshots and runs.  [$LAUNCH_DIR]"
)
@click.option(
    "--extra-args",
    default="",
    envvar="EXTRA_SCRIPT_ARGS",
    metavar="WORDS",
    help="Pass these arguments to the script.  [$EXTRA_SCRIPT_ARGS]",
)
@click.option(
    "--sed",
    default="",
    envvar="SED_CLAUSES",
    metavar="CLAUSES",
    help="Edit the script's copy with these clauses of sed.  [$SED_CLAUSES]",
)
@click.option(
    "--allow-no-match",
    is_flag=True,
    envvar="SED_ALLOW_NO_MATCH",
    help="Accept clauses of --sed that match nothing.  [$SED_ALLOW_NO_MATCH]",
)
@click.option("--account", envvar="ACCOUNT", help="Slurm account.  [$ACCOUNT]")
@click.option("--partition", envvar="PARTITION", help="Slurm partition.  [$PARTITION]")
@click.option("--container", envvar="CONTAINER", help="Image to run in, on Slurm.  [$CONTAINER]")
@click.option("--mounts", envvar="MOUNTS", help="Container mounts, as A:B,C:D.  [$MOUNTS]")
@click.option(
    "--python-path",
    envvar="LAUNCH_PYTHONPATH",
    help="PYTHONPATH of the jobs; default the caller's.  [$LAUNCH_PYTHONPATH]",
)
@click.argument("scripts", nargs=-1, required=True, type=PATH, metavar="SCRIPT...")
def launch(scripts: tuple[Path, ...], dry_run: bool, **options: Any) -> int:
    """Run each test SCRIPT on a snapshot of the code, and judge it by its metric checks.

    A SCRIPT whose name ends in .txt is a list of scripts, one per line.

    Exit codes: 0 all metric checks pass, 1 one fails, 125 a script cannot answer (it is missing, or ends before its
    metrics are judged), 137 the machines failed (a lost node, preemption, a time limit), 2 nothing was launched.

    Inside `rlcanary bisect` the outcome also goes to the file that $RLCANARY_BISECT_VERDICT names.
    """
    try:
        reading = _launch(expand_lists(scripts, _leave_out), dry_run, **options)
    except UserError as error:
        write_verdict(Reading(Outcome.ABORT, str(error)))
        raise
    except Interrupted as interruption:
        return interruption.exit_code
    if reading is None:
        return 0
    write_verdict(reading)
    return EXIT_CODES[reading.outcome]


def _leave_out(script: Path, reason: str) -> None:
    click.echo(f"{script} is disabled{f': {reason}' if reason else ''}", err=True)


def _launch(scripts: Sequence[Path], dry_run: bool, **options: Any) -> Reading | None:
    repository = Repository.around(Path.cwd())
    arguments = _words(options["extra_args"])
    missing = [script for script in scripts if not script.is_file()]
    if missing:
        reason = f"{', '.join(map(str, missing))}: no such file here"
        click.echo(f"rlcanary: {reason}", err=True)
        return Reading(Outcome.UNTESTABLE, reason)
    names = [_relative(script, repository) for script in scripts]
    edits = _edits(names, options["sed"], options["allow_no_match"])
    executor = make_executor(
        _chosen(options["executor"]),
        Cluster(**{name: options[name] for name in ("account", "partition", "container", "mounts")}),
    )
    if dry_run:
        print_cost({name: read_configuration(repository.toplevel / name) for name in names}, executor.name)
        return None
    folder = _folder(options["folder"], repository)
    snapshot = take_snapshot(repository, folder / "snapshots", repository.toplevel.name, edits, names)
    click.echo(f"snapshot {snapshot.path}{'' if snapshot.is_new else ' (there already)'}", err=True)
    given = options["python_path"]
    paths = python_path(
        repository.toplevel, os.environ.get("PYTHONPATH", "") if given is None else given, snapshot.path
    )
    configurations = {name: read_configuration(snapshot.path / name) for name in names}

    def make(name: str, configuration: Configuration) -> Experiment:
        return Experiment.make(name, configuration, snapshot.path, paths, folder)

    experiments = [make(name, configuration) for name, configuration in configurations.items()]
    return _run(executor, experiments, arguments, options["watch"] or not executor.outlives)


def _run(
    executor: Executor, experiments: Sequence[Experiment], arguments: Sequence[str], watch: bool
) -> Reading | None:
    with Interrupts() as interrupts:
        submission = Submission(executor, dict.fromkeys(experiments, ()))
        try:
            submission.submit(arguments, environment_without_repository())
            for experiment, ids in submission.ids.items():
                click.echo(f"{experiment.script}: {executor.name} {', '.join(ids)} in {experiment.folder}", err=True)
            interrupts.check()
            if not watch:
                print_next_steps(experiments)
                return None
            with Watcher() as watcher:
                readings = submission.judge(interrupts, watcher.seen, watcher.ended)
        except (Stopped, UserError):
            submission.withdraw()
            raise
    print_verdicts(readings)
    return combine(list(readings.values()))


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"EXTRA_SCRIPT_ARGS: {error} in {text!r}: quote it as for the shell") from None


def _relative(script: Path, repository: Repository) -> str:
    place = script.resolve()
    if not place.is_relative_to(repository.toplevel):
        raise UserError(f"{script} lies outside of {repository.toplevel}: launch it in its own checkout")
    return str(place.relative_to(repository.toplevel))


def _edits(names: Sequence[str], clauses: str, allow_no_match: bool) -> Edits | None:
    if not clauses.strip():
        return None
    if len(names) != 1:
        raise UserError(f"SED_CLAUSES edit one script, {len(names)} are given: launch them one by one")
    edits = Edits(clauses, names[0], allow_no_match)
    edits.check()
    return edits


def _chosen(name: str) -> str:
    return name if name != "auto" else "slurm" if shutil.which("sbatch") else "local"


def _folder(asked: Path | None, repository: Repository) -> Path:
    """Choose the folder of launches: the option's, the running bisect's, or the checkout's.

    A launch inside a bisect leaves nothing in the worktree.
    """
    search = os.environ.get("RLCANARY_BISECT_JOURNAL")
    if asked is not None:
        return asked.absolute()
    folder = repository.toplevel / "launches" if search is None else Path(search, "launches")
    make_folder(folder)
    if search is None and not (folder / ".gitignore").exists():
        (folder / ".gitignore").write_text("*\n", encoding="utf-8")
    return folder
