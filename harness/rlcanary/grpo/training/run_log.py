"""Log a run's metrics, one JSON object per step as `rlcanary dump-logs` reads them, and optionally to TensorBoard.

The end of each sampled group is logged beside them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlcanary.errors import UserError
from rlcanary.grpo.rollout.buffer import FateRecord
from rlcanary.system.files import write_whole

LOG, GROUPS = "metrics.jsonl", "groups.ndjson"


class RunLog:
    """Appends to `metrics.jsonl` and `groups.ndjson` in a folder; each line is on the disk when a call returns."""

    def __init__(self, folder: Path, first_step: int = 0, tensorboard: bool = False) -> None:
        """Open the log.

        Args:
            folder: folder of the run.
            first_step: the first that is logged; TensorBoard hides later ones of a run that was stopped.
            tensorboard: write event files to `tensorboard/` as well.

        Raises:
            UserError: `tensorboard` is set and TensorBoard is not installed.
        """
        self._folder = folder
        self._events: Any = None
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise UserError(
                    f"run.tensorboard needs the tensorboard package ({error}); pip install tensorboard"
                ) from error
            self._events = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)

    def drop_from(self, first_step: int) -> None:
        """Drop the lines of this step and later: the run resumes from a checkpoint before it."""
        for path in (self._folder / LOG, self._folder / GROUPS):
            if path.exists():
                kept = [line for line in path.read_text().splitlines() if _step(line) < first_step]
                write_whole(path, "".join(f"{line}\n" for line in kept))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step."""
        self._append(LOG, [{"step": step, **metrics}])
        if self._events is not None:
            for name, value in metrics.items():
                self._events.add_scalar(name, value, step)
            self._events.flush()

    def log_groups(self, step: int, records: Sequence[FateRecord]) -> None:
        """Write the ends of groups, each a line with `number`, `item_id`, `version` and `fate`."""
        self._append(GROUPS, [{"step": step, **asdict(record)} for record in records])

    def _append(self, name: str, lines: Iterable[Mapping[str, Any]]) -> None:
        with (self._folder / name).open("a") as stream:
            stream.writelines(json.dumps(line) + "\n" for line in lines)
            stream.flush()
            os.fsync(stream.fileno())

    def close(self) -> None:
        """Close the event files."""
        if self._events is not None:
            self._events.close()


def _step(line: str) -> float:
    """Read the step of a line; a line that a crash cut off has no step and is dropped."""
    try:
        return float(json.loads(line)["step"])
    except ValueError:
        return float("inf")
