"""Write one HTML page with a plot of every metric."""

from pathlib import Path

import click

from rlcanary.commands.parts.current_regressions import look
from rlcanary.commands.parts.history_options import history_options, open_history, warn, with_progress
from rlcanary.errors import UserError
from rlcanary.history.directions import direction_of, parse_rules
from rlcanary.history.report import fill_page, regression_document, report_document
from rlcanary.history.repository import web_address
from rlcanary.known_issues import FILE_NAME, read_issues
from rlcanary.system.files import require_writable, write_whole
from rlcanary.system.printable import counted
from rlcanary.system.pytest_settings import pytest_settings


@click.command()
@history_options
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The page [default: .html beside the folder of results].",
)
@click.option(
    "--last",
    type=click.IntRange(min=0),
    default=1000,
    show_default=True,
    metavar="RUNS",
    help="Plot this many of the newest runs; 0 for all.",
)
def report(folder: Path | None, any_project: bool, output: Path | None, last: int) -> int:
    """Write one HTML page: what is worse now and what to do about it, known issues, and a plot of every metric.

    The page needs no network and no other file.
    """
    settings = pytest_settings(Path.cwd())
    rules = parse_rules(settings.lines("rlcanary_directions"))
    with open_history(folder, any_project) as history:
        page = output or history.folder.with_name(f"{history.folder.name}.html")
        require_writable(page)
        pairs = history.names()
        metrics, left_out = [], []
        for pair in with_progress(pairs, "drawing", many=50):
            series = history.numbers(*pair)
            if series is not None:
                if series.left_out:
                    left_out.append(series.left_out)
                metrics.append((series, direction_of(*pair, rules)))
        if not metrics:
            raise UserError(f"no metric in {history.folder} is a number, so there is nothing to plot")
        seen = look(history, pairs, rules, settings, keep=False)
        now = [regression_document(*entry) for entry in zip(seen.found, seen.notes, strict=True)]
        registry = settings.root / (settings.text("rlcanary_known_issues") or FILE_NAME)
        issues = read_issues(registry) if registry.exists() else []
        web = web_address(history.folder) or web_address(settings.root)
        title = f"Metrics of {settings.root.resolve().name}"
        document = report_document(history, metrics, last, title, now, issues, web)
    write_whole(page, fill_page(document))
    others = len(pairs) - len(metrics)
    warn(left_out)
    without = f"; without {counted(others, 'metric')} of text or other values that are not numbers" if others else ""
    click.echo(f"{page}: {counted(len(metrics), 'metric')} of {counted(len(history.runs), 'run')}{without}")
    return 0
