"""Show how a tracked metric moved over runs and commits."""

import json
from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from rlcanary.commands.parts.history_options import history_options, open_history, read_with_progress, warn
from rlcanary.console import report_console
from rlcanary.history.history import History, find_history, load_history, metric_name, results_files
from rlcanary.history.repository import require_own_project
from rlcanary.system.printable import counted

STEPS_LISTED = 10


@click.command()
@click.argument("metric", required=False)
@history_options
@click.option(
    "--jq",
    "expression",
    metavar="EXPR",
    help="Apply a jq expression to every results file, as `jq -r EXPR FILES` does.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option(
    "--last",
    type=click.IntRange(min=0),
    default=30,
    show_default=True,
    metavar="RUNS",
    help="Show this many of the newest runs; 0 for all.",
)
def trend(
    metric: str | None, folder: Path | None, any_project: bool, expression: str | None, as_json: bool, last: int
) -> int:
    """Show how METRIC moved over runs and commits, and where it stepped.

    METRIC is a test's key and a metric's name, such as `test_loss::test_clip.max_ratio`. Without METRIC, every metric
    is listed.

    Exit codes: 0 success, 1 the --jq expression failed on a file, 2 usage error, 3 internal error.
    """
    if expression is not None:
        if metric is not None or as_json:
            raise click.UsageError("--jq prints by itself: leave METRIC and --json out")
        return print_query(expression, folder or find_history(Path.cwd()), any_project)
    with open_history(folder, any_project) as history:
        if metric is None:
            list_metrics(history, as_json)
        else:
            show_trend(history, metric, as_json, last)
    return 0


def show_trend(history: History, name: str, as_json: bool, last: int) -> None:
    from rlcanary.history.trends import Trend, describe_step, effects_text, sparkline, trend_document, trend_table

    trend = Trend(history.series(name))
    series = trend.series
    if series.left_out:
        warn([series.left_out])
    if len(series.nodeids) > 1:
        warn([series.mixed_tests])
    if as_json:
        click.echo(json.dumps(trend_document(trend), indent=2))
        return
    console = report_console()
    console.print(trend_table(trend, last))
    console.print(sparkline(series.values), highlight=False, markup=False, soft_wrap=True)
    for covariate, effects in trend.effects.items():
        console.print(effects_text(covariate, effects), highlight=False, markup=False)
    if trend.slope is not None:
        console.print(f"it drifts by {trend.slope:+.3g} from run to run", highlight=False)
    for index in sorted(trend.steps)[-STEPS_LISTED:]:
        step = trend.steps[index]
        before, after = (series.runs[place].git_commit or "no commit" for place in (step.earliest - 1, step.latest))
        line = f"{series.runs[index].start:%Y-%m-%d}: {describe_step(step)}, between {before[:10]} and {after[:10]}"
        console.print(line, style="bold" if index == trend.largest else None, highlight=False, markup=False)
    if len(trend.steps) > STEPS_LISTED:
        console.print(f"and {len(trend.steps) - STEPS_LISTED} earlier steps", highlight=False)


def list_metrics(history: History, as_json: bool) -> None:
    metrics = {metric_name(*pair): runs for pair, runs in history.metrics().items()}
    if as_json:
        click.echo(json.dumps(metrics, indent=2))
        return
    runs = counted(len(history.runs), "run")
    if not metrics:
        click.echo(f"No test tracked anything in {runs}; a test that takes the `tracker` fixture does.")
        return
    table = Table(title=f"Metrics of {runs}")
    table.add_column("Metric", overflow="fold")
    table.add_column("Runs", justify="right")
    for name, count in metrics.items():
        table.add_row(Text(name), str(count))
    report_console().print(table)


def print_query(expression: str, folder: Path, any_project: bool) -> int:
    from rlcanary.history.jq_query import QueryError, run_query

    results = run_query(expression, results_files(folder))
    with load_history(folder, read_with_progress) as history:
        if not any_project:
            require_own_project(history, Path.cwd())
    status = 0
    for result in results:
        if isinstance(result, str):
            click.echo(result)
            continue
        warn([result])
        if isinstance(result, QueryError):
            status = 1
    return status
