"""The runs of a results folder, in the order in which they ran, and the series of one metric."""

import difflib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Self, overload

from rlcanary.errors import UserError
from rlcanary.history.index import EVERY_FILE, Index, Run, Watch, open_index, unwatched
from rlcanary.recording.results_file import RESULTS_NAME, default_results_file, history_folder
from rlcanary.system.printable import counted, printable
from rlcanary.system.pytest_settings import pytest_settings

FEW_RUNS = 500  # are looked up by number


class Point(NamedTuple):
    """One run's measurement of a metric; value is None if it was not a finite number."""

    run: Run
    value: float | None


@dataclass(frozen=True)
class Series:
    """One metric over the runs that measured it, oldest first: a value for each, None if it was not a finite number.

    Attributes:
        nodeids: number of runs by the test that measured the metric, the newest run's last. More than one test means that
            the history mixes tests, or that a test was moved.
        left_out: the runs in which the metric was not a number, or its test did not pass. A test that fails early is fast
            and says nothing about the code that it did not reach.
    """

    key: str
    metric: str
    values: list[float | None]
    runs: Sequence[Run]
    nodeids: dict[str, int]
    left_out: str = ""

    @property
    def name(self) -> str:
        return metric_name(self.key, self.metric)

    @property
    def mixed_tests(self) -> str:
        """Describes the tests that measured the metric, if there are several."""
        tests = ", ".join(f"{nodeid} ({counted(runs, 'run')})" for nodeid, runs in self.nodeids.items())
        return f"{self.key} was measured by more than one test: {tests}"

    def point(self, index: int) -> Point:
        return Point(self.runs[index], self.values[index])

    def newest(self, count: int) -> Self:
        """Returns the series of the newest runs."""
        first = max(0, len(self.values) - count)
        return replace(self, values=self.values[first:], runs=self.runs[first:])


class Runs(Sequence[Run]):
    """Runs of an index, looked up lazily: most questions need the values of all runs and the details of a few."""

    def __init__(self, index: Index, numbers: list[int], known: dict[int, Run] | None = None) -> None:
        self._index = index
        self._numbers = numbers
        self._known = {} if known is None else known  # shared by all sequences of a history

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> Run: ...
    @overload
    def __getitem__(self, index: slice) -> "Runs": ...
    def __getitem__(self, index: int | slice) -> "Run | Runs":
        if isinstance(index, slice):
            return self.only(self._numbers[index])
        number = self._numbers[index]
        if number not in self._known:
            self._look_up([number])
        return self._known[number]

    def __iter__(self) -> Iterator[Run]:
        if any(number not in self._known for number in self._numbers):
            self._look_up(self._numbers if len(self._numbers) < FEW_RUNS else None)
        return (self._known[number] for number in self._numbers)

    def only(self, numbers: list[int]) -> "Runs":
        return Runs(self._index, numbers, self._known)

    def _look_up(self, numbers: list[int] | None) -> None:
        self._known.update(self._index.runs(numbers))


class History:
    """The runs of a folder, oldest first; `problems` has a line for each file that is not a run of its own.

    Leaving it as a context closes its index, so that other processes may update it.
    """

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder = folder
        self._index = index
        self._numbers = index.run_numbers()
        self.runs = Runs(index, self._numbers)
        self.problems = [] if index.problem is None else [index.problem]
        self.problems += [printable(f"{folder / name}: {reason}") for name, reason in index.problems()]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._index.close()

    def metrics(self) -> dict[tuple[str, str], int]:
        """Lists every (test key, metric) of the history, sorted, with the number of files that hold it."""
        return self._index.counts()

    def names(self) -> list[tuple[str, str]]:
        """Lists every (test key, metric) of the history, sorted."""
        return list(self._index.metrics())

    def series(self, name: str) -> Series:
        """Returns the series of `<test key>.<metric>`.

        Raises:
            UserError: for an unknown name and for a metric that is not a number.
        """
        key, metric = self._resolve(name)
        series = self.numbers(key, metric)
        if series is None:
            glimpse, file = self._index.others(self._index.metrics()[key, metric])[0]
            file = printable(file)
            raise UserError(
                f"{name} is not a number ({glimpse} in {file}), so it has no trend; "
                "look at it with `rlcanary trend --jq EXPR`"
            )
        if not series.values:
            raise UserError(f"{series.left_out}, and there is no other run, so it has no trend")
        return series

    def numbers(self, key: str, metric: str, newest: int = 0) -> Series | None:
        """Returns the series of a metric in the `newest` runs (0: in all), or None if it never was a number."""
        runs = self._numbers[-newest:]
        within = (min(runs), max(runs)) if newest else EVERY_FILE
        number = self._index.metrics()[key, metric]
        values = self._index.values(number, within)
        others = self._index.others(number, within)
        left_out = []
        if failed := self._index.not_passed(number, within):
            left_out.append(
                f"{metric_name(key, metric)} is left out of {counted(failed, 'run')} in which its test did not pass at once "
                "or which were cut short"
            )
        if others:
            if all(value is None for value in values.values()):
                return None
            glimpse, file = others[0]
            count = counted(len(others), "run")
            example = f"the newest: {glimpse} in {printable(file)}"
            left_out.append(f"{metric_name(key, metric)} was not a number in {count}, left out here ({example})")
        measured = [run for run in runs if run in values]
        known = [values[run] for run in measured]
        return Series(
            key, metric, known, self.runs.only(measured), self._index.nodeids(number, within), "; ".join(left_out)
        )

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


def find_history(start: Path) -> Path:
    """Finds the folder of past runs for a command started in `start`.

    This is the folder in pytest's settings, else the first default folder that exists. Without a settings file the
    defaults are looked up in each folder up to the repository's top.
    """
    settings = pytest_settings(start)
    if configured := settings.text("rlcanary_results"):
        candidates = [settings.root / configured]
    else:
        roots = [settings.root] if settings.file else folders_of_repository(start)
        candidates = [
            candidate
            for root in roots
            for candidate in (
                default_results_file(root, settings.words("testpaths")),
                *(root / folder / RESULTS_NAME for folder in ("tests/unit", "tests", "test", ".")),
            )
        ]
    folders = list(dict.fromkeys(history_folder(candidate) for candidate in candidates))
    for folder in folders:
        if folder.is_dir():
            return folder
    places = ", ".join(os.path.relpath(folder, start) for folder in folders)
    raise UserError(
        f"no results of past runs here (looked for {places}); run pytest first, or name the folder with --dir"
    )


def folders_of_repository(start: Path) -> list[Path]:
    """Lists this folder and those above it up to the top of its git repository; outside one, this folder alone."""
    above = [start, *start.parents]
    top = next((index for index, folder in enumerate(above) if (folder / ".git").exists()), 0)
    return above[: top + 1]


def load_history(folder: Path, watch: Watch = unwatched) -> History:
    """Loads the history in a folder of results files.

    Raises:
        UserError: if there is no such folder or no run in it that can be read.
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
    """Lists the results files in the order of a shell's `folder/*.json`."""
    return sorted(path for path in folder.glob("*.json") if not path.name.startswith("."))


def metric_name(key: str, metric: str) -> str:
    return f"{key}.{metric}"


def nearest_names(name: str, known: list[str], count: int = 3) -> list[str]:
    """Suggests known names for an unknown one: those that contain it, else those that resemble it."""
    return [full for full in known if name in full][:count] or difflib.get_close_matches(
        name, known, n=count, cutoff=0.4
    )
