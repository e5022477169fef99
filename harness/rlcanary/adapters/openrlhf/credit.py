"""OpenRLHF's rewards, advantages and critic."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rlcanary.adapters.openrlhf import run
from rlcanary.adapters.openrlhf.base import OpenrlhfBase
from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.batch import LossOutput
from rlcanary.contract.records.credit import Credit

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.records.credit import CreditBatch, ValueBatch
    from rlcanary.contract.records.lengths import Lengths


class CreditOfTokens(OpenrlhfBase):
    """From the rewards of completions to the credit of tokens."""

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        import torch

        if self.conventions.whitening != "none":
            raise NotProvided("whitened advantages are those of tokens")
        mask = torch.ones(len(rewards), 1, dtype=torch.bool)
        return self._estimated(rewards, group_ids, mask, None).advantages.squeeze(1)  # type: ignore[no-any-return]

    def token_advantages(self, batch: CreditBatch) -> Credit:
        if batch.token_rewards is not None:
            raise NotProvided("the only rewards of tokens are those of the KL")
        has_critic = self.conventions.token_credit == "gae"
        if has_critic and batch.values is None:
            raise NotProvided("gae needs a critic")
        made = self._estimated(batch.rewards, batch.group_ids, batch.mask, batch.values)
        return Credit(made.advantages, made.returns if has_critic else None)

    def shape_rewards(self, rewards: Tensor, lengths: Lengths) -> Tensor:
        from openrlhf.trainer.ppo_utils.experience import Experience
        from openrlhf.trainer.ppo_utils.length_penalty import apply_length_penalties

        made = Experience(rewards=rewards.clone(), response_length=lengths.completions, info={})
        apply_length_penalties([made], self.args({"rollout.max_new_tokens": lengths.max_new_tokens}))
        return made.rewards  # type: ignore[no-any-return]

    def keep_group(self, rewards: Tensor) -> bool:
        """Decide as the generator of samples does with `dynamic_filtering_enable`."""
        if not set(rewards.tolist()) <= {0.0, 1.0}:
            raise NotProvided("dynamic_filtering_range is open and, by default, that of rewards from 0 to 1")
        responses = [run.response_of([0], [0], None, None, reward) for reward in rewards.tolist()]
        generator = run.generator_of(self.args())
        generator._dispatch_prompts_to_vllm = lambda *_, **__: [responses]
        prompts = iter([("", ["a"], [""], [None])])
        with run.on_cpu():
            kept, _, _ = generator._generate_vllm(prompts, 1, dynamic_filtering=True)
        return bool(kept)

    def value_loss(self, batch: ValueBatch) -> LossOutput:
        import torch
        from openrlhf.models import ValueLoss
        from openrlhf.trainer.ppo_utils.experience import Experience
        from openrlhf.trainer.ray.ppo_critic import CriticPPOTrainer
        from openrlhf.utils.loss_utils import iter_grad_accum_global_norm

        if batch.global_tokens is not None or batch.global_sequences is not None:
            raise NotProvided("the trainer counts the tokens of the whole update itself")
        if batch.old_values is None:
            raise NotProvided("value clipping has old values")
        rows, width = batch.mask.shape
        experience = Experience(
            sequences=torch.zeros(rows, 1 + width, dtype=torch.long),
            attention_mask=torch.ones(rows, 1 + width, dtype=torch.long),
            action_mask=batch.mask,
            values=batch.old_values,
            returns=batch.returns,
        )
        losses: list[Tensor] = []
        args = self.args()
        trainer = CriticPPOTrainer.__new__(CriticPPOTrainer)
        trainer.args, trainer.strategy = args, run.strategy_of(args)
        trainer.strategy.backward = lambda loss, *_: losses.append(loss)
        trainer.strategy.optimizer_step = lambda *_, **__: None
        trainer.strategy.get_grad_norm = lambda _: 0.0
        trainer.critic, trainer.critic_optim, trainer.aux_loss = _GivenCritic(batch.values), None, False
        trainer.critic_scheduler = SimpleNamespace(get_last_lr=lambda: [0.0])
        trainer.critic_loss_fn = ValueLoss(args.critic.value_clip)
        with run.on_cpu():
            for each, counts in iter_grad_accum_global_norm(
                [experience], trainer.strategy, 1, lambda each: each.action_mask
            ):
                trainer.training_step(each, 0, counts)
        return LossOutput(losses[0])

    def _estimated(self, rewards: Tensor, group_ids: Tensor, mask: Tensor, values: Tensor | None) -> Any:
        """Run `compute_advantages_and_returns` on rows without a KL -> the experience that it made."""
        import torch
        from openrlhf.trainer.ppo_utils.experience import Experience

        _, counts = torch.unique(group_ids, return_counts=True)
        if len(counts.unique()) != 1:
            raise NotProvided("n_samples_per_prompt is one size for all groups")
        # Each row's position before the samples were spread over the ranks: with its group.
        places = torch.argsort(torch.argsort(group_ids, stable=True))
        experience = Experience(
            index=places.tolist(),
            rewards=rewards.clone(),
            action_mask=mask,
            values=values,
            kl=torch.zeros(mask.shape),
            response_length=mask.sum(dim=1),
            info={},
        )
        maker = run.maker_of(self.args({"rollout.n_samples_per_prompt": int(counts[0])}))
        with run.on_cpu():
            (made,) = maker.compute_advantages_and_returns([experience])
        return made


class _GivenCritic:
    """Stand-in for the critic that returns given values."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def train(self) -> None:
        """Do nothing: there are no modules."""

    def __call__(self, *_: Any, **__: Any) -> tuple[Tensor, Any]:
        return self.values, None
