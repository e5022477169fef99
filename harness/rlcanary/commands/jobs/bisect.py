"""Find the commit that broke a command."""

import shutil
from difflib import get_close_matches
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from rlcanary.bisect.opening import prepare
from rlcanary.bisect.plan import make_plan
from rlcanary.bisect.request import Request
from rlcanary.bisect.resume import put_checkout_back
from rlcanary.bisect.session import run_search
from rlcanary.bisect.settings import read_settings
from rlcanary.bisect.view.forecast import forecast_lines, make_forecast
from rlcanary.bisect.view.progress import Display
from rlcanary.bisect.view.report import result_json
from rlcanary.bisect.view.summary import print_summary
from rlcanary.commands.parts.bisect_record import log, mark, status, undo, visualize
from rlcanary.errors import UserError
from rlcanary.jobs.choose import EXECUTORS
from rlcanary.system.files import require_writable, write_whole
from rlcanary.system.git import GitError, Repository, git
from rlcanary.system.sessions import Interrupts

PATH = click.Path(path_type=Path)
POSITIVE = click.FloatRange(min=0, min_open=True, max=1e12)


@click.command("bisect", context_settings={"allow_interspersed_args": False})
@click.option("--good", metavar="REF", help="Commit where the command passes.")
@click.option("--bad", metavar="REF", help="Commit where it fails.")
@click.option("--good-when-added", metavar="PATH", help="Use the newest commit that added this file as GOOD.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, metavar="K", help="Test K commits at once.")
@click.option(
    "--confidence",
    type=click.FloatRange(0.5, 1, min_open=True, max_open=True),
    default=0.95,
    metavar="P",
    help="Stop when the culprit is this probable; default 0.95.",
)
@click.option(
    "--deterministic", is_flag=True, help="Trust every run: plain halving, for a command that is never flaky."
)
@click.option(
    "--executor",
    type=click.Choice(list(EXECUTORS)),
    default="local",
    help="Run the command here, or as a Slurm or Ray job.",
)
@click.option("--metric", metavar="NAME", help="Search for a step of this tracked metric; needs --worse.")
@click.option("--worse", type=click.Choice(["lower", "higher"]), help="Direction in which the metric is worse.")
@click.option("--first-parent", is_flag=True, help="Stop at a guilty merge; do not search inside it.")
@click.option("--timeout", type=POSITIVE, metavar="SECONDS", help="Kill a run after this long.")
@click.option(
    "--on-timeout",
    type=click.Choice(["infra", "bad", "untestable", "good"]),
    help="Outcome of a run that times out; default infra, which runs it again.",
)
@click.option(
    "--retries",
    type=click.IntRange(min=0),
    default=2,
    metavar="N",
    help="Repeat a run up to N times when the machine fails, not the command; default 2.",
)
@click.option("--budget-runs", type=click.IntRange(min=1), metavar="N", help="Stop after this many runs.")
@click.option("--budget-minutes", type=POSITIVE, metavar="M", help="Stop after this many minutes.")
@click.option(
    "--env",
    default="auto",
    metavar="HOW",
    help="Build environments where dependencies differ: auto, uv, pip, none, or a command that fills $RLCANARY_ENV.",
)
@click.option("--env-dir", type=PATH, metavar="DIR", help="Keep built environments here.")
@click.option("--dry-run", is_flag=True, help="Print the expected runs, time and environment builds, then exit.")
@click.option("--skip-good-check", is_flag=True, help="Do not test GOOD; assume that it passes.")
@click.option("--json", "json_file", type=PATH, metavar="FILE", help="Write the result as JSON.")
@click.option("--save-dir", type=PATH, metavar="DIR", help="Write the log here; default bisect-logs/.")
@click.option("--replay", type=PATH, metavar="LOG", help="Start from the outcomes of a bisect log.")
@click.option(
    "--pin", multiple=True, metavar="PATH", help="Use the checkout's version of this file on every commit; repeatable."
)
@click.option("--no-pin", is_flag=True, help="Use each commit's own version of the command's script.")
@click.option("--no-submodules", is_flag=True, help="Check out no submodules.")
@click.option("--in-place", is_flag=True, help="Use this checkout, which must be clean, instead of a worktree.")
@click.option("--keep-worktree", is_flag=True, help="Keep the worktree (or the checkout) at the culprit.")
@click.option("--fresh", is_flag=True, help="Search anew: do not continue a search, nor show its result again.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def search(json_file: Path | None, dry_run: bool, **options: Any) -> int:
    """Find the commit that broke COMMAND.

    COMMAND runs on commits between GOOD and BAD in a worktree of its own; your checkout is not touched. Its exit code
    judges a commit: 0 good, 125 untestable, most others bad (docs/bisect-endings.md lists them).

    Exit codes: 0 one commit found, 1 several suspects are left, two commits break it or the budget is spent, 2 the search
    could not start or the outcome table aborted it, 3 internal error, 128 + N interrupted by signal N.

    `rlcanary bisect status|log|undo|mark|visualize` look at the last search of this checkout and correct it.
    """
    repository = Repository.around(Path.cwd())
    request = Request(**options)
    if json_file is not None:
        require_writable(json_file)
    if request.in_place and not dry_run:
        put_checkout_back(repository, repository.common_dir / "rlcanary" / "bisect")
    plan = make_plan(request, repository, read_settings(repository.toplevel))
    forecast = forecast_lines(make_forecast(request, plan), plan)
    if dry_run:
        with TemporaryDirectory() as copies:
            notices = prepare(request, plan, Path(copies)).notices
        click.echo("\n".join([*forecast, *notices]))
        return 0
    with Interrupts() as interrupts, Display() as display:
        for line in forecast:
            display.notice(line)
        report = run_search(request, plan, display, interrupts)
    if json_file is not None:
        write_whole(json_file, result_json(report, plan, request.command).encode())
    if report.status in ("refused", "aborted"):
        raise UserError(report.message)
    if report.status == "interrupted":
        display.last_words(f"log: {report.log}")
        display.last_words(report.message)
    else:
        print_summary(report, plan.repository)
    return report.exit_code


class BisectGroup(click.Group):
    """A group that runs a search unless the first word is a subcommand."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args and args[0] in self.commands:
            return super().make_context(info_name, args, parent, **extra)
        is_word = len(args) == 1 and args[0].isalpha() and shutil.which(args[0]) is None
        if is_word and (close := get_close_matches(args[0], self.commands, n=1)):
            raise UserError(f"{args[0]!r} is no subcommand of bisect: did you mean {close[0]!r}?")
        extra.setdefault("default_map", _defaults())
        return search.make_context(info_name, args, parent, **extra)


def _defaults() -> dict[str, Any]:
    """Read the options that the checkout's pyproject.toml sets."""
    try:
        toplevel = git(Path.cwd(), "rev-parse", "--show-toplevel").strip()
    except (GitError, FileNotFoundError):
        return {}  # The search itself reports a missing repository.
    return read_settings(Path(toplevel)).options


bisect = BisectGroup(
    "bisect", commands={command.name or "": command for command in (log, mark, status, undo, visualize)}
)
