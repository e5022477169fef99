"""The loop of a run of verl's trainer: the order of its data, its plan and its validations."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator, Mapping
from functools import cached_property
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from rlcanary.adapters.frameworks import quiet
from rlcanary.adapters.verl.reports import Reports
from rlcanary.adapters.verl.workers.run_config import new_config
from rlcanary.adapters.verl.workers.trainer import new_trainer
from rlcanary.adapters.verl.workers.transfer_queue import stored, trainer_module
from rlcanary.contract.adapter import NotProvided

if TYPE_CHECKING:
    from rlcanary.contract.records.building import PlanSettings, RunPlan

# verl draws another order in each process where data.seed is not set.
SEED = 1


class Runs(Reports):
    """The loop of a run."""

    def data_order(self, n_items: int, epoch: int, rank: int, world_size: int) -> list[int]:
        """Read the epochs of a run whose batches have one item per rank."""
        per_epoch = n_items // world_size
        if (n_items, world_size) not in self._running:
            self._running[n_items, world_size] = self._loaded(n_items, world_size), []
        trainer, known = self._running[n_items, world_size]
        while len(known) <= epoch:
            known.append([_next_items(trainer) for _ in range(per_epoch)])
        return [items[rank] for items in known[epoch]]

    @cached_property
    def _running(self) -> dict[tuple[int, int], tuple[Any, list[list[list[int]]]]]:
        """Keep runs and the epochs that they have read, by the numbers of items and ranks."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_running"}

    def resumed_order(self, n_items: int, consumed: int, count: int, rank: int, world_size: int) -> list[int]:
        """Save and load the trainer's checkpoint of its data loader."""
        workers = SimpleNamespace(save_checkpoint=lambda *_, **__: None, load_checkpoint=lambda *_, **__: None)
        with TemporaryDirectory() as folder, quiet(), silent():
            parts = {"actor_rollout_wg": workers}
            stopped = self._loaded(n_items, world_size, {"default_local_dir": folder}, parts)
            for _ in range(consumed):
                _next_items(stopped)
            stopped.global_steps = consumed
            if consumed:
                stopped._save_checkpoint()
            resumed = self._loaded(n_items, world_size, {"default_local_dir": folder}, parts)
            resumed._load_checkpoint()
            return [_next_items(resumed)[rank] for _ in range(count)]

    def run_plan(self, settings: PlanSettings) -> RunPlan:
        """Run the trainer's loop without its updates."""
        from rlcanary.contract.records.building import RunPlan

        conventions = self.conventions
        if not settings.drop_last:
            raise NotProvided("the data loader drops the last batch of an epoch")
        if settings.prompts_per_batch % conventions.mini_batches:
            raise NotProvided("ppo_mini_batch_size prompts are in each mini-batch")
        plan = {
            "total_epochs": settings.epochs,
            "total_training_steps": settings.max_batches,
            "val_before_train": False,
        }
        trainer = self._loaded(settings.n_items, settings.prompts_per_batch, plan)
        batches = _steps(trainer)
        share = settings.prompts_per_batch // settings.ranks
        return RunPlan(
            batches=[[items[rank * share :][:share] for items in batches] for rank in range(settings.ranks)],
            updates=len(batches) * conventions.epochs_per_rollout * conventions.mini_batches,
            schedule_updates=trainer.config.actor_rollout_ref.actor.optim.total_training_steps,
        )

    def evaluation_steps(self, n_steps: int, every: int, at_start: bool, at_end: bool) -> list[int]:
        if not at_end:
            raise NotProvided("a run with a test_freq always ends with a validation")
        plan = {"total_epochs": n_steps, "val_before_train": at_start, "test_freq": every}
        evaluated: list[int] = []
        trainer = self._loaded(1, 1, plan)

        def validate() -> dict[str, float]:
            evaluated.append(trainer.global_steps)
            return {"any": 0.0}

        trainer._validate = validate
        _steps(trainer)
        return evaluated

    def evaluation_items(self, n_items: int, batch_size: int, rank: int, n_ranks: int) -> list[int]:
        """Read the validation's data loader, whose batches are divided among the agent loop workers."""
        from verl.utils import tensordict_utils

        trainer = self._loaded(n_items, 1, val_batch_size=batch_size)
        parts = [tensordict_utils.get_tensordict(batch).chunk(n_ranks) for batch in trainer.val_dataloader]
        return [int(item) for part in parts if rank < len(part) for item in part[rank]["item"]]

    def _loaded(
        self,
        n_items: int,
        train_batch_size: int,
        plan: Mapping[str, Any] | None = None,
        parts: Mapping[str, Any] | None = None,
        val_batch_size: int | None = None,
    ) -> Any:
        """Make a trainer whose data loaders are built, over items that are their numbers."""
        sizes = {"train_batch_size": train_batch_size, "val_batch_size": val_batch_size, "dataloader_num_workers": 0}
        config = new_config(
            data={**self.data, **sizes, "seed": SEED},
            trainer={"logger": [], "total_epochs": 10**6, **(plan or {})},
            algorithm=self.algorithm,
        )
        trainer = self._loaded_with(Numbers(n_items), config, parts or {})
        trainer.global_steps = 0
        return trainer

    def _loaded_with(self, dataset: Any, config: Any, parts: Mapping[str, Any]) -> Any:
        """Make a trainer whose data loaders are built, over this dataset."""
        trainer = new_trainer(config, **{"processor": None, **parts})
        with mock.patch.object(trainer_module(), "create_rl_dataset", return_value=dataset), quiet():
            trainer._init_dataloader()
        return trainer


class Numbers:
    """A dataset whose items are their numbers."""

    def __init__(self, n_items: int) -> None:
        self.n_items = n_items

    def __len__(self) -> int:
        return self.n_items

    def __getitem__(self, item: int) -> dict[str, Any]:
        return {"item": int(item), "raw_prompt": []}


def _next_items(trainer: Any) -> list[int]:
    return [int(item) for item in trainer._next_train_batch()["item"]]


def _steps(trainer: Any) -> list[list[int]]:
    """Run the trainer's `fit` with steps that only take their batch -> the items of each."""
    taken: list[list[int]] = []

    def step(*_: Any) -> Any:
        taken.append(_next_items(trainer))
        return SimpleNamespace(keys=[], partition_id="train")

    trainer.step, trainer._compute_metrics, trainer.on_step_end = step, lambda *_, **__: None, lambda: None
    trainer._validate = vars(trainer).get("_validate", dict)
    trainer._start_profiling = trainer._stop_profiling = lambda: None
    trainer._init_dump_executor()
    with stored(), quiet(), silent():
        trainer.fit(None)
    return taken


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Swallow what a loop prints, and logs of what it leaves out."""
    level, nowhere = logging.root.manager.disable, io.StringIO()
    logging.disable(logging.ERROR)
    try:
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            yield
    finally:
        logging.disable(level)
