"""One HTML page with a plot of every metric, its steps marked."""

import datetime
import json
import math
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

from rlcanary.history.changepoints import ChangePoint
from rlcanary.history.directions import Direction
from rlcanary.history.history import History, Series
from rlcanary.history.regressions import is_worse
from rlcanary.history.trends import Trend, relative_size, step_size
from rlcanary.html.frame import fill, theme

RESOLUTION = 5000  # heights that a plotted value can have; the page is not to be larger than what it shows


def report_document(
    history: History, metrics: Iterable[tuple[Series, Direction | None]], last: int, title: str
) -> dict[str, Any]:
    """Builds the data of the page: the runs, and per metric its values, the indices of their runs and its steps."""
    shown_runs = list(history.runs[-last:] if last else history.runs)
    index = {run.run_id: number for number, run in enumerate(shown_runs)}
    plotted = []
    for series, direction in metrics:
        newest = series.newest(sum(run.run_id in index for run in series.runs))
        if newest.values:
            plotted.append(metric_document(newest, direction, index))
    return {
        "title": title,
        "generated": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        "total": len(history.runs),
        "runs": [
            {"date": f"{run.start:%Y-%m-%d %H:%M}", "commit": run.git_commit, "dirty": run.dirty} for run in shown_runs
        ],
        "metrics": plotted,
    }


def metric_document(series: Series, direction: Direction | None, index: dict[str, int]) -> dict[str, Any]:
    return {
        "key": series.key,
        "name": series.metric,
        "runs": [index[run.run_id] for run in series.runs],
        "values": plotted_values(series.values),
        "steps": [
            {
                "at": at,
                "before": step.before,
                "after": step.after,
                "share": step.relative_step,
                "size": relative_size(step),
                "text": step_size(step),
                "kind": kind_of(step, direction),
            }
            for at, step in Trend(series).steps.items()
        ],
    }


def plotted_values(values: Sequence[float | None]) -> list[float | None]:
    """Rounds values to the digits that a plot of all of them can show."""
    finite = [value for value in values if value is not None]
    span = max(finite) - min(finite) if finite else 0.0
    if span == 0 or not math.isfinite(span):
        return list(values)
    digits = math.ceil(math.log10(RESOLUTION) - math.log10(span))
    return [None if value is None else round(value, digits) for value in values]


def kind_of(step: ChangePoint, direction: Direction | None) -> str:
    if direction is None or direction is Direction.IGNORE:
        return "moved"
    return "worse" if is_worse(step.step, direction) else "better"


def fill_page(document: dict[str, Any]) -> str:
    template = resources.files("rlcanary.history").joinpath("report.html").read_text(encoding="utf-8")
    # No name of a test may end the script element that holds the data.
    data = json.dumps(document, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return fill(template, THEME=theme(), DATA=data)
