"""Mistakes that no check revealed when somebody read the checks with such mistakes in mind."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlcanary import reference
from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.contract.adapter import Item
from rlcanary.contract.batch import CollatedBatch, Group, LossOutput, PolicyBatch
from rlcanary.contract.records.reporting import RolloutBatch


class AttendsToPadding(ReferenceAdapter):
    def completion_logprobs(self, model: Any, batch: CollatedBatch, temperature: float = 1.0) -> Tensor:
        everywhere = replace(batch, attention_mask=torch.ones_like(batch.attention_mask))
        return super().completion_logprobs(model, everywhere, temperature)


class DividedInHalfPrecision(ReferenceAdapter):
    def token_logprobs(self, logits: Tensor, token_ids: Tensor, temperature: float = 1.0) -> Tensor:
        return super().token_logprobs(logits / temperature, token_ids, 1.0)


class PopsWhatItScores(ReferenceAdapter):
    def score(self, items: Sequence[Item], completions: Sequence[str]) -> Tensor:
        assert isinstance(completions, list)
        found = list(completions)
        completions.clear()
        return super().score(items, found)


class FillsTheLogprobsOfTools(ReferenceAdapter):
    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        if batch.old_logprobs is not None:
            batch.old_logprobs.nan_to_num_(0.0)
        return super().train_step(state, batch)


class SamplesUnderASeed(ReferenceAdapter):
    def evaluate(self, state: Any) -> Mapping[str, float]:
        random = torch.random.get_rng_state()
        torch.manual_seed(0)
        sampling = ReferenceAdapter(self.conventions.replace(evaluation_temperature=1.0))
        metrics = sampling.evaluate(state)
        torch.random.set_rng_state(random)
        return metrics


class SavingLeavesEvaluationMode(ReferenceAdapter):
    def save_checkpoint(self, state: Any, folder: Path) -> None:
        super().save_checkpoint(state, folder)
        state.model.eval()


class StepWithoutTemperature(ReferenceAdapter):
    def rl_step(self, state: Any, groups: list[Group], pad_token_id: int) -> dict[str, float]:
        return ReferenceAdapter(self.conventions.replace(temperature=1.0)).rl_step(state, groups, pad_token_id)


class KlIsWeightedToo(ReferenceAdapter):
    """The correction multiplies the KL, where both are on."""

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        now = self.conventions
        exact = super().policy_loss(batch)
        if (
            now.importance_level != "token"
            or not now.kl_coef
            or batch.sampler_logprobs is None
            or now.entropy_coef == 0
        ):
            return exact
        weights_BT = reference.importance_weights(batch.old_logprobs, batch.sampler_logprobs, batch.mask, now)
        return replace(exact, loss=exact.loss + 0.1 * (weights_BT.nan_to_num(0) * batch.logprobs)[batch.mask].mean())


class TotalIsLoggedAsThePolicys(ReferenceAdapter):
    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        exact = super().policy_loss(batch)
        return LossOutput(exact.loss, {**exact.metrics, "policy_loss": float(exact.loss.detach())})


class NegativeRewardsAreLoggedAsZero(ReferenceAdapter):
    def rollout_metrics(self, batch: RolloutBatch, n_ranks: int) -> dict[str, float]:
        groups = [
            replace(group, rewards=[max(reward, 0.0) if reward == reward else reward for reward in group.rewards])
            for group in batch.groups
        ]
        return super().rollout_metrics(replace(batch, groups=groups), n_ranks)


class ResetBeforeTheWeights(ReferenceAdapter):
    def sync_weights(self, state: Any, engine: Any) -> None:
        engine.reset_prefix_cache()
        engine.load_weights(state.model.named_parameters())
        engine.version += 1


OVERLOOKED_MUTANTS: dict[type[ReferenceAdapter], str] = {
    AttendsToPadding: "forward.garbage_in_padding",
    DividedInHalfPrecision: "logprob.bfloat16_logits",
    PopsWhatItScores: "reward.inputs_untouched",
    FillsTheLogprobsOfTools: "step.batch_untouched",
    SamplesUnderASeed: "evaluation.repeatable",
    SavingLeavesEvaluationMode: "checkpoint.saving_changes_nothing",
    StepWithoutTemperature: "rl_step.one_update_is_train_step",
    KlIsWeightedToo: "config.correction_options",
    TotalIsLoggedAsThePolicys: "config.correction_options",
    NegativeRewardsAreLoggedAsZero: "rollout_metrics.recomputed",
    ResetBeforeTheWeights: "sync.cached_prefixes",
}
"""The check that each of them fails."""
