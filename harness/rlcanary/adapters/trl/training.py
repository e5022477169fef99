"""Updates, checkpoints and evaluations of a run of the trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlcanary.adapters.frameworks import quiet
from rlcanary.adapters.trl import releases
from rlcanary.adapters.trl.base import TrlBase
from rlcanary.adapters.trl.trainer.state import Rollout, TrlState
from rlcanary.adapters.trl.trainer.trainers import UPDATES, grpo_trainer
from rlcanary.contract.declining import NotProvided

if TYPE_CHECKING:
    from pathlib import Path

    from rlcanary.contract.batch import CollatedBatch, Group
    from rlcanary.contract.records.building import RunSettings

# Of an evaluation, those that tell of the machine.
TIMES = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "epoch", "step")


class TrlTraining(TrlBase):
    """Updates, checkpoints and evaluations of a run's state."""

    def new_state(self, model: Any, ref_model: Any, learning_rate: float) -> Any:
        settings = {"max_steps": UPDATES, **self.settings, "learning_rate": learning_rate}
        with quiet():  # once for all that a state takes
            return self._new_state(settings, model, ref_model)

    def _new_state(self, settings: dict[str, Any], model: Any, ref_model: Any) -> TrlState:
        trainer = grpo_trainer(settings, model, ref_model)
        if getattr(trainer, "aux_loss_enabled", False):  # older trainers never add it
            raise NotProvided("the trainer adds the load-balancing loss of a router, which no convention declares")
        trainer.use_vllm = self.use_vllm
        return TrlState.of(trainer)

    def build(self, settings: RunSettings, model: Any) -> Any:
        from rlcanary.contract.layers import copied

        if settings.frozen:
            raise NotProvided("the trainer freezes nothing")
        adapters = None
        if settings.lora is not None:
            from peft import LoraConfig

            lora = settings.lora
            sizes: dict[str, Any] = {"r": lora.rank, "lora_alpha": lora.alpha}
            adapters = LoraConfig(target_modules=list(lora.targets), **sizes)
        trainer = grpo_trainer(
            {**self.settings, **arguments_of(settings)}, model, copied(model).eval(), peft_config=adapters
        )
        return TrlState.of(trainer)

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        if batch.ref_logprobs is not None and state.trainer.beta:
            raise NotProvided("the trainer scores with its reference model itself")
        return self._update(state, Rollout.of_batch(batch))[-1]

    def rl_step(self, state: Any, groups: list[Group], pad_token_id: int) -> dict[str, float]:
        return self._update(state, Rollout.of_groups(groups))[-1]

    def save_checkpoint(self, state: Any, folder: Path) -> None:
        with state.running() as trainer:
            trainer.args.output_dir = str(folder)
            trainer._save_checkpoint(trainer.model, trial=None)

    def load_checkpoint(self, state: Any, folder: Path) -> Any:
        state.resume(str(folder))
        return state

    def evaluate(self, state: Any) -> dict[str, float]:
        from datasets import Dataset

        items = list(state.eval_items)

        def reward(completions: list[str], item: list[int], **_: Any) -> list[float | None]:
            return [items[index].reward(text) for index, text in zip(item, completions, strict=True)]

        releases.require_rollout_func()
        with state.running() as trainer:
            decode = trainer.processing_class.decode
            rows = [{"prompt": decode(item.prompt_ids), "item": index} for index, item in enumerate(items)]
            training, trainer.reward_funcs, trainer.rollout_func = (
                (trainer.reward_funcs, trainer.rollout_func),
                [reward],
                None,
            )
            try:
                # Older releases only log what their trainer adds.
                metrics = trainer.evaluate(Dataset.from_list(rows)) | trainer.state.log_history[-1]
            finally:
                trainer.reward_funcs, trainer.rollout_func = training
        return {
            name.removeprefix("eval_"): value
            for name, value in metrics.items()
            if name not in TIMES and value is not None
        }

    def _update(self, state: Any, rollout: Rollout) -> list[dict[str, float]]:
        if rollout.group_size < 2:
            raise NotProvided("num_generations has to be at least 2")
        updates: list[dict[str, float]] = state.update(rollout)
        return updates


def arguments_of(settings: RunSettings) -> dict[str, Any]:
    """Return the arguments of transformers for a run: its length, optimizer and schedule.

    Raises:
        NotProvided: transformers has no such schedule.
    """
    return {
        **_schedule(settings),
        "max_steps": settings.total_updates,
        "learning_rate": settings.learning_rate,
        "warmup_steps": settings.warmup_updates,
        "weight_decay": settings.weight_decay,
        "adam_beta1": settings.betas[0],
        "adam_beta2": settings.betas[1],
        "adam_epsilon": settings.eps,
        "gradient_checkpointing": settings.gradient_checkpointing,
    }


def _schedule(settings: RunSettings) -> dict[str, Any]:
    """Return the settings of a `GRPOConfig` for the course of the learning rate.

    Raises:
        NotProvided: transformers has no such schedule.
    """
    kind: dict[str, Any] = {"lr_scheduler_type": settings.rate_shape}
    if settings.rate_shape == "constant" and settings.warmup_updates:
        return {"lr_scheduler_type": "constant_with_warmup"}
    if not settings.final_share or settings.rate_shape == "constant":
        return kind
    if settings.rate_shape == "cosine":
        return {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": settings.final_share}}
    end = {"lr_end": settings.final_share * settings.learning_rate, "power": 1.0}
    return {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": end}
