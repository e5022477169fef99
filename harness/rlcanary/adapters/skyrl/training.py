"""SkyRL's training step: its trainer's methods on one batch, with its workers in this process."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from rlcanary.adapters.batches import tokens_of_completions
from rlcanary.adapters.skyrl.objective import METRICS, Objective
from rlcanary.adapters.skyrl.scoring import Rows, rows_of, wrapped
from rlcanary.adapters.skyrl.workers import Dispatch, new_reference, new_strategy, new_trainer, new_worker, on_cpu
from rlcanary.contract.adapter import NotProvided

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.batch import CollatedBatch, Group

LOGGED = {**METRICS, "final_loss": "loss", "grad_norm": "grad_norm", "policy_lr": "lr"}


class Training(Objective):
    """Updates of a model, and the filter of groups."""

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        return self._trained(state, batch, 1, 1)

    def rl_step(self, state: Any, groups: list[Group], pad_token_id: int) -> dict[str, float]:
        from rlcanary.reference import make_batch

        batch, _ = make_batch(groups, pad_token_id)
        epochs = self.config.trainer.update_epochs_per_batch
        return self._trained(state, batch, epochs, self.mini_batches, pad_token_id)

    def keep_group(self, rewards: Tensor) -> bool:
        """Decide as `dynamic_sampling` of the type "filter" does."""
        from skyrl.train.utils.trainer_utils import handle_filter_sampling

        rows = len(rewards)
        output = {
            "prompt_token_ids": [[0]] * rows,
            "response_ids": [[0]] * rows,
            "rewards": rewards.tolist(),
            "loss_masks": [[1]] * rows,
            "rollout_logprobs": None,
        }
        settings = {"type": "filter", "train_batch_size": 1, "n_samples_per_prompt": rows}
        with on_cpu():
            _, _, keep_sampling, _ = handle_filter_sampling(output, ["a"] * rows, settings, {"sample_batch_count": 1})
        return not keep_sampling

    def _trained(
        self, state: Any, batch: CollatedBatch, epochs: int, mini_batches: int, pad_token_id: int = 0
    ) -> dict[str, float]:
        import torch

        order = batch.group_ids.tolist()
        groups = list(dict.fromkeys(order))
        sizes = {order.count(group) for group in groups}
        if len(sizes) > 1 or sorted(order, key=groups.index) != order or len(groups) % mini_batches:
            raise NotProvided("prompts have one number of samples, beside each other, and mini-batches one of prompts")
        # SkyRL computes the KL also where its coefficient is 0.
        has_kl = self.algorithm.use_kl_loss or self.algorithm.use_kl_in_reward
        given_reference = has_kl and batch.ref_logprobs is not None
        has_reference = has_kl and not given_reference
        if has_reference and state.ref_model is None:
            raise NotProvided("use_kl_loss needs a reference")
        config = copy.deepcopy(self.config)
        config.generator.n_samples_per_prompt = sizes.pop()
        trainer = config.trainer
        trainer.train_batch_size = len(groups)
        trainer.policy_mini_batch_size = len(groups) // mini_batches
        trainer.micro_train_batch_size_per_gpu = trainer.micro_forward_batch_size_per_gpu = len(order)
        trainer.update_epochs_per_batch = epochs
        rows = rows_of(batch)
        output = {
            "prompt_token_ids": rows.prompts,
            "response_ids": rows.responses,
            "rewards": batch.rewards.tolist(),
            "loss_masks": rows.loss_masks,
            "rollout_logprobs": _scored(rows),
        }
        with on_cpu():
            strategy = new_strategy(trainer.policy.optimizer_config.max_grad_norm)
            workers = {"policy": new_worker(config, wrapped(state.model), strategy, state=state)}
            if has_reference:
                workers["ref"] = new_reference(config, wrapped(state.ref_model))
            runner = new_trainer(config, Dispatch(workers), pad_token_id, has_reference)
            uids = [str(group) for group in order]
            data = runner.convert_to_training_input(*runner.postprocess_generator_output(output, uids))
            data = runner.fwd_logprobs_values_reward(data)
            if given_reference:
                data["base_action_log_probs"] = _right_aligned(batch.ref_logprobs, batch)
            if self.algorithm.use_kl_in_reward:
                data = runner.apply_reward_kl_penalty(data)
            data = runner.compute_advantages_and_returns(data)
            with torch.enable_grad():
                status = runner.train_critic_and_policy(data)
        metrics = {ours: float(status[theirs]) for theirs, ours in LOGGED.items() if theirs in status}
        if self.algorithm.use_kl_in_reward:  # these rewards have the KL in them
            return metrics
        return {**metrics, "reward": runner.all_metrics["loss/avg_final_rewards"]}


def _scored(rows: Rows) -> list[list[float]] | None:
    """Return the sampler's logprobs, if all tokens have one."""
    import math

    logprobs: list[list[float]] | None = rows.logprobs
    is_whole = logprobs is not None and not any(math.isnan(value) for row in logprobs for value in row)
    return logprobs if is_whole else None


def _right_aligned(values: Tensor | None, batch: CollatedBatch) -> Tensor:
    """[B, T] of completions -> [B, A] whose rows end together, as all of SkyRL's."""
    import torch

    assert values is not None
    rows = [row[kept] for row, kept in zip(values, tokens_of_completions(batch), strict=True)]
    width = max(map(len, rows))
    return torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in rows])
