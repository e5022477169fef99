"""Read the value of a metric from what one run left."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlcanary.errors import UserError
from rlcanary.history.history import nearest_names
from rlcanary.run_metrics.logs import MergedLogs, files_of, merge, metric_sources
from rlcanary.run_metrics.windows import is_finite

NO_VALUE = "it left no value of"


class NotMeasured(Exception):
    """The run left no value of the metric. The message says why."""


def read_metric(name: str, checkout: Path, directory: Path, since_ns: int, output: str) -> float:
    """Read a metric from the files that the run wrote, or from a JSON line that it printed.

    Files with one value for each metric come first, then printed lines, then logs with steps. The last line and the
    last step count. A line is `{"<name>": 1.5}`, with the full name or only the metric's, or
    `{"metric": "<name>", "value": 1.5}`.

    Raises:
        NotMeasured: The run left no value of the metric.
    """
    results = _written(False, checkout, directory, since_ns)
    found: list[Any] = results.series(name) or list(_in_output(output, name))
    if not found:
        logs = _written(True, checkout, directory, since_ns)
        found = logs.series(name)
        if not found:
            close = nearest_names(name, sorted(results.values | logs.values))
            problems = "".join(f"; {text}" for text in results.problems if name in text)
            raise NotMeasured(f"{NO_VALUE} {name}" + (f", but one of {', '.join(close)}" if close else "") + problems)
    value = found[-1]
    if isinstance(value, bool) or not isinstance(value, int | float) or not is_finite(value):
        raise NotMeasured(f"{name} is {'not finite' if value is None else repr(value)}, not a number")
    return float(value)


def _written(has_steps: bool, checkout: Path, directory: Path, since_ns: int) -> MergedLogs:
    """Merge the files that the run wrote: series of steps, or single values."""
    merged = MergedLogs()
    sources = [source for source in metric_sources() if source.has_steps is has_steps]
    try:
        for source, path in files_of(sources, checkout, directory, since_ns):
            merge(merged, source, path)
    except UserError as error:
        raise NotMeasured(str(error)) from None
    return merged


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
