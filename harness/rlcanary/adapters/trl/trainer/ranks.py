"""Data-parallel ranks as threads: each has a trainer, whose collectives exchange values with the others."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

MODULE = "trl.trainer.grpo_trainer"


class Ranks:
    """Ranks that wait for each other in every collective."""

    def __init__(self, count: int, module: str = MODULE) -> None:
        """Take their number, and the module whose names of accelerate's collectives the trainer looks up."""
        self.count = count
        self._module = module
        self._barrier = threading.Barrier(count)
        self._values: list[Any] = [None] * count
        self._own = threading.local()

    def run(self, work: Callable[[int, Any], Any], trainer: Any) -> list[Any]:
        """Call `work(rank, trainer)` on every rank, with copies of the trainer that know their rank -> their results."""

        def on(rank: int) -> Any:
            self._own.rank = rank
            try:
                return work(rank, self._of_rank(trainer, rank))
            except BaseException:
                self._barrier.abort()
                raise

        with self._collectives(), ThreadPoolExecutor(self.count) as pool:
            return list(pool.map(on, range(self.count)))

    def all(self, value: Any) -> list[Any]:
        """Exchange a value -> those of all ranks, in order."""
        self._values[self._own.rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values

    def gather(self, tensor: Any) -> Any:
        """Join the tensors of all ranks; numbers become a row."""
        import torch

        return torch.cat([each.reshape(1) if each.ndim == 0 else each for each in self.all(tensor)])

    def _of_rank(self, trainer: Any, rank: int) -> Any:
        own = copy.copy(trainer)
        own.args, own.state, own.model = (copy.copy(each) for each in (trainer.args, trainer.state, trainer.model))
        own._metrics = {mode: type(values)(list) for mode, values in trainer._metrics.items()}
        own._logs = copy.deepcopy(trainer._logs)
        own.accelerator = _Accelerator(trainer.accelerator, self, rank)
        return own

    @contextmanager
    def _collectives(self) -> Iterator[None]:
        def gather_object(values: list[Any]) -> list[Any]:
            return [value for own in self.all(values) for value in own]

        with patch(f"{self._module}.gather", self.gather), patch(f"{self._module}.gather_object", gather_object):
            yield


class _Accelerator:
    """The accelerator of a trainer, with the collectives of these ranks."""

    def __init__(self, accelerator: Any, ranks: Ranks, rank: int) -> None:
        self._accelerator, self._ranks = accelerator, ranks
        self.process_index, self.num_processes, self.is_main_process = rank, ranks.count, rank == 0
        self.gather = self.gather_for_metrics = ranks.gather

    def reduce(self, tensor: Any, reduction: str) -> Any:
        import torch

        stacked = torch.stack(self._ranks.all(tensor))
        return stacked.sum(dim=0) if reduction == "sum" else stacked.mean(dim=0)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0) -> Any:
        import torch

        width = max(each.shape[dim] for each in self._ranks.all(tensor))
        missing = list(tensor.shape)
        missing[dim] = width - tensor.shape[dim]
        return torch.cat([tensor, tensor.new_full(missing, pad_index)], dim=dim)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)
