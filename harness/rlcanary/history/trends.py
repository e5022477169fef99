"""Show a metric's history: a sparkline, and a table with the steps marked."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from rlcanary.history.changepoints import ChangePoint, find_levels
from rlcanary.history.covariates import WINDOW, adjust
from rlcanary.history.history import Series
from rlcanary.history.index import Run
from rlcanary.system.printable import counted

BARS = "▁▂▃▄▅▆▇█"
SPARKLINE_WIDTH = 60
EFFECTS_LISTED = 3
DAY_S = 86400
FIRST_DAY = 3  # the epoch began on a Thursday
DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")


class Trend:
    """A series with its change points.

    Attributes:
        measured: the indices of the series' points that are finite.
        values: the values of these points, without the effects of covariates.
        effects: by the name of a covariate, the effect of each of its labels in the metric's units.
        steps: maps an index into the series' points to the change point that begins there, whose own indices count the
            series' points too.
        slope: the change from run to run of a series that drifts, else None.
    """

    def __init__(self, series: Series) -> None:
        self.series = series
        self.measured = [index for index, value in enumerate(series.values) if value is not None]
        self.values = np.array([series.values[index] for index in self.measured], dtype=np.float64)
        self.effects: dict[str, dict[str, float]] = {}
        for name, labels in self._covariates().items():
            self.values, effects = adjust(self.values, labels)
            if effects:
                self.effects[name] = {_shown_label(name, label): effect for label, effect in effects.items()}
        levels = find_levels(self.values)
        self.slope = levels.slope
        self.steps: dict[int, ChangePoint] = {}
        for change in levels.steps:
            first, earliest, latest = (self.measured[index] for index in (change.index, change.earliest, change.latest))
            self.steps[first] = replace(change, index=first, earliest=earliest, latest=latest)

    def _covariates(self) -> dict[str, list[Hashable]]:
        """Returns the labels of the measured runs, by covariate."""
        if len(self.values) < WINDOW:
            return {}
        runs = list(self.series.runs)
        if len(self.measured) < len(runs):
            runs = [runs[index] for index in self.measured]
        starts = np.array([run.started_s for run in runs])
        return {
            "environment": [run.environment for run in runs],
            "host": [run.host for run in runs],
            "day of the week": ((starts // DAY_S + FIRST_DAY) % len(DAYS)).astype(np.int64).tolist(),
        }

    @property
    def largest(self) -> int | None:
        """Returns the index of the largest step, None if there is no step."""
        return max(self.steps, key=lambda index: abs(self.steps[index].step), default=None)


def _shown_label(covariate: str, label: Hashable) -> str:
    return DAYS[label] if covariate == "day of the week" and isinstance(label, int) else str(label or "unknown")


def sparkline(values: Sequence[float | None], width: int = SPARKLINE_WIDTH) -> str:
    """Draws one character for each value, and a blank for a missing one.

    More than `width` values are drawn as means of neighbouring ones.
    """
    columns = min(width, len(values))
    means: list[float | None] = []
    for column in range(columns):
        bucket = values[column * len(values) // columns : (column + 1) * len(values) // columns]
        present = [value for value in bucket if value is not None]
        means.append(math.fsum(present) / len(present) if present else None)
    known = [mean for mean in means if mean is not None]
    if not known:
        return " " * columns
    low, high = min(known), max(known)
    if low == high:
        return "".join(" " if mean is None else BARS[len(BARS) // 2] for mean in means)
    return "".join(
        " " if mean is None else BARS[round((mean - low) / (high - low) * (len(BARS) - 1))] for mean in means
    )


def trend_table(trend: Trend, last: int) -> Table:
    """Builds a table of date, commit, value and change for the newest `last` runs (0: all).

    Steps are marked, the largest one in bold.
    """
    series = trend.series
    total = len(series.values)
    first = max(0, total - last) if last else 0
    table = Table(title=Text(f"{series.name} ({_shown_of(total - first, total)})"))
    table.add_column("Date (UTC)", overflow="fold")
    table.add_column("Commit", no_wrap=True)
    table.add_column("Value", justify="right", no_wrap=True)
    table.add_column("Change", justify="right", no_wrap=True)
    table.add_column("Step", overflow="fold")
    previous = series.values[first - 1] if first else None
    for index, (run, value) in enumerate(zip(series.runs[first:], series.values[first:], strict=True), start=first):
        step = trend.steps.get(index)
        mark = (
            Text(f"◀ {step_size(step)}", style="bold red" if index == trend.largest else "yellow") if step else Text("")
        )
        table.add_row(
            f"{run.start:%Y-%m-%d %H:%M:%S}",
            commit_text(run),
            "not finite" if value is None else f"{value:.6g}",
            change_text(previous, value),
            mark,
        )
        previous = value
    return table


def describe_step(step: ChangePoint) -> str:
    """Describes the step from level to level in percent, and in standard deviations of the noise if the metric has noise."""
    return f"{step.before:.4g} → {step.after:.4g}, {step_size(step)}"


def relative_size(step: ChangePoint) -> str:
    """Returns the step in percent of the level before; from 0, in the metric's units."""
    return size_text(step.step, step.relative_step, None)


def step_size(step: ChangePoint) -> str:
    return size_text(step.step, step.relative_step, step.noise_units)


def size_text(change: float, relative: float | None, noise_units: float | None) -> str:
    """Returns a change in percent, or in the metric's units if `relative` is None, and in sigmas of the noise if known."""
    size = f"{change:+.3g}" if relative is None else f"{100 * relative:+.3g} %"
    return size if noise_units is None else f"{size} ({abs(noise_units):.1f} sigma)"


def effects_text(name: str, effects: dict[str, float]) -> str:
    """Describes what was taken out of the values for a covariate, the largest effects first."""
    sizes = sorted(effects.items(), key=lambda effect: -abs(effect[1]))[:EFFECTS_LISTED]
    return f"adjusted for the {name}: " + ", ".join(f"{label} {size:+.3g}" for label, size in sizes)


def change_text(before: float | None, after: float | None) -> str:
    if before is None or after is None:
        return ""
    if before == after:
        return "="
    return f"{100 * (after - before) / abs(before):+.2f} %" if before else f"{after - before:+.4g}"


def commit_text(run: Run) -> str:
    return "none" if run.git_commit is None else run.git_commit[:10] + ("+" if run.dirty else "")


def _shown_of(shown: int, total: int) -> str:
    runs = counted(total, "run")
    return runs if shown == total else f"newest {shown} of {runs}"


def trend_document(trend: Trend) -> dict[str, Any]:
    """Builds the JSON of a trend: values, change points, and the index of the largest step."""
    series = trend.series
    return {
        "metric": series.name,
        "runs": [
            {
                "run_id": run.run_id,
                "start_time_utc": run.start.isoformat(),
                "git_commit": run.git_commit,
                "dirty": run.dirty,
                "exit_status": run.exit_status,
                "value": value,
            }
            for run, value in zip(series.runs, series.values, strict=True)
        ],
        "change_points": [
            {
                "index": index,
                "earliest": step.earliest,
                "latest": step.latest,
                "last_before": series.runs[index - 1].git_commit,
                "first_after": series.runs[index].git_commit,
                "before": step.before,
                "after": step.after,
                "relative_step": step.relative_step,
                "noise_units": step.noise_units,
            }
            for index, step in trend.steps.items()
        ],
        "largest_step": trend.largest,
        "drift_per_run": trend.slope,
        "effects": trend.effects,
    }
