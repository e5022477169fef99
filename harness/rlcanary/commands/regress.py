"""Show which metrics became worse, since which commit."""

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from rlcanary.commands.parts.history_options import Callback, history_options, open_history, warn, with_progress
from rlcanary.console import PLAIN_WIDTH, report_console
from rlcanary.errors import UserError
from rlcanary.history.changepoints import MIN_RUNS
from rlcanary.history.directions import Direction, Rule, direction_of, matches, parse_rules
from rlcanary.history.history import History, counted, metric_name, nearest_names
from rlcanary.history.regressions import Regression, Status, find_regression, too_short
from rlcanary.history.repository import top_level
from rlcanary.history.run_result import read_json
from rlcanary.history.settings import Settings, pytest_settings
from rlcanary.history.trends import commit_text, size_text
from rlcanary.recording.keys import plain_key
from rlcanary.recording.provenance import environment_change

PROBE = "regress_probe.json"
STYLES = {Status.WORSE: "bold red", Status.UNCONFIRMED: "yellow", Status.MOVED: "yellow"}
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
    help="Look for changes in this many of the newest runs.",
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
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def regress(
    patterns: tuple[str, ...],
    folder: Path | None,
    any_project: bool,
    newest: int,
    least_change: float,
    as_json: bool,
    **declared: tuple[str, ...],
) -> int:
    """Show which metrics became worse in the newest runs, since which commit, and the command that bisects it.

    METRIC limits this to some metrics; `*` stands for any text, here and in the options. Which way a metric is better is
    said by the options, else by `rlcanary_directions` in pytest's settings, else by the words of its name.

    Exit codes: 0 nothing is worse, 1 something is, 2 usage error, 3 internal error.
    """
    settings = pytest_settings(Path.cwd())
    options = [Rule(pattern, Direction(name)) for name, listed in declared.items() for pattern in listed]
    rules = options + parse_rules(settings.lines("rlcanary_directions"))
    with open_history(folder, any_project) as history:
        known = list(history.metrics())
        require_matches([*patterns, *(rule.pattern for rule in options)], known)
        pairs = [
            pair for pair in known if not patterns or any(matches(pattern, metric_name(*pair)) for pattern in patterns)
        ]
        found, left_out, short, others = [], [], 0, 0
        for pair in with_progress(pairs, "looking for changes", many=50):
            series = history.numbers(*pair)
            if series is None:
                others += 1
                continue
            if series.left_out:
                left_out.append(series.left_out)
            short += too_short(series)
            regression = find_regression(series, direction_of(*pair, rules), newest, least_change / 100)
            if regression is not None:
                found.append(regression)
        found.sort(key=lambda regression: (list(Status).index(regression.status), regression.series.name))
        notes = [notes_on(regression, history, settings) for regression in found]
    warn(left_out)
    if as_json:
        click.echo(json.dumps([document(*entry) for entry in zip(found, notes, strict=True)], indent=2))
    else:
        runs = min(newest, len(history.runs))
        judged = len(pairs) - short - others
        extent = f"the newest {runs} of {counted(len(history.runs), 'run')}, {counted(judged, 'metric')}"
        print_report(found, notes, extent, short, judged)
    return int(any(regression.status is Status.WORSE for regression in found))


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


class Notes(dict[str, str]):
    """Additional facts about a regression.

    The keys are `command`, or `no_command` (the reason for its absence). `environment` and `tests` (the tests that
    share the key) are present if there is something to report.
    """


def notes_on(regression: Regression, history: History, settings: Settings) -> Notes:
    notes = Notes()
    good, bad = regression.last_good.run, regression.first_bad.run
    if good.environment and bad.environment and good.environment != bad.environment:
        documents = [read_json(history.folder / run.file) for run in (good, bad)]
        notes["environment"] = environment_change(*(getattr(read, "document", {}) for read in documents))
    if len(regression.series.nodeids) > 1:
        notes["tests"] = regression.series.mixed_tests
    if not (good.git_commit and bad.git_commit):
        notes["no_command"] = "no commit was recorded, so there is nothing to bisect"
    elif good.git_commit == bad.git_commit:
        notes["no_command"] = f"both runs are of commit {good.git_commit[:10]}: the change is not in the code" + (
            ", unless in uncommitted files (+)" if good.dirty or bad.dirty else ""
        )
    elif not regression.series.nodeids:
        notes["no_command"] = (
            "no test is recorded for this metric; bisect with a command of your own between the two commits"
        )
    else:
        notes["command"] = bisect_command(regression, settings.root)
    return notes


def bisect_command(regression: Regression, root: Path) -> str:
    """Return a shell command that bisects the metric on its value, or on being finite if it no longer is."""
    nodeid = list(regression.series.nodeids)[-1]
    commits = [point.run.git_commit or "" for point in (regression.last_good, regression.first_bad)]
    ends = f"rlcanary bisect --good {shlex.quote(commits[0][:12])} --bad {shlex.quote(commits[1][:12])}"
    if regression.after is None:
        value = f"data[{quoted('metrics')}][{quoted(plain_key(nodeid))}][{quoted(regression.series.metric)}]"
        probe = (
            f"pytest {shlex.quote(nodeid)} --rlcanary-results={PROBE}; [ $? -le 1 ] || exit 125; "
            f"rlcanary check-metrics {PROBE} {shlex.quote(f'abs({value}) >= 0')}"  # True for finite values.
        )
        line = f"{ends} -- bash -c {shlex.quote(probe)}"
    else:
        worse = "higher" if regression.after > regression.before else "lower"
        name = metric_name(plain_key(nodeid), regression.series.metric)
        line = f"{ends} --metric {shlex.quote(name)} --worse {worse} -- pytest {shlex.quote(nodeid)}"
    here = Path.cwd()
    place = root if top_level(here) == top_level(root) else here
    return line if place == here else f"cd {shlex.quote(os.path.relpath(place, here))} && {line}"


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def print_report(found: list[Regression], notes: list[Notes], extent: str, short: int, judged: int) -> None:
    """Print the regressions and a summary.

    Args:
        found: The regressions.
        notes: Their additional facts.
        extent: The runs and metrics that were searched, in words.
        short: The number of metrics with too few runs.
        judged: The number of metrics with enough runs.
    """
    console = report_console(highlight=False)
    if not judged and not found:
        console.print("Nothing was judged.")
    elif not found:
        console.print(f"Nothing is worse in {extent}.")
    else:
        console.print(regression_table(found, f"Changes in {extent}", console.width))
        for regression, note in zip(found, notes, strict=True):
            console.print(Text(regression.series.name, style="bold"))
            for line in note_lines(regression, note):
                console.print(f"  {line}", soft_wrap=True, markup=False)
    if short:
        have = "has" if short == 1 else "have"
        console.print(f"{counted(short, 'metric')} {have} too few runs to judge a change (fewer than {MIN_RUNS}).")


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
    if regression.status is Status.UNCONFIRMED:
        lines.append("only the newest runs are out of line; run the test again to tell a change from an outlier")
    if regression.status is Status.MOVED:
        lines.append(
            "whether lower or higher is better is unknown; set it with --lower, --higher, --stable or --ignore"
        )
    return [*lines, notes.get("command") or notes["no_command"]]


def document(regression: Regression, notes: Notes) -> dict[str, Any]:
    return {
        "metric": regression.series.name,
        "status": regression.status,
        "better": regression.direction,
        "before": regression.before,
        "after": regression.after,
        "relative_change": regression.relative,
        "noise": regression.noise,
        "noise_units": regression.noise_units,
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
