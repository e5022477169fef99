"""Updates, checkpoints and the start of a run of ms-swift's `GRPOTrainer`."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ms_swift_objective import SwiftObjective
from ms_swift_trainers import UPDATES, grpo_trainer, known, row

from rlcanary.adapters.frameworks import quiet
from rlcanary.adapters.trl.trainer.state import Rollout, TrlState
from rlcanary.adapters.trl.training import arguments_of
from rlcanary.contract.declining import NotProvided

if TYPE_CHECKING:
    from pathlib import Path

    from rlcanary.contract.batch import CollatedBatch, Group
    from rlcanary.contract.records.building import RunSettings


@dataclass
class SwiftState(TrlState):
    """A trainer of swift that has come to its first epoch."""

    def update(self, rollout: Rollout, finish_reasons: list[str] | None = None) -> list[dict[str, float]]:
        """Run the trainer's loop over one rollout batch -> the logged metrics of each update, by the contract's names."""
        with self.running() as trainer:
            args, rows = trainer.args, len(rollout.rewards)
            if rows % args.steps_per_generation:
                raise NotProvided(f"{rows} completions are no {args.steps_per_generation} equal batches")
            trainer.num_generations = rollout.group_size
            args.per_device_train_batch_size = rows // args.steps_per_generation
            trainer.engine.rollout, trainer.engine.finish_reasons = rollout, finish_reasons
            trainer._buffered_inputs = None
            before = len(trainer.state.log_history)
            texts = [trainer.template.tokenizer.decode(ids) for ids in rollout.prompt_ids]
            batch = [row(text, given_reward=reward) for text, reward in zip(texts, rollout.rewards, strict=True)]
            steps = args.steps_per_generation * trainer.num_iterations
            self.epoch_over(trainer, [copy.deepcopy(batch) for _ in range(steps)])
        return self.logged_since(before)


class SwiftTraining(SwiftObjective):
    """What a run does with its state."""

    def new_state(self, model: Any, ref_model: Any, learning_rate: float) -> Any:
        # As every schedule of transformers, swift's default, a cosine, is a setting; the checks ask for a constant rate.
        constant = {"max_steps": UPDATES, "lr_scheduler_type": "constant", "learning_rate": learning_rate}
        with quiet():
            return self._state({**constant, **self.settings}, model, ref_model)

    def _state(self, settings: dict[str, Any], model: Any, ref_model: Any) -> SwiftState:
        own = {name: value for name, value in settings.items() if name != "soft_cache_length"}
        state = SwiftState.of(grpo_trainer(own, model, ref_model))
        assert isinstance(state, SwiftState)
        return state

    def build(self, settings: RunSettings, model: Any) -> Any:
        if settings.frozen:
            raise NotProvided("this adapter leaves freeze_parameters of swift's command line out")
        if settings.lora is not None:
            from peft import LoraConfig
            from swift.tuners import Swift

            from rlcanary.contract.layers import copied

            lora = settings.lora
            sizes: dict[str, Any] = {"r": lora.rank, "lora_alpha": lora.alpha}
            reference = copied(model).eval()
            model = Swift.prepare_model(known(model), LoraConfig(target_modules=list(lora.targets), **sizes))
        else:
            reference = None
        with quiet():
            return self._state({**self.settings, **arguments_of(settings)}, model, reference)

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        if batch.ref_logprobs is not None and state.trainer.beta:
            raise NotProvided("the trainer scores with its reference model itself")
        return self._update(state, Rollout.of_batch(batch))

    def rl_step(self, state: Any, groups: list[Group], pad_token_id: int) -> dict[str, float]:
        reasons = [each.finish_reason for group in groups for each in group.completions]
        return self._update(state, Rollout.of_groups(groups), reasons)

    def _update(self, state: Any, rollout: Rollout, finish_reasons: list[str] | None = None) -> dict[str, float]:
        if rollout.group_size < 2:
            raise NotProvided("num_generations has to be greater than 1")
        if any(not ids for ids in rollout.completion_ids):
            raise NotProvided("an engine of swift returns a token at least")
        updates: list[dict[str, float]] = state.update(rollout, finish_reasons)
        return updates[-1]

    def save_checkpoint(self, state: Any, folder: Path) -> None:
        with state.running() as trainer:
            trainer.args.output_dir = str(folder)
            trainer._save_checkpoint(trainer.model, trial=None)

    def load_checkpoint(self, state: Any, folder: Path) -> Any:
        state.resume(str(folder))
        return state
