"""Metrics of a training run, from files with one JSON object a line."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlcanary.run_metrics.source import MetricSource, Scalar

STEP_NAMES = ("step", "global_step", "_step")


class JsonLines(MetricSource):
    """Logs with one JSON object a line, each with its step. Nested names are joined by "/"."""

    description = "JSON lines (*.jsonl)"
    pattern = "*.jsonl"
    has_steps = True

    def read(self, path: Path) -> Iterator[Scalar | str]:
        """Read a log. A file whose first line has no step is no log, and is read no further."""
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
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


SOURCE = JsonLines()
