"""Merge the scalars of a run's logs, TensorBoard event files and JSON lines, into one `{metric: {step: value}}`."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rlcanary.errors import UserError

EVENT_FILES = "events*tfevents*"
JSON_LINES = "*.jsonl"
FLOAT32_PRECISION = 2.0**-23
STEP_NAMES = ("step", "global_step", "_step")


class Scalar(NamedTuple):
    tag: str
    step: int
    value: float


class Conflict(NamedTuple):
    """Two different values of one metric at one step; the later file's value is kept."""

    tag: str
    step: int
    first: float
    first_file: Path
    kept: float
    kept_file: Path


@dataclass
class MergedLogs:
    """The merged scalars of several logs.

    Attributes:
        values: maps tag and step to the value and its source file.
    """

    files: dict[Path, int] = field(default_factory=dict)  # the scalars in each
    values: dict[str, dict[int, tuple[float, Path]]] = field(default_factory=dict)
    conflicts: list[Conflict] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def document(self) -> dict[str, dict[str, float | None]]:
        """Returns the JSON that `rlcanary check-metrics` reads: sorted tags and steps, null for non-finite numbers."""
        return {
            tag: {str(step): value if math.isfinite(value) else None for step, (value, _) in sorted(steps.items())}
            for tag, steps in sorted(self.values.items())
        }


def log_files(folder: Path) -> list[Path]:
    """Lists all event files and JSON lines under a folder, the most recently changed last.

    Raises:
        UserError: if there are none.
    """
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    paths = {path for pattern in (EVENT_FILES, JSON_LINES) for path in folder.rglob(pattern) if path.is_file()}
    if not paths:
        raise UserError(
            f"there are no TensorBoard event files ({EVENT_FILES}) or JSON lines ({JSON_LINES}) under {folder}"
        )
    return sorted(paths, key=lambda path: (path.stat().st_mtime_ns, path))


def merge(merged: MergedLogs, path: Path, prefixes: tuple[str, ...]) -> None:
    """Adds a file; with prefixes, only tags that begin with one of them."""
    count = 0
    for entry in read_json_lines(path) if path.suffix == ".jsonl" else read_events(path):
        if isinstance(entry, str):
            merged.problems.append(f"{path}: {entry}")
            continue
        if prefixes and not entry.tag.startswith(prefixes):
            continue
        count += 1
        steps = merged.values.setdefault(entry.tag, {})
        first = steps.get(entry.step)
        if first is not None and not same(first[0], entry.value):
            merged.conflicts.append(Conflict(entry.tag, entry.step, *first, entry.value, path))
        steps[entry.step] = entry.value, path
    merged.files[path] = count


def same(first: float, second: float) -> bool:
    """Tells if two values agree to the 32 bits that TensorBoard keeps of them."""
    return math.isclose(first, second, rel_tol=FLOAT32_PRECISION) or (math.isnan(first) and math.isnan(second))


def read_json_lines(path: Path) -> Iterator[Scalar | str]:
    """Reads a log with one JSON object a line, each with its step; nested names are joined by "/".

    Yields a text that explains a line that cannot be read. A file whose first line has no step is not a run log.

    A line that cannot be read comes as a text that says why; a file whose first line names no step is no run log.
    """
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            yield f"line {number} is not JSON, perhaps cut off"
            continue
        names = [name for name in STEP_NAMES if isinstance(record, dict) and type(record.get(name)) is int]
        if not names:
            yield f"line {number} has no whole number under {', '.join(STEP_NAMES)}; lines without a step are left out"
            if number == 1:
                return
            continue
        step = record.pop(names[0])
        for tag, value in numbers(record):
            yield Scalar(tag, step, value)


def numbers(record: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        match value:
            case dict():
                yield from numbers(value, f"{prefix}{name}/")
            case bool():
                pass
            case int() | float():
                yield f"{prefix}{name}", as_float(value)
            case None:
                yield f"{prefix}{name}", math.nan


def as_float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:  # a whole number beyond all floats
        return math.copysign(math.inf, number)


def read_events(path: Path) -> Iterator[Scalar | str]:
    """Reads the scalars of a TensorBoard event file; yields a text that explains a damaged end.

    Raises:
        UserError: without the tensorboard package.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.tensorflow_stub import errors
        from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError as error:
        raise UserError(
            f"reading {path.name} needs the tensorboard package ({error}); pip install tensorboard"
        ) from error

    reader = PyRecordReader_New(str(path))
    plugins: dict[str, str] = {}
    while True:
        try:
            reader.GetNext()
        except errors.OutOfRangeError:
            return
        except errors.DataLossError as error:
            yield f"damaged or cut off, read as far as it goes ({error.message})"
            return
        event = Event.FromString(reader.record())
        for value in event.summary.value:
            # Only the first value of a tag says which plugin it is for.
            plugin = plugins.setdefault(value.tag, value.metadata.plugin_data.plugin_name)
            if value.HasField("simple_value"):
                yield Scalar(value.tag, event.step, value.simple_value)
            elif value.HasField("tensor") and plugin == "scalars":
                yield Scalar(value.tag, event.step, make_ndarray(value.tensor).item())
