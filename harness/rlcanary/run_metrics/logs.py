"""Merge the scalars of a run's logs, TensorBoard event files and JSON lines, into one `{metric: {step: value}}`."""

import importlib
import math
import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rlcanary.errors import UserError
from rlcanary.run_metrics import sources
from rlcanary.run_metrics.source import MetricSource

FLOAT32_PRECISION = 2.0**-23


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

    def series(self, tag: str) -> list[float]:
        """Return the values of a metric in the order of steps."""
        return [value for _, (value, _) in sorted(self.values.get(tag, {}).items())]

    def document(self) -> dict[str, dict[str, float | None]]:
        """Returns the JSON that `rlcanary check-metrics` reads: sorted tags and steps, null for non-finite numbers."""
        return {
            tag: {str(step): value if math.isfinite(value) else None for step, (value, _) in sorted(steps.items())}
            for tag, steps in sorted(self.values.items())
        }


def metric_sources() -> list[MetricSource]:
    """Return the metric source of each module in `sources/`."""
    names = [f"{sources.__name__}.{module.name}" for module in pkgutil.iter_modules(sources.__path__)]
    return [importlib.import_module(name).SOURCE for name in names]


def log_files(folder: Path) -> list[tuple[MetricSource, Path]]:
    """List all logs of training runs under a folder, the most recently changed last.

    Raises:
        UserError: There are none.
    """
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    logs = [source for source in metric_sources() if source.has_steps]
    found = files_of(logs, folder, folder)
    if not found:
        raise UserError(f"there are no {' or '.join(source.description for source in logs)} under {folder}")
    return found


def files_of(
    sources: Iterable[MetricSource], folder: Path, directory: Path, since_ns: int = 0
) -> list[tuple[MetricSource, Path]]:
    """List the files that a run started in `directory` wrote under `folder`, the most recently changed last."""
    found = {path: source for source in sources for path in source.files(folder, directory) if path.is_file()}
    changed = {path: path.stat().st_mtime_ns for path in found}
    return [(found[path], path) for path in sorted(found, key=lambda p: (changed[p], p)) if changed[path] >= since_ns]


def merge(merged: MergedLogs, source: MetricSource, path: Path, prefixes: tuple[str, ...] = ()) -> None:
    """Add a file; with prefixes, only tags that begin with one of them."""
    count = 0
    for entry in source.read(path):
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
