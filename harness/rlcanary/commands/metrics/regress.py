"""Show which metrics became worse, since which commit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from rlcanary.commands.parts.current_regressions import Look, Notes, look
from rlcanary.commands.parts.history_options import Callback, history_options, open_history, warn
from rlcanary.console import PLAIN_WIDTH, report_console
from rlcanary.errors import UserError
from rlcanary.history.changepoints import MIN_RUNS
from rlcanary.history.directions import Direction, Rule, matches, parse_rules
from rlcanary.history.history import metric_name, nearest_names
from rlcanary.history.regressions import Kind, Regression, Status
from rlcanary.history.trends import commit_text, effects_text, size_text
from rlcanary.system.printable import counted
from rlcanary.system.pytest_settings import pytest_settings

STYLES = {Status.NEW: "bold red", Status.UNCONFIRMED: "yellow", Status.MOVED: "yellow", Status.KNOWN: "red"}
BETTER = {Direction.LOWER: "lower", Direction.HIGHER: "higher", Direction.STABLE: "stable", None: "?"}


def direction_option(direction: Direction, summary: str) -> Callable[[Callback], Callback]:
    return click.option(f"--{direction}", multiple=True, metavar="METRIC", help=summary)


@click.command()
@click.argument("patterns", nargs=-1, metavar="[METRIC]...")
@history_options
@click.option(
    "--newest",
    type=click.IntRange(min=1),
    default=30,
    show_default=True,
    metavar="RUNS",
    help="In a metric that is looked at for the first time, changes within this many of the newest runs are new.",
)
@click.option(
    "--least-change",
    type=click.FloatRange(min=0),
    default=0.1,
    show_default=True,
    metavar="PERCENT",
    help="Ignore smaller changes.",
)
@direction_option(Direction.LOWER, "Lower is better for METRIC; repeatable.")
@direction_option(Direction.HIGHER, "Higher is better for METRIC.")
@direction_option(Direction.STABLE, "METRIC must not move.")
@direction_option(Direction.IGNORE, "METRIC does not matter.")
@click.option(
    "--acknowledge", metavar="METRIC", help="Acknowledge the known regressions of METRIC: they are no longer listed."
)
@click.option("--note", default="", metavar="TEXT", help="Reason for --acknowledge.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def regress(
    patterns: tuple[str, ...],
    folder: Path | None,
    any_project: bool,
    newest: int,
    least_change: float,
    acknowledge: str | None,
    note: str,
    as_json: bool,
    **declared: tuple[str, ...],
) -> int:
    """Show which metrics became worse, since which commit, and the command that bisects it.

    A regression is new in the run that makes it certain, and known from then on until it is mended. One that noise might
    explain is to be confirmed by further runs.

    METRIC limits this to some metrics; `*` stands for any text, here and in the options. Which way a metric is better is
    said by the options, else by `rlcanary_directions` in pytest's settings, else by the words of its name.

    Exit codes: 0 nothing is newly worse, 1 something is, 2 usage error, 3 internal error.
    """
    settings = pytest_settings(Path.cwd())
    options = [Rule(pattern, Direction(name)) for name, listed in declared.items() for pattern in listed]
    rules = options + parse_rules(settings.lines("rlcanary_directions"))
    if note and acknowledge is None:
        raise click.UsageError("--note says why something is acknowledged: give --acknowledge METRIC")
    with open_history(folder, any_project) as history:
        known = history.names()
        require_matches([*patterns, *(rule.pattern for rule in options)], known)
        pairs = [
            pair for pair in known if not patterns or any(matches(pattern, metric_name(*pair)) for pattern in patterns)
        ]
        seen = look(
            history,
            pairs,
            rules,
            settings,
            least_change=least_change / 100,
            recent=newest,
            acknowledge=None if acknowledge is None else (acknowledge, note),
        )
        runs = counted(len(history.runs), "run")
    warn(seen.left_out)
    if as_json:
        click.echo(json.dumps([document(*entry) for entry in zip(seen.found, seen.notes, strict=True)], indent=2))
    else:
        print_report(seen, f"{runs}, {counted(seen.judged, 'metric')}")
    return int(any(regression.status is Status.NEW for regression in seen.found))


def require_matches(patterns: list[str], known: list[tuple[str, str]]) -> None:
    """Check that every pattern matches a metric.

    Raises:
        UserError: A pattern matches none.
    """
    for pattern in patterns:
        if not any(matches(pattern, metric_name(*pair)) for pair in known):
            nearest = nearest_names(pattern, [metric_name(*pair) for pair in known])
            hint = f"the nearest are {', '.join(nearest)}" if nearest else "`rlcanary trend` lists them all"
            raise UserError(f"no metric matches {pattern!r}; {hint}")


def print_report(seen: Look, extent: str) -> None:
    """Print the regressions and a summary. `extent` are the runs and metrics that were searched, in words."""
    console = report_console(highlight=False)
    shown = [pair for pair in zip(seen.found, seen.notes, strict=True) if pair[0].status is not Status.ACKNOWLEDGED]
    if not seen.judged and not seen.found:
        console.print("Nothing was judged.")
    elif not any(regression.status in (Status.NEW, Status.KNOWN) for regression, _ in shown):
        console.print(f"Nothing is worse in {extent}.")
    if shown:
        console.print(regression_table([regression for regression, _ in shown], f"Changes in {extent}", console.width))
        for regression, notes in shown:
            console.print(Text(regression.series.name, style="bold"))
            for line in note_lines(regression, notes):
                console.print(f"  {line}", soft_wrap=True, markup=False)
    if acknowledged := len(seen.found) - len(shown):
        console.print(f"{counted(acknowledged, 'change')} that somebody has acknowledged: see --json.")
    if seen.short:
        have = "has" if seen.short == 1 else "have"
        console.print(f"{counted(seen.short, 'metric')} {have} too few runs to judge a change (fewer than {MIN_RUNS}).")


def regression_table(found: list[Regression], title: str, width: int) -> Table:
    """Make a table with a row per regression. On a narrow terminal the columns are merged, so that nothing is cut off."""
    narrow = width < PLAIN_WIDTH
    table = Table(title=title)
    table.add_column("Status", no_wrap=True)
    if narrow:
        table.add_column("Change", overflow="fold")
    else:
        table.add_column("Metric", overflow="fold")
        table.add_column("Better", no_wrap=True)
        table.add_column("Before → now", justify="right", overflow="fold")
        table.add_column("Change", justify="right", overflow="fold")
        table.add_column("Since (UTC)", no_wrap=True)
        table.add_column("Last good … first bad", no_wrap=True)
    for regression in found:
        name, better, size = regression.series.name, BETTER[regression.direction], ""
        if regression.after is not None:
            change = regression.after - regression.before
            size = size_text(change, regression.relative, regression.noise_units)
        values = f"{regression.before:.4g} → {'not finite' if regression.after is None else f'{regression.after:.4g}'}"
        since = f"{regression.first_bad.run.start:%Y-%m-%d}"
        commits = f"{commit_text(regression.last_good.run)} … {commit_text(regression.first_bad.run)}"
        cells = [name, better, values, size, since, commits]
        if narrow:
            cells = [f"{name}\n{values}  {size}\nbetter: {better}\n{since}  {commits}"]
        table.add_row(Text(regression.status, style=STYLES[regression.status]), *map(Text, cells))
    return table


def note_lines(regression: Regression, notes: Notes) -> list[str]:
    lines = [f"the environment changed in between: {notes['environment']}"] if "environment" in notes else []
    if "tests" in notes:
        lines.append(notes["tests"])
    if regression.kind is Kind.OUTLIERS:
        lines.append("only the newest runs are out of line; run the test again to tell a change from an outlier")
    elif regression.status is Status.UNCONFIRMED:
        lines.append("further runs will tell whether this lasts; run the test again to know sooner")
    if regression.kind is Kind.DRIFT:
        lines.append(f"it drifts by {regression.trend.slope:+.3g} from run to run; no single run stands out")
    lines += [effects_text(*entry) for entry in regression.trend.effects.items()]
    if regression.status is Status.MOVED:
        lines.append(
            "whether lower or higher is better is unknown; set it with --lower, --higher, --stable or --ignore"
        )
    return [*lines, notes.get("command") or notes["no_command"]]


def document(regression: Regression, notes: Notes) -> dict[str, Any]:
    return {
        "metric": regression.series.name,
        "status": regression.status,
        "kind": regression.kind,
        "note": regression.note,
        "better": regression.direction,
        "before": regression.before,
        "after": regression.after,
        "relative_change": regression.relative,
        "noise": regression.noise,
        "noise_units": regression.noise_units,
        "chance": regression.chance,
        **{
            name: {
                "run_id": point.run.run_id,
                "git_commit": point.run.git_commit,
                "dirty": point.run.dirty,
                "start_time_utc": point.run.start.isoformat(),
            }
            for name, point in (("last_good", regression.last_good), ("first_bad", regression.first_bad))
        },
        **notes,
    }
