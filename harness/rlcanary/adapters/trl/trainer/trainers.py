"""Real trainers of TRL on tiny models: their construction, and their run up to the first update."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any
from unittest.mock import patch

from rlcanary.adapters.frameworks import quiet
from rlcanary.adapters.trl import releases

# A text of one token, for prompts that nothing depends on.
PROMPT = "t5"
PROMPT_IDS = [5]
# Updates of a run: enough that no check comes to the end of its schedule.
UPDATES = 1000
# On the CPU in full precision, and without a progress bar; each update logs its metrics.
QUIETLY: dict[str, Any] = {"use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True, "logging_steps": 1}


def grpo_trainer(
    settings: dict[str, Any],
    model: Any = None,
    ref_model: Any = None,
    *,
    rows: Sequence[dict[str, Any]] | None = None,
    tokenizer: Any = None,
    reward_funcs: Any = None,
    peft_config: Any = None,
    tools: Any = None,
    args: Any = None,
) -> Any:
    """Construct a `GRPOTrainer` whose `rollout_func` replays the trainer's attribute `replayed`.

    Args:
        settings: of `GRPOConfig`.
        model: the policy, by default the tiny Llama.
        ref_model: what the trainer loads as its reference model where beta is above zero, by default a copy of the policy.
        rows: the training dataset.
        tokenizer: the processing class, by default the tiny one.
        reward_funcs: the reward functions, by default one that returns the column `given_reward`.
        peft_config: of the adapters that the trainer adds.
        args: a `GRPOConfig` in place of the settings.
        tools: functions that the policy may call. With tools the completions come from the trainer's own generation.
    """
    from transformers.trainer_callback import PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    from rlcanary.contract.layers import copied
    from rlcanary.tiny_models import tiny_llama, tiny_tokenizer

    model = tiny_llama() if model is None else model

    def reference(*_: Any, **__: Any) -> Any:
        return copied(model).eval() if ref_model is None else ref_model

    releases.restore_attributes(model)
    sizes = {"max_completion_length": 16, "num_generations": 2, "per_device_train_batch_size": 2}
    # A run constructs its trainer once, which sets the random seeds; here many are constructed.
    with quiet(), random_states_kept(), place_kept(where_it_fails=True):
        # The reference model is loaded from where the policy came from: here it is given.
        with releases.loading_reference(reference):
            trainer = GRPOTrainer(
                model=model,
                reward_funcs=given_reward if reward_funcs is None else reward_funcs,
                processing_class=tiny_tokenizer() if tokenizer is None else tokenizer,
                train_dataset=_prompts() if rows is None else dataset_of(rows),
                peft_config=peft_config,
                args=args or GRPOConfig(output_dir=_folder().name, **QUIETLY, **{**sizes, **settings}),
                **({"rollout_func": None if tools else replay} if releases.has_rollout_func() else {}),
                **({} if tools is None else {"tools": tools}),
            )
        trainer.remove_callback(PrinterCallback)
    return trainer


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Make the folder that trainers are constructed with. One that writes is given another."""
    return tempfile.TemporaryDirectory()


def dataset_of(rows: Sequence[dict[str, Any]]) -> Any:
    """Make a dataset of these rows."""
    from datasets import Dataset

    return Dataset.from_list(list(rows))


@cache
def _prompts() -> Any:
    return dataset_of([{"prompt": PROMPT}] * 64)


@contextmanager
def place_kept(*, where_it_fails: bool = False) -> Iterator[None]:
    """Restore what accelerate says of this process to all of its trainers, which each configuration clears.

    Args:
        where_it_fails: only if the block raises; otherwise what the block made stays, for the trainer that it made.
    """
    from accelerate.state import AcceleratorState, GradientState, PartialState

    shared = [each._shared_state for each in (PartialState, AcceleratorState, GradientState)]
    before, is_done = [dict(each) for each in shared], False
    try:
        yield
        is_done = True
    finally:
        if not (is_done and where_it_fails):
            for now, then in zip(shared, before, strict=True):
                now.clear()  # each object has this dictionary as its own
                now.update(then)


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Restore the global random states behind what seeds them."""
    import random

    import numpy as np
    import torch

    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def replay(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Return the rollout that the adapter gave the trainer, by default a token for each prompt."""
    alike = {"prompt_ids": [PROMPT_IDS] * len(prompts), "completion_ids": [[6]] * len(prompts), "logprobs": None}
    return dict(getattr(trainer, "replayed", alike))


def given_reward(given_reward: list[float], **_: Any) -> list[float]:
    """Return the rewards that the rows come with."""
    return given_reward


class _Begun(Exception):
    """The run has come to its first epoch."""


def begin(trainer: Any, resume_from: str | bool | None = None) -> dict[str, Any]:
    """Run `train` up to its first epoch -> the arguments of the trainer's `_run_epoch`."""
    # To free the memory of other models takes longer than everything else here.
    keeps_memory = patch.object(trainer.accelerator, "free_memory")
    with keeps_memory, patch.object(trainer, "_run_epoch", side_effect=_Begun) as run, suppress(_Begun):
        trainer.train(resume_from_checkpoint=resume_from)
    return dict(run.call_args.kwargs)


def logged(trainer: Any, names: dict[str, str]) -> dict[str, float]:
    """Have the trainer log the metrics of an update -> those of `names`, which maps its names to the contract's."""
    trainer.state = copy.copy(trainer.state)
    trainer.state.log_history = []
    trainer.log({})
    (log,) = trainer.state.log_history
    return {ours: log[theirs] for theirs, ours in names.items() if log.get(theirs) is not None}
