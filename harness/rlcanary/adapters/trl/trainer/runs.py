"""Runs of the trainer's whole loop in which the updates only note the items that they are given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any
from unittest.mock import patch

from rlcanary.adapters.frameworks import quiet
from rlcanary.adapters.trl.trainer.trainers import PROMPT, grpo_trainer, place_kept

# Completions of each prompt.
GROUP = 2


@contextmanager
def ranked(rank: int, n_ranks: int) -> Iterator[None]:
    """Have accelerate believe that this process is one of several: its samplers take their share, and nothing is sent."""
    from accelerate.state import AcceleratorState, PartialState

    place = {"process_index": rank, "local_process_index": rank, "num_processes": n_ranks}
    with place_kept(), ExitStack() as patches:
        for state, (name, value) in product((PartialState, AcceleratorState), place.items()):
            # accelerate sets these numbers anew for each trainer: a property stays.
            patches.enter_context(patch.object(state, name, _fixed(value), create=True))
        yield


def _fixed(value: int) -> property:
    return property(lambda _: value, lambda *_: None)


@dataclass
class Noted:
    """The record of a run.

    Attributes:
        batches: the items of each rollout batch of this rank, in order.
        trainer: its trainer, at the end.
    """

    batches: list[list[int]]
    trainer: Any


def dataset_trainer(
    settings: dict[str, Any], n_items: int, prompts_per_batch: int, n_ranks: int, **options: Any
) -> Any:
    """Construct the trainer of a rank, on a dataset of numbered items.

    Raises:
        ValueError: the rows of a batch cannot be divided so.
    """
    steps = settings.get("steps_per_generation", settings.get("gradient_accumulation_steps", 1))
    rows, rest = divmod(prompts_per_batch * GROUP, n_ranks * steps)
    if rest:
        raise ValueError(f"{prompts_per_batch} prompts cannot be divided among {n_ranks} ranks and {steps} steps")
    sizes = {"num_generations": GROUP, "per_device_train_batch_size": rows}
    items = [{"prompt": PROMPT, "item": number} for number in range(n_items)]
    return grpo_trainer({**settings, **sizes, **options}, rows=items)


def noted(trainer: Any, *, stop_at: int | None = None, folder: str = "", resumes: bool = False) -> Noted:
    """Run `train`, whose updates note their items and train nothing.

    Args:
        trainer: a trainer of `dataset_trainer`.
        stop_at: number of updates after which the run is stopped.
        folder: where it then writes a checkpoint, and where a resumed run has its own; none if empty.
        resumes: whether the run goes on from the last checkpoint.
    """
    import torch
    from transformers import TrainerCallback

    batches: list[list[int]] = []
    passes = trainer.args.steps_per_generation * trainer.num_iterations

    def note(_model: Any, inputs: list[dict[str, Any]], _count: Any) -> torch.Tensor:
        trainer._step += 1
        if trainer._step % passes == 1 or passes == 1:
            batches.append([row["item"] for row in inputs][::GROUP])
        return torch.zeros(())

    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == stop_at:
                control.should_training_stop = True
                control.should_save = bool(folder) and not resumes

    trainer.add_callback(Stop())
    trainer.args.output_dir = folder or trainer.args.output_dir
    with patch.object(trainer, "training_step", note), patch.object(trainer.accelerator, "free_memory"), quiet():
        trainer.train(resume_from_checkpoint=resumes or None)
    return Noted(batches, trainer)
