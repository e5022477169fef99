"""torchrl's optimization stepper and learning-rate hook."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rlcanary.adapters.batches import tokens_of_completions
from rlcanary.adapters.frameworks import part, quiet
from rlcanary.adapters.torchrl.data import ragged_logprobs, ragged_rows
from rlcanary.adapters.torchrl.losses.objective import METRICS, Objective
from rlcanary.contract.adapter import NotProvided

if TYPE_CHECKING:
    from rlcanary.contract.batch import CollatedBatch


class Training(Objective):
    """Updates of a model."""

    def new_state(self, model: Any, ref_model: Any, learning_rate: float) -> Any:
        # torchrl leaves the mode of the model to the training script, and its own script switches dropout off.
        return super().new_state(model.eval(), ref_model, learning_rate)

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        """Run the trainer's optimization stepper and learning-rate hook, with torchrl's model wrapper as the actor."""
        new_stepper = part("torchrl.trainers:MixedPrecisionOptimizationStepper")
        loss = self._actor_loss(state, batch)
        data = self._step_data(state, batch)
        stepper = new_stepper(state.optimizer)
        with quiet():
            output = stepper.step(SimpleNamespace(compute_loss=loss), data)
        part("torchrl.trainers:LRSchedulerHook")(state.scheduler)()
        metrics = {ours: output.get(theirs, None) for theirs, ours in {**METRICS, "grad_norm": "grad_norm"}.items()}
        return {name: float(value) for name, value in metrics.items() if value is not None}

    def _actor_loss(self, state: Any, batch: CollatedBatch) -> Any:
        """Return the loss with torchrl's wrapper as the actor, masked by what the assistant wrote where tools wrote too."""
        import torch

        has_tools = not torch.equal(batch.completion_mask, tokens_of_completions(batch))
        masking = {"masking_strategy": "rlhf"} if has_tools else {}
        return self._new_loss(self._wrapped(state.model, generate=False), **masking)

    def _step_data(self, state: Any, batch: CollatedBatch) -> Any:
        """Return rollouts as they come from the replay buffer, with advantages and, for a KL term, reference logprobs."""
        data = self._rows(state, batch)
        for fields, advantage in zip(data.tensordicts, self.advantages(batch.rewards, batch.group_ids), strict=True):
            fields["advantage"] = advantage.view(1, 1)
        return data

    def _dialogs(self, state: Any, batch: CollatedBatch) -> Any:
        """Return rollouts as a collector gives them: dialogs of one turn, with their rewards."""
        import torch
        from tensordict import lazy_stack

        data = self._rows(state, batch)
        for row, fields in enumerate(data.tensordicts):
            fields["group"] = batch.group_ids[row].view(1)
            # The reward has the shape that torchrl's reward parsers give it: one for all tokens of a step.
            fields["next", "reward"] = batch.rewards[row].view(1, 1)
            fields["next", "done"] = torch.ones(1, dtype=torch.bool)
        return lazy_stack([lazy_stack([fields]) for fields in data.tensordicts])

    def _rows(self, state: Any, batch: CollatedBatch) -> Any:
        """Return ragged rows with the sampler's logprobs and, for a KL term, those of the reference."""
        import torch

        if batch.old_logprobs is None:
            raise NotProvided("torchrl takes the ratio against the sampler's logprobs")
        data = ragged_rows(batch)
        given: dict[tuple[str, ...] | str, Any] = {"log_probs": ragged_logprobs(batch.old_logprobs, batch)}
        if self._loss_module.kl_to_ref_coeff:
            if batch.ref_logprobs is not None:
                given["next", "ref_log_probs"] = ragged_logprobs(batch.ref_logprobs, batch)
            elif state.ref_model is not None:
                with quiet(), torch.no_grad():
                    scored = self._wrapped(state.ref_model, generate=False)(ragged_rows(batch))
                given["next", "ref_log_probs"] = scored["log_probs"].unbind(0)
            else:
                raise NotProvided("kl_to_ref_coeff needs a reference")
        for row, fields in enumerate(data.tensordicts):
            for key, values in given.items():
                fields[key] = values[row]
        return data
