"""All runs of a results folder in the order in which they ran, and the series of one metric."""

import datetime
import difflib
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcanary.errors import UserError
from rlcanary.results.store import RunResult, UnreadableFile, read_run


@dataclass(frozen=True)
class Point:
    """One run's measurement of a metric; value is None where it was not a finite number."""

    run_id: str
    start: datetime.datetime  # UTC
    git_commit: str | None
    dirty: bool | None
    exit_status: int | None
    value: float | None


@dataclass(frozen=True)
class Series:
    """One metric over the runs that measured it, oldest first.

    nodeids counts the runs by the test that measured the metric. More than one means that the history mixes tests (or
    that one was moved).
    """

    key: str
    metric: str
    points: list[Point]
    nodeids: dict[str, int]

    @property
    def name(self) -> str:
        return metric_name(self.key, self.metric)


@dataclass(frozen=True)
class History:
    runs: list[RunResult]  # oldest first
    unreadable: list[UnreadableFile]

    def metrics(self) -> dict[tuple[str, str], int]:
        """Every (test key, metric) of the history, sorted, with the number of runs that tracked it."""
        counts = Counter((key, metric) for run in self.runs for key, values in run.metrics.items() for metric in values)
        return dict(sorted(counts.items()))

    def series(self, name: str) -> Series:
        """The series of `<test key>.<metric>`.

        Raises UserError for an unknown name and for a metric that is not a number.
        """
        key, metric = self._resolve(name)
        points = []
        nodeids: Counter[str] = Counter()
        for run in self.runs:
            if metric not in run.metrics.get(key, {}):
                continue
            value = run.metrics[key][metric]
            if not (value is None or isinstance(value, int | float)):
                raise UserError(
                    f"{name} is not a number ({_shortened(value)} in {run.path.name}), so it has no trend; "
                    "look at it with `rlcanary trend --jq EXPR`"
                )
            # Other tools write NaN and Infinity into their JSON.
            finite = float(value) if value is not None and math.isfinite(value) else None
            points.append(Point(run.run_id, run.start, run.git_commit, run.dirty, run.exit_status, finite))
            if key in run.nodeids:
                nodeids[run.nodeids[key]] += 1
        return Series(key, metric, points, dict(nodeids))

    def _resolve(self, name: str) -> tuple[str, str]:
        # Keys and metric names may both hold dots, so a name is looked up rather than split.
        known = self.metrics()
        matches = [pair for pair in known if metric_name(*pair) == name]
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise UserError(
                f"{name} means {' and '.join(f'metric {metric!r} of {key!r}' for key, metric in matches)}; rename one"
            )
        nearest = nearest_names(name, [metric_name(*pair) for pair in known])
        hint = f"the nearest are {', '.join(nearest)}" if nearest else "`rlcanary trend` without a name lists them all"
        raise UserError(f"no run tracked {name!r}; {hint}")


def load_history(folder: Path) -> History:
    """Reads every results file of a folder.

    Raises UserError if there is no such folder or no run in it that can be read.
    """
    if not folder.is_dir():
        raise UserError(f"there is no results folder {folder}; run pytest first, or name the folder with --dir")
    read = [read_run(path) for path in results_files(folder)]
    unreadable = [entry for entry in read if isinstance(entry, UnreadableFile)]
    runs = sorted((entry for entry in read if isinstance(entry, RunResult)), key=lambda run: (run.start, run.run_id))
    if not runs:
        found = f"; unreadable: {'; '.join(map(str, unreadable[:3]))}" if unreadable else ""
        raise UserError(
            f"{folder} holds no results of a run; run pytest first, or name another folder with --dir{found}"
        )
    return History(runs, unreadable)


def results_files(folder: Path) -> list[Path]:
    """The results files in the order of a shell's `folder/*.json`."""
    return sorted(path for path in folder.glob("*.json") if not path.name.startswith("."))


def metric_name(key: str, metric: str) -> str:
    return f"{key}.{metric}"


def nearest_names(name: str, known: list[str], count: int = 3) -> list[str]:
    return difflib.get_close_matches(name, known, n=count, cutoff=0.4)


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
