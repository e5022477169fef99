"""SkyRL's advantage estimators and the losses of its workers, on given logprobs."""

from __future__ import annotations

import copy
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rlcanary.adapters.skyrl.base import SkyrlBase
from rlcanary.adapters.skyrl.workers import Ranks, new_trainer, new_worker, on_cpu
from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.batch import LossOutput
from rlcanary.contract.records.credit import Credit, CreditBatch

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.batch import PolicyBatch
    from rlcanary.contract.records.credit import ValueBatch

METRICS = {
    "policy_entropy": "entropy",
    "loss_metrics/clip_ratio": "clip_fraction",
    "policy_loss": "policy_loss",
}


class Objective(SkyrlBase):
    """Advantages, credit, KL, corrections and losses."""

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        import torch

        if self.conventions.token_credit != "outcome":
            raise NotProvided(f"{self.algorithm.advantage_estimator} gives advantages of tokens")
        of_one_token = CreditBatch(rewards, torch.ones(len(rewards), 1, dtype=torch.bool), group_ids)
        return self._estimated(of_one_token)[0].squeeze(1)

    def token_advantages(self, batch: CreditBatch) -> Credit:
        advantages_BT, returns_BT = self._estimated(batch)
        return Credit(advantages_BT, returns_BT if self.conventions.token_credit == "gae" else None)

    def kl(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        from skyrl.backends.skyrl_train.utils.ppo_utils import compute_approx_kl

        return compute_approx_kl(  # type: ignore[no-any-return]
            logprobs, ref_logprobs, kl_estimator_type=self.algorithm.kl_estimator_type
        )

    def importance_weights(self, trainer_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> Tensor:
        from skyrl.backends.skyrl_train.utils.off_policy_correction_utils import compute_off_policy_correction

        if self.conventions.importance_level == "none":
            raise NotProvided("off_policy_correction.tis_ratio_type is not set")
        with on_cpu():
            weights, _, _ = compute_off_policy_correction(
                trainer_logprobs, sampler_logprobs, mask.float(), self.algorithm.off_policy_correction
            )
        return weights.expand(mask.shape)  # type: ignore[no-any-return]

    def value_loss(self, batch: ValueBatch) -> LossOutput:
        from skyrl.backends.skyrl_train.utils.ppo_utils import ppo_critic_loss

        if batch.global_tokens is not None or batch.global_sequences is not None:
            raise NotProvided("the critic's loss has no global counts")
        loss, clip_fraction = ppo_critic_loss(
            batch.values, batch.old_values, batch.returns, self.algorithm, batch.mask.float()
        )
        return LossOutput(loss, {} if clip_fraction is None else {"value_clip_fraction": clip_fraction})

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        return self._update(batch)

    def accumulated_loss(self, batch: PolicyBatch, n_micro: int) -> LossOutput:
        return self._update(batch, n_micro=n_micro)

    def sharded_loss(self, batch: PolicyBatch, n_ranks: int) -> LossOutput:
        return self._update(batch, n_ranks=n_ranks)

    def _estimated(self, batch: CreditBatch) -> tuple[Tensor, Tensor]:
        """Run the trainer's `compute_advantages_and_returns` -> advantages and returns, [B, T].

        The rewards of tokens are given as SkyRL's KL in the reward, which it masks itself. Its rows end together, at their
        last trained token: what stands behind it moves in front, where SkyRL has its padding.
        """
        import torch
        from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch

        mask_BT, columns_T = batch.mask, torch.arange(batch.mask.shape[1])
        from_last_BT = mask_BT.flip(1).cumsum(dim=1).flip(1)
        lengths_B1 = (from_last_BT > 0).sum(dim=1, keepdim=True)
        order_BT = (columns_T + lengths_B1) % len(columns_T)
        rewards_BT = torch.where(mask_BT & (from_last_BT == 1), batch.rewards.unsqueeze(1), 0.0)
        given = {"rewards": rewards_BT, "loss_mask": mask_BT.float(), "values": batch.values}
        if batch.token_rewards is not None:
            zeros_BT = torch.zeros_like(batch.token_rewards)
            given |= {"action_log_probs": -batch.token_rewards, "base_action_log_probs": zeros_BT}
        config = copy.deepcopy(self.config)
        config.trainer.algorithm.kl_estimator_type = "k1"
        trainer = new_trainer(config)
        trainer.reward_kl_controller = SimpleNamespace(value=1.0, update=lambda **_: None)
        # SkyRL's mask of a response has the tokens of tools, which its mask of the loss leaves out.
        data = TrainingInputBatch(
            {name: None if values is None else values.gather(1, order_BT) for name, values in given.items()}
            | {"response_mask": (columns_T >= len(columns_T) - lengths_B1).float()}
        )
        data.metadata = {"uids": [str(group) for group in batch.group_ids.tolist()], "avg_response_length": 0.0}
        with on_cpu():
            if batch.token_rewards is not None:
                data = trainer.apply_reward_kl_penalty(data)
            data = trainer.compute_advantages_and_returns(data)
        back_BT = order_BT.argsort(dim=1)
        return data["advantages"].gather(1, back_BT), data["returns"].gather(1, back_BT)

    def _update(self, batch: PolicyBatch, n_micro: int = 1, n_ranks: int = 1) -> LossOutput:
        """Normalize advantages as the trainer does, and run the workers of all ranks one after the other."""
        rows = len(batch.mask)
        if batch.global_tokens is not None or batch.global_sequences is not None:
            raise NotProvided("the trainer counts the tokens of the whole update itself")
        if rows % (n_ranks * n_micro):
            raise NotProvided("ranks and micro-batches have to be of equal size")
        config = copy.deepcopy(self.config)
        config.trainer.micro_train_batch_size_per_gpu = rows // (n_ranks * n_micro)
        ranks, model = Ranks(), _GivenModel(batch)
        with on_cpu():
            data = new_trainer(config)._normalize_advantages(self._data(batch), [(0, rows)], _groups(batch))
            for chunk in data.chunk(rows // n_ranks):
                new_worker(config, model, ranks, n_ranks).forward_backward(chunk)
        metrics = {ours: ranks.reduced().get(theirs) for theirs, ours in METRICS.items()}
        if batch.entropy is None:
            metrics["entropy"] = None
        # Data-parallel ranks average their gradients.
        loss = sum(ranks.losses) / n_ranks
        return LossOutput(loss, {name: float(value) for name, value in metrics.items() if value is not None})

    def _data(self, batch: PolicyBatch) -> Any:
        import torch
        from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch

        rows, width = batch.mask.shape
        if self.conventions.kl_coef and self.conventions.kl_placement == "loss" and batch.ref_logprobs is None:
            raise NotProvided("use_kl_loss needs reference logprobs")
        if self.conventions.importance_level != "none" and batch.sampler_logprobs is None:
            raise NotProvided("off_policy_correction needs the sampler's logprobs")
        advantages = batch.advantages.unsqueeze(1) if batch.advantages.ndim == 1 else batch.advantages
        data = TrainingInputBatch(
            {
                # A row is known to the given model by its ids.
                "sequences": torch.arange(rows).unsqueeze(1).expand(rows, width + 1),
                "attention_mask": torch.ones(rows, width + 1, dtype=torch.long),
                "action_log_probs": batch.old_logprobs,
                "base_action_log_probs": batch.ref_logprobs,
                "advantages": advantages.expand(rows, width).contiguous(),
                "loss_mask": batch.mask.float(),
                "response_mask": batch.mask.long(),
                "rollout_logprobs": batch.sampler_logprobs,
            }
        )
        data.metadata = {"response_length": width}
        return data


class _GivenModel:
    """An actor whose output for a row is the batch's."""

    def __init__(self, batch: PolicyBatch) -> None:
        self.batch = batch

    def train(self) -> None:
        """Do nothing: there are no modules."""

    def __call__(self, sequences: Tensor, num_actions: int, **_: Any) -> tuple[Tensor, Any]:
        import torch

        rows = sequences[:, 0]
        entropy = self.batch.entropy
        entropy_BT = torch.zeros_like(self.batch.logprobs) if entropy is None else entropy
        return self.batch.logprobs[rows], {"entropy": torch.nn.functional.pad(entropy_BT[rows], (0, 1))}


def _groups(batch: PolicyBatch) -> list[tuple[int, int]]:
    """Return the boundaries of the prompts, whose rows SkyRL has beside each other."""
    from skyrl.train.dataset.preprocess import compute_prompt_boundaries

    if batch.group_ids is None:
        return [(row, row + 1) for row in range(len(batch.mask))]
    uids = [str(group) for group in batch.group_ids.tolist()]
    changes = sum(one != two for one, two in pairwise(uids))
    if changes + 1 != len(set(uids)):
        raise NotProvided("the rows of a prompt are beside each other")
    found: list[tuple[int, int]] = compute_prompt_boundaries(uids)
    return found
