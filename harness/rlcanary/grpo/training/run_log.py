"""The numbers of a run, one JSON object per step, as `rlcanary dump-logs` reads them, and to TensorBoard if asked.

Beside them, what became of each group that was sampled.
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
            folder: of the run.
            first_step: what stands there of this step and later is dropped: the run goes on from a checkpoint before it.
            tensorboard: write event files to `tensorboard/` as well.

        Raises:
            UserError: TensorBoard is asked for and not installed.
        """
        self._folder = folder
        for path in (folder / LOG, folder / GROUPS):
            if path.exists():
                kept = [line for line in path.read_text().splitlines() if _step(line) < first_step]
                write_whole(path, "".join(f"{line}\n" for line in kept))
        self._events: Any = None
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise UserError(
                    f"run.tensorboard needs the tensorboard package ({error}); pip install tensorboard"
                ) from error
            self._events = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)

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
    """The step of a line; one that a crash cut off is of no step and dropped."""
    try:
        return float(json.loads(line)["step"])
    except ValueError:
        return float("inf")
