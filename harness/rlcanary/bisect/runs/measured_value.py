"""Read the value of a tracked metric from the output of one run."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlcanary.errors import UserError
from rlcanary.history.history import nearest_names
from rlcanary.history.run_result import UnreadableFile, read_run
from rlcanary.history.settings import pytest_settings
from rlcanary.recording.results_file import RESULTS_NAME
from rlcanary.run_metrics.windows import is_finite

NO_VALUE = "it left no value of"


class NotMeasured(Exception):
    """The run left no value of the metric. The message says why."""


def read_metric(name: str, checkout: Path, directory: Path, since_ns: int, output: str) -> float:
    """Read a metric from the results file that the run wrote, or else from a JSON line in its output.

    The line is `{"<name>": 1.5}`, with the full name or only the metric's, or `{"metric": "<name>", "value": 1.5}`. The
    last such line counts.

    Raises:
        NotMeasured: The run left no value of the metric.
    """
    found = [value for path in _results_files(checkout, directory, since_ns) for value in _in_file(path, name)]
    found = found or list(_in_output(output, name))
    if not found:
        left = sorted(
            {known for path in _results_files(checkout, directory, since_ns) for known in _names_in_file(path)}
        )
        close = nearest_names(name, left)
        raise NotMeasured(f"{NO_VALUE} {name}" + (f", but one of {', '.join(close)}" if close else ""))
    value = found[-1]
    if isinstance(value, bool) or not isinstance(value, int | float) or not is_finite(value):
        raise NotMeasured(f"{name} is {'not finite' if value is None else repr(value)}, not a number")
    return float(value)


def _results_files(checkout: Path, directory: Path, since_ns: int) -> list[Path]:
    try:
        configured = pytest_settings(directory)
    except UserError:
        configured = None  # pytest has reported the error in the run.
    places = [*checkout.rglob(RESULTS_NAME)]
    if configured is not None and (setting := configured.text("rlcanary_results")):
        places.append(configured.root / setting)
    new = [path for path in dict.fromkeys(places) if path.is_file() and path.stat().st_mtime_ns >= since_ns]
    return sorted(new, key=lambda path: path.stat().st_mtime_ns)


def _in_file(path: Path, name: str) -> Iterator[Any]:
    result = read_run(path)
    if isinstance(result, UnreadableFile):
        raise NotMeasured(str(result))
    for key, metrics in result.metrics.items():
        for metric, value in metrics.items():
            if f"{key}.{metric}" == name:
                yield value


def _names_in_file(path: Path) -> Iterator[str]:
    result = read_run(path)
    if not isinstance(result, UnreadableFile):
        yield from (f"{key}.{metric}" for key, metrics in result.metrics.items() for metric in metrics)


def _in_output(output: str, name: str) -> Iterator[Any]:
    short = name.rpartition(".")[2]
    for line in output.splitlines():
        if not line.lstrip().startswith("{"):
            continue
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # Any line may start with a brace.
        if not isinstance(entry, dict):
            continue
        if entry.get("metric") in (name, short) and "value" in entry:
            yield entry["value"]
        else:
            yield from (entry[key] for key in (name, short) if key in entry)
