"""One HTML page: what is worse now and what to do about it, and a plot of every metric, its steps marked."""

import datetime
import json
import math
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

from rlcanary.history.changepoints import ChangePoint
from rlcanary.history.directions import Direction
from rlcanary.history.history import History, Series
from rlcanary.history.index import Run
from rlcanary.history.regressions import Regression, is_worse
from rlcanary.history.run_result import read_json
from rlcanary.history.trends import Trend, commit_text, effects_text, relative_size, size_text, step_size
from rlcanary.html.frame import fill, theme
from rlcanary.known_issues import PRIORITIES, Issue
from rlcanary.recording.provenance import environment_change

RESOLUTION = 5000  # heights that a plotted value can have; the page is not to be larger than what it shows

DIGITS = 4  # significant ones that a value keeps, however far another one is away


def report_document(
    history: History,
    metrics: Iterable[tuple[Series, Direction | None]],
    last: int,
    title: str,
    now: Iterable[dict[str, Any]] = (),
    issues: Iterable[Issue] = (),
    web: str | None = None,
) -> dict[str, Any]:
    """Builds the data of the page.

    Args:
        history: The runs.
        metrics: What is plotted: values, the indices of their runs, steps.
        last: Plot this many of the newest runs; 0 for all.
        title: The title of the page.
        now: What became worse, the most urgent first: `regression_document` of each.
        issues: The registry of known issues.
        web: The https address of the repository, to whose commits the page links.
    """
    shown_runs = list(history.runs[-last:] if last else history.runs)
    index = {run.run_id: number for number, run in enumerate(shown_runs)}
    plotted = []
    for series, direction in metrics:
        newest = series.newest(sum(run.run_id in index for run in series.runs))
        if newest.values:
            plotted.append(metric_document(newest, direction, index))
    return {
        "title": title,
        "web": web,
        "generated": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        "total": len(history.runs),
        "runs": [
            {"date": f"{run.start:%Y-%m-%d %H:%M}", "commit": run.git_commit, "dirty": run.dirty} for run in shown_runs
        ],
        "metrics": plotted,
        "now": list(now),
        "issues": [
            {
                "id": issue.id,
                "reason": issue.reason,
                "priority": issue.priority,
                "owner": issue.owner,
                "until": str(issue.until or ""),
                "upstream": issue.upstream,
            }
            for issue in sorted(issues, key=lambda issue: (PRIORITIES.index(issue.priority), issue.id))
        ],
        "environments": environment_changes(history, shown_runs),
    }


def environment_changes(history: History, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Lists the runs [at] in which an environment was seen for the first time, with what changed in it."""
    changes: list[dict[str, Any]] = []
    seen: dict[str, Run] = {}
    before: Run | None = None
    for at, run in enumerate(runs):
        if run.environment is None:
            continue
        if before is not None and run.environment not in seen:
            documents = [read_json(history.folder / each.file) for each in (before, run)]
            text = environment_change(*(getattr(read, "document", {}) for read in documents))
            changes.append({"at": at, "text": text})
        seen[run.environment] = before = run
    return changes


def regression_document(regression: Regression, notes: dict[str, str]) -> dict[str, Any]:
    """Builds an entry of the page's first part."""
    change = None if regression.after is None else regression.after - regression.before
    return {
        "key": regression.series.key,
        "name": regression.series.metric,
        "status": regression.status,
        "kind": regression.kind,
        "before": regression.before,
        "after": regression.after,
        "size": "" if change is None else size_text(change, regression.relative, regression.noise_units),
        "since": f"{regression.first_bad.run.start:%Y-%m-%d}",
        "between": [commit_text(point.run) for point in (regression.last_good, regression.first_bad)],
        "commits": [point.run.git_commit or "" for point in (regression.last_good, regression.first_bad)],
        "note": regression.note,
        "facts": [
            *([f"the environment changed: {notes['environment']}"] if "environment" in notes else []),
            *([notes["tests"]] if "tests" in notes else []),
        ],
        "command": notes.get("command", ""),
        "no_command": notes.get("no_command", ""),
    }


def metric_document(series: Series, direction: Direction | None, index: dict[str, int]) -> dict[str, Any]:
    trend = Trend(series)
    remarks = [effects_text(*entry) for entry in trend.effects.items()]
    if trend.slope is not None:
        remarks.append(f"drifts by {trend.slope:+.3g} from run to run")
    return {
        "key": series.key,
        "name": series.metric,
        "runs": [index[run.run_id] for run in series.runs],
        "values": plotted_values(series.values),
        "remarks": remarks,
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
            for at, step in trend.steps.items()
        ],
    }


def plotted_values(values: Sequence[float | None]) -> list[float | None]:
    """Rounds values to the digits that a plot of all of them can show, but none to fewer than it is named with."""
    finite = [value for value in values if value is not None]
    span = max(finite) - min(finite) if finite else 0.0
    if span == 0 or not math.isfinite(span):
        return list(values)
    digits = math.ceil(math.log10(RESOLUTION) - math.log10(span))

    def rounded(value: float) -> float:
        own = DIGITS - 1 - math.floor(math.log10(abs(value))) if value else 0
        return round(value, max(digits, own))

    return [None if value is None else rounded(value) for value in values]


def kind_of(step: ChangePoint, direction: Direction | None) -> str:
    if direction is None or direction is Direction.IGNORE:
        return "moved"
    return "worse" if is_worse(step.step, direction) else "better"


def fill_page(document: dict[str, Any]) -> str:
    template = resources.files("rlcanary.history").joinpath("report.html").read_text(encoding="utf-8")
    # No name of a test may end the script element that holds the data.
    data = json.dumps(document, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return fill(template, THEME=theme(), DATA=data)
