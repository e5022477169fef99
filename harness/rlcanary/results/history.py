"""All runs of a results folder in the order in which they ran, and the series of one metric."""

import datetime
import difflib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

from rlcanary.errors import UserError
from rlcanary.results.index import Index, IndexedFile, Watch, open_index, unwatched
from rlcanary.results.settings import pytest_settings
from rlcanary.results.store import RESULTS_NAME, default_results_file, history_folder


class Run(NamedTuple):
    file: str
    run_id: str
    started_s: float  # since the epoch
    git_commit: str | None
    dirty: bool | None
    exit_status: int | None
    environment: str | None

    @property
    def start(self) -> datetime.datetime:
        """In UTC."""
        return datetime.datetime.fromtimestamp(self.started_s, datetime.UTC)


class Point(NamedTuple):
    """One run's measurement of a metric; value is None where it was not a finite number."""

    run: Run
    value: float | None


@dataclass(frozen=True)
class Series:
    """One metric over the runs that measured it, oldest first.

    nodeids counts the runs by the test that measured the metric. More than one means that the history mixes tests (or
    that one was moved); the last is that of the newest run.
    """

    key: str
    metric: str
    points: list[Point]
    nodeids: dict[str, int]

    @property
    def name(self) -> str:
        return metric_name(self.key, self.metric)


class History:
    """The runs of a folder, oldest first; `problems` has a line for everything in it that is not a run of its own.

    Leaving it as a context closes its index, which others may then bring up to date.
    """

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder = folder
        self._index = index
        self.problems = [] if index.problem is None else [index.problem]
        runs: dict[str, tuple[Run, int]] = {}
        for file in sorted(index.files, key=lambda file: file.name):
            if file.problem is not None:
                self.problems.append(f"{folder / file.name}: {file.problem}")
            elif file.run_id in runs:
                self.problems.append(
                    f"{folder / file.name}: holds the same run as {runs[file.run_id][0].file}; counted once"
                )
            else:
                runs[file.run_id] = _run(file), file.id
        in_order = sorted(runs.values(), key=lambda entry: (entry[0].started_s, entry[0].run_id))
        self.runs = [run for run, _ in in_order]
        self._files = [file for _, file in in_order]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._index.close()

    def metrics(self) -> dict[tuple[str, str], int]:
        """Every (test key, metric) of the history, sorted, with the number of files that hold it."""
        return self._index.counts()

    def series(self, name: str) -> Series:
        """The series of `<test key>.<metric>`.

        Raises UserError for an unknown name and for a metric that is not a number.
        """
        key, metric = self._resolve(name)
        series = self._series(key, metric)
        if isinstance(series, Other):
            raise UserError(
                f"{name} is not a number ({series.glimpse} in {series.file}), so it has no trend; "
                "look at it with `rlcanary trend --jq EXPR`"
            )
        return series

    def numbers(self, key: str, metric: str) -> Series | None:
        """The series of a metric that the history holds, None if it is not a number."""
        series = self._series(key, metric)
        return series if isinstance(series, Series) else None

    def _series(self, key: str, metric: str) -> "Series | Other":
        measured = {entry.file: entry for entry in self._index.measurements(self._index.metrics()[key, metric])}
        points = []
        nodeids: dict[str, int] = {}
        for file, run in zip(self._files, self.runs, strict=True):
            entry = measured.get(file)
            if entry is None:
                continue
            if entry.other is not None:
                return Other(entry.other, run.file)
            points.append(Point(run, entry.value))
            if entry.nodeid is not None:
                nodeids[entry.nodeid] = nodeids.pop(entry.nodeid, 0) + 1
        return Series(key, metric, points, nodeids)

    def _resolve(self, name: str) -> tuple[str, str]:
        # Keys and metric names may both hold dots, so a name is looked up rather than split.
        known = list(self._index.metrics())
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


class Other(NamedTuple):
    """A metric that is not a number in some run."""

    glimpse: str
    file: str


def find_history(start: Path) -> Path:
    """The folder of past runs for a command started in `start`: where pytest's settings put it, else the first that exists
    of the default places.

    Raises UserError if there is none.
    """
    settings = pytest_settings(start)
    root = settings.root
    if configured := settings.text("rlcanary_results"):
        candidates = [root / configured]
    else:
        default = default_results_file(root, settings.words("testpaths"))
        candidates = [default, *(root / folder / RESULTS_NAME for folder in ("tests/unit", "tests", "test", "."))]
    folders = list(dict.fromkeys(history_folder(candidate) for candidate in candidates))
    for folder in folders:
        if folder.is_dir():
            return folder
    places = ", ".join(os.path.relpath(folder, start) for folder in folders)
    raise UserError(
        f"no results of past runs here (looked for {places}); run pytest first, or name the folder with --dir"
    )


def load_history(folder: Path, watch: Watch = unwatched) -> History:
    """The history in a folder of results files.

    Raises UserError if there is no such folder or no run in it that can be read.
    """
    if not folder.is_dir():
        raise UserError(f"there is no results folder {folder}; run pytest first, or name the folder with --dir")
    try:
        index = open_index(folder, watch)
    except OSError as error:
        raise UserError(f"cannot read {folder}: {error.strerror}; name a folder of results with --dir") from error
    history = History(folder, index)
    if not history.runs:
        index.discard()
        found = f"; unreadable: {'; '.join(history.problems[:3])}" if history.problems else ""
        raise UserError(
            f"{folder} holds no results of a run; run pytest first, or name another folder with --dir{found}"
        )
    return history


def results_files(folder: Path) -> list[Path]:
    """The results files in the order of a shell's `folder/*.json`."""
    return sorted(path for path in folder.glob("*.json") if not path.name.startswith("."))


def metric_name(key: str, metric: str) -> str:
    return f"{key}.{metric}"


def nearest_names(name: str, known: list[str], count: int = 3) -> list[str]:
    return difflib.get_close_matches(name, known, n=count, cutoff=0.4)


def _run(file: IndexedFile) -> Run:
    dirty = None if file.dirty is None else bool(file.dirty)
    return Run(file.name, file.run_id, file.started_s, file.git_commit, dirty, file.exit_status, file.environment)
