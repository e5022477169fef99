"""torchrl's advantage estimators per step, and the critic's part of its PPO loss. A step is a trained token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlcanary.adapters.frameworks import quiet
from rlcanary.adapters.torchrl.losses.objective import Objective
from rlcanary.adapters.torchrl.options import gae_defaults, new_critic_loss
from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.batch import LossOutput
from rlcanary.contract.records.credit import Credit

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.records.credit import CreditBatch, ValueBatch


class Critic(Objective):
    """Credit per token, and the critic's loss."""

    def token_advantages(self, batch: CreditBatch) -> Credit:
        if self.estimator is not None:
            return self._estimated(batch)
        if batch.token_rewards is not None:
            raise NotProvided("MCAdvantage gives each step the advantage of its own reward")
        advantages_B = self.advantages(batch.rewards, batch.group_ids)
        return Credit(advantages_B.unsqueeze(1).expand(batch.mask.shape))

    def value_loss(self, batch: ValueBatch) -> LossOutput:
        from tensordict import TensorDict
        from torchrl.objectives.utils import _reduce

        if batch.global_tokens is not None or batch.global_sequences is not None:
            raise NotProvided("torchrl's loss has no global counts")
        if self.conventions.value_clip is not None and batch.old_values is None:
            raise NotProvided("clip_value needs the old values")
        mask_BT = batch.mask
        steps = {"state": mask_BT[mask_BT], "value_target": batch.returns[mask_BT].unsqueeze(-1)}
        if batch.old_values is not None:
            steps["state_value"] = batch.old_values[mask_BT].unsqueeze(-1)
        data = TensorDict(steps, batch_size=[int(mask_BT.sum())])
        loss = new_critic_loss(self.critic, batch.values[mask_BT].unsqueeze(-1))
        with quiet():
            losses_N1, clip_fraction, _ = loss.loss_critic(data)
        metrics = {} if clip_fraction is None else {"value_clip_fraction": float(clip_fraction)}
        return LossOutput(_reduce(losses_N1, loss.reduction), metrics)

    def _estimated(self, batch: CreditBatch) -> Credit:
        """Run GAE over the trained tokens of all rows, one trajectory behind the other along the time dimension."""
        import torch
        from tensordict import TensorDict
        from torchrl.objectives.value import GAE

        if batch.values is None:
            raise NotProvided("GAE needs the critic's values")
        mask_BT = batch.mask
        is_last_BT = mask_BT & (mask_BT.flip(1).cumsum(dim=1).flip(1) == 1)
        rewards_BT = torch.where(is_last_BT, batch.rewards.unsqueeze(1), 0.0)
        if batch.token_rewards is not None:
            rewards_BT = rewards_BT + batch.token_rewards
        values_N1, done_N1 = batch.values[mask_BT].unsqueeze(-1), is_last_BT[mask_BT].unsqueeze(-1)
        steps = TensorDict(
            {
                "state_value": values_N1,
                "next": {
                    # Of a terminated state nothing is read.
                    "state_value": values_N1.roll(-1, dims=0),
                    "reward": rewards_BT[mask_BT].unsqueeze(-1).to(values_N1.dtype),
                    "done": done_N1,
                    "terminated": done_N1,
                },
            },
            batch_size=[len(values_N1)],
        )
        with quiet():
            GAE(value_network=None, **{**gae_defaults(), **(self.estimator or {})})(steps)

        def spread(values_N1: Tensor) -> Tensor:
            spread_BT = values_N1.new_zeros(mask_BT.shape)
            spread_BT[mask_BT] = values_N1.squeeze(-1)
            return spread_BT

        return Credit(spread(steps["advantage"]), spread(steps["value_target"]))
