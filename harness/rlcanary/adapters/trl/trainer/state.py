"""The state of a run of `GRPOTrainer`, and the updates of its own loop."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from rlcanary.adapters.frameworks import quiet
from rlcanary.adapters.trl import releases
from rlcanary.adapters.trl.trainer.trainers import PROMPT, begin
from rlcanary.contract.batch import CollatedBatch, Group
from rlcanary.contract.declining import NotProvided
from rlcanary.contract.state import TrainState

# Attributes of a model that belong to it alone: the fused forward pass, and handles of hooks.
BOUND = ("forward", "_require_grads_hooks", "_require_grads_hook")
# The trainer's names of metrics, and the contract's.
METRICS = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "lr",
    "reward": "reward",
    "kl": "kl",
    "entropy": "entropy",
    "clip_ratio/region_mean": "clip_fraction",
    "clip_ratio/low_mean": "clip_fraction_low",
    "clip_ratio/high_mean": "clip_fraction_high",
}


@dataclass
class TrlState(TrainState):
    """A trainer that has come to its first epoch.

    Attributes:
        trainer: the `GRPOTrainer`.
        epoch: the arguments of its `_run_epoch`.
        engines: engines that its weights were synced to, and the trainer's backend for each.
        bound: what the trainer bound to its models, with the models.
    """

    trainer: Any = None
    epoch: dict[str, Any] = field(default_factory=dict)
    engines: list[tuple[Any, Any]] = field(default_factory=list)
    bound: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)

    @classmethod
    def of(cls, trainer: Any) -> TrlState:
        """Begin the run of a trainer."""
        with quiet():
            epoch = begin(trainer)
        state = cls(
            model=trainer.model,
            optimizer=trainer.optimizer.optimizer,
            scheduler=trainer.lr_scheduler,
            ref_model=trainer.ref_model,
            trainer=trainer,
            epoch=epoch,
        )
        # A copy of a model with a bound forward pass would compute with the weights of the original.
        for model in filter(None, (_base(trainer.model), trainer.ref_model)):
            state.bound.append((model, {name: vars(model)[name] for name in BOUND if name in vars(model)}))
        state.unbind()
        trainer.add_callback(_callback(state))
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainState:
        parts = (self.model, self.optimizer, self.scheduler, self.ref_model)
        return TrainState(*copy.deepcopy(parts, memo), eval_items=self.eval_items)

    @contextmanager
    def running(self) -> Iterator[Any]:
        """Lend the trainer, with its models as it patched them."""
        self.bind()
        try:
            with quiet():
                yield self.trainer
        finally:
            self.unbind()

    def bind(self) -> None:
        """Give the models what the trainer bound to them."""
        for model, bound in self.bound:
            vars(model).update(bound)

    def unbind(self) -> None:
        """Leave the models as they were loaded."""
        for model, bound in self.bound:
            for name in bound:
                del vars(model)[name]

    def resume(self, folder: str) -> None:
        """Load the last checkpoint of a folder, as a run that is started with `resume_from_checkpoint` does."""
        with self.running() as trainer:
            trainer.args.output_dir = folder
            # As with `optimizers=(…, scheduler)`, the trainer keeps its scheduler.
            trainer._created_lr_scheduler = False
            begin(trainer, resume_from=True)

    def update(self, rollout: Rollout) -> list[dict[str, float]]:
        """Run the trainer's loop over one rollout batch -> the logged metrics of each update, by the contract's names."""
        with self.running() as trainer:
            args, rows = trainer.args, len(rollout.rewards)
            if rows % args.steps_per_generation:
                raise NotProvided(f"{rows} completions are no {args.steps_per_generation} equal batches")
            trainer.num_generations = rollout.group_size
            args.per_device_train_batch_size = rows // args.steps_per_generation
            trainer.replayed = rollout.outputs(with_logprobs=trainer.use_vllm)
            # The weights of an engine are not synced: the completions are there.
            trainer._last_loaded_step = trainer.state.global_step
            trainer._buffered_inputs = None
            before = len(trainer.state.log_history)
            self.epoch_over(trainer, [rollout.inputs()] * (args.steps_per_generation * trainer.num_iterations))
        return self.logged_since(before)

    def epoch_over(self, trainer: Any, batches: list[Any]) -> None:
        """Run the trainer's epoch over these batches."""
        counts = {
            "train_dataloader": batches,
            "steps_in_epoch": len(batches),
            "num_update_steps_per_epoch": -(-len(batches) // trainer.args.gradient_accumulation_steps),
        }
        trainer._run_epoch(**{**self.epoch, **counts})

    def logged_since(self, count: int) -> list[dict[str, float]]:
        """Return what was logged behind the first `count` logs, by the contract's names."""
        logs = self.trainer.state.log_history[count:]
        return [{ours: log[theirs] for theirs, ours in METRICS.items() if log.get(theirs) is not None} for log in logs]


@dataclass(frozen=True)
class Rollout:
    """Completions of groups of one size, as a `rollout_func` returns them.

    Attributes:
        prompt_ids: the prompt of each completion.
        completion_ids: its ids.
        rewards: its reward.
        group_size: completions per prompt.
        logprobs: the sampler's, 0 on ids that it did not sample; None if it returned none.
        sampled: 1 on ids that were sampled, 0 on others; None if all were.
    """

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    rewards: list[float]
    group_size: int
    logprobs: list[list[float]] | None = None
    sampled: list[list[int]] | None = None

    @classmethod
    def of_batch(cls, batch: CollatedBatch) -> Rollout:
        """Read the rows of a batch.

        Raises:
            NotProvided: its groups are not as the trainer has them.
        """
        from rlcanary.adapters.batches import prompts_of, tokens_of_completions

        present_BT = tokens_of_completions(batch)
        logprobs = None
        if batch.old_logprobs is not None:
            given_BT = batch.old_logprobs.masked_fill(~batch.completion_mask, 0.0)
            logprobs = [row[kept].tolist() for row, kept in zip(given_BT, present_BT, strict=True)]
        marks = [row[kept].long().tolist() for row, kept in zip(batch.completion_mask, present_BT, strict=True)]
        return cls(
            prompt_ids=[ids.tolist() for ids in prompts_of(batch)],
            completion_ids=[row[kept].tolist() for row, kept in zip(batch.completion_ids, present_BT, strict=True)],
            rewards=batch.rewards.tolist(),
            group_size=group_size(batch.group_ids.tolist()),
            logprobs=logprobs,
            sampled=None if all(map(all, marks)) else marks,
        )

    @classmethod
    def of_groups(cls, groups: list[Group], *, is_grouped: bool = True) -> Rollout:
        """Read the completions of groups, which count as groups of one completion unless `is_grouped`.

        Raises:
            NotProvided: the groups are of several sizes.
        """
        rows = [(group, each) for group in groups for each in group.completions]
        numbers = [number for number, group in enumerate(groups) for _ in group.completions]
        has_all = all(each.logprobs is not None for _, each in rows)
        marks = [list(map(int, each.sampled or [True] * len(each.token_ids))) for _, each in rows]
        return cls(
            prompt_ids=[list(group.prompt_ids) for group, _ in rows],
            completion_ids=[list(each.token_ids) for _, each in rows],
            rewards=[reward for group in groups for reward in group.rewards],
            group_size=group_size(numbers) if is_grouped else 1,
            logprobs=[list(each.logprobs or ()) for _, each in rows] if has_all else None,
            sampled=None if all(map(all, marks)) else marks,
        )

    def part(self, number: int, count: int) -> Rollout:
        """Return one of so many equal parts, in order."""
        size = len(self.rewards) // count
        own = slice(number * size, (number + 1) * size)
        return replace(
            self,
            prompt_ids=self.prompt_ids[own],
            completion_ids=self.completion_ids[own],
            rewards=self.rewards[own],
            logprobs=None if self.logprobs is None else self.logprobs[own],
            sampled=None if self.sampled is None else self.sampled[own],
        )

    def outputs(self, with_logprobs: bool) -> dict[str, Any]:
        """Return what a `rollout_func` returns; only an engine other than the trainer gives logprobs.

        Raises:
            NotProvided: the trainer of this release takes none.
        """
        releases.require_rollout_func()
        given = {
            "prompt_ids": self.prompt_ids,
            "completion_ids": self.completion_ids,
            "logprobs": self.logprobs if with_logprobs else None,
        }
        return given if self.sampled is None else {**given, "env_mask": self.sampled}

    def inputs(self) -> list[dict[str, Any]]:
        """Return the rows of the dataset, repeated as the sampler repeats them."""
        return [{"prompt": PROMPT, "given_reward": reward} for reward in self.rewards]


def group_size(group_ids: list[Any]) -> int:
    """Return the one size of groups that lie one after another.

    Raises:
        NotProvided: they do not, or have several sizes.
    """
    import torch

    ids, counts = torch.unique_consecutive(torch.tensor(group_ids), return_counts=True)
    if len(ids) != len(set(group_ids)) or len(counts.unique()) != 1:
        raise NotProvided("groups have to be of equal size and in order")
    return int(counts[0])


def _callback(state: TrlState) -> Any:
    """Make a callback that leaves the models bare for those who look at an optimizer's step."""
    from transformers import TrainerCallback

    class Bare(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            state.unbind()

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            state.bind()

    return Bare()


def _base(model: Any) -> Any:
    """Return the model within the wrapper of its adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
