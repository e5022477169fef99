"""`rlcanary bisect`."""

from pathlib import Path

import click

from rlcanary.errors import UserError
from rlcanary.files import require_writable, write_whole


@click.command("bisect", context_settings={"allow_interspersed_args": False})
@click.option("--good", metavar="REF", help="A commit where the command passes.")
@click.option("--bad", metavar="REF", help="A commit where it fails.")
@click.option("--good-when-added", metavar="PATH", help="Take as GOOD the newest commit that added this file.")
@click.option(
    "--timeout", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS", help="End a run after this long."
)
@click.option("--skip-good-check", is_flag=True, help="Believe that GOOD passes.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), metavar="FILE", help="Write the result as JSON.")
@click.option(
    "--save-dir", type=click.Path(path_type=Path), metavar="DIR", help="Where the log goes; default bisect-logs/."
)
@click.option(
    "--replay", type=click.Path(path_type=Path), metavar="LOG", help="Take over the outcomes of a bisect log."
)
@click.option("--pin", multiple=True, metavar="PATH", help="Use this file of the checkout on every commit; repeatable.")
@click.option("--no-pin", is_flag=True, help="Let the command's own script follow the history.")
@click.option("--keep-worktree", is_flag=True, help="Leave the worktree in place at the end.")
@click.option("--fresh", is_flag=True, help="Do not continue a search that was cut short.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def bisect(
    good: str | None,
    bad: str | None,
    good_when_added: str | None,
    timeout: float | None,
    skip_good_check: bool,
    json_file: Path | None,
    save_dir: Path | None,
    replay: Path | None,
    pin: tuple[str, ...],
    no_pin: bool,
    keep_worktree: bool,
    fresh: bool,
    command: tuple[str, ...],
) -> int:
    """Find the commit that broke COMMAND.

    COMMAND runs on commits between GOOD and BAD in a worktree of its own; your checkout is not touched. Its exit code
    says what a commit is: 0 good, 125 untestable, other bad.

    Exit codes: 0 the commit was found, 1 untestable commits leave several, 2 the search could not start, 128 + N stopped by
    signal N.
    """
    from rlcanary.bisect.display import Display, result_json
    from rlcanary.bisect.plan import Request, make_plan
    from rlcanary.bisect.process import Interrupts
    from rlcanary.bisect.session import Session

    request = Request(
        command=command,
        good=good,
        bad=bad,
        good_when_added=good_when_added,
        timeout=timeout,
        skip_good_check=skip_good_check,
        save_dir=save_dir,
        replay=replay,
        pin=pin,
        automatic_pins=not no_pin,
        keep_worktree=keep_worktree,
        fresh=fresh,
    )
    if json_file is not None:
        require_writable(json_file)
    plan = make_plan(request, Path.cwd())
    with Interrupts() as interrupts, Display() as display:
        display.plan(plan)
        report = Session(request, plan, display, interrupts).run()
    if json_file is not None:
        write_whole(json_file, result_json(report, plan, command).encode())
    if report.status == "refused":
        raise UserError(report.message)
    if report.status == "interrupted":
        click.echo(f"log: {report.log}", err=True)
        click.echo(report.message, err=True)
    else:
        display.summary(report, plan.repository)
    return report.exit_code
