"""Mistakes that only large inputs show: limits of a chunk, a block or a page beyond which something else happens."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.contract.adapter import Item
from rlcanary.contract.batch import CollatedBatch, Completion, Group, LossOutput, PolicyBatch
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.presets import GRPO
from rlcanary.contract.records.credit import Credit, CreditBatch, ValueBatch
from rlcanary.contract.records.lengths import Lengths
from rlcanary.contract.records.other_losses import SupervisedBatch
from rlcanary.contract.records.preparation import DataRow, PreparationOptions, PreparedData
from rlcanary.contract.records.reporting import EvaluatedItem, Metric, RolloutBatch

ROWS, TOKENS, IDS = 64, 256, 1024
GAE = GRPO.replace(token_credit="gae")


class LossOfTheFirstRows(ReferenceAdapter):
    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        return super().policy_loss(batch.rows(torch.arange(ROWS)) if len(batch.mask) > ROWS else batch)


class LossOfTheFirstTokens(ReferenceAdapter):
    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        kept_T = torch.arange(batch.mask.shape[1]) < TOKENS
        return super().policy_loss(replace(batch, mask=batch.mask & kept_T))


class LastChunkAtAnotherTemperature(ReferenceAdapter):
    def token_logprobs(self, logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
        whole = logits.shape[1] // TOKENS * TOKENS or logits.shape[1]
        chunks = (logits[:, :whole] / temperature, token_ids[:, :whole]), (logits[:, whole:], token_ids[:, whole:])
        return torch.cat([super(type(self), self).token_logprobs(*chunk, 1.0) for chunk in chunks], dim=1)


class SoftmaxOverTheLikeliest(ReferenceAdapter):
    def token_logprobs(self, logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
        scaled = logits.float() / temperature
        norm = scaled.topk(min(IDS, scaled.shape[-1]), dim=-1).values.logsumexp(dim=-1)
        return scaled.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1) - norm


class EntropyOfTheLikeliest(ReferenceAdapter):
    def entropy(self, logits: Tensor) -> Tensor:
        return super().entropy(logits.topk(min(IDS, logits.shape[-1]), dim=-1).values)


class PositionsEndEarly(ReferenceAdapter):
    def completion_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        cut = replace(batch, position_ids=batch.position_ids.clamp(max=ROWS - 1))
        return super().completion_logprobs(model, cut, temperature)


class MaskEndsEarly(ReferenceAdapter):
    def completion_mask(self, completion_ids: Tensor, eos_token_ids: Sequence[int], pad_token_id: int) -> Tensor:
        mask = super().completion_mask(completion_ids, eos_token_ids, pad_token_id)
        return mask & (torch.arange(mask.shape[1]) < TOKENS)


class GroupsOfAtMostSixtyFour(ReferenceAdapter):
    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        place_B = torch.stack([(group_ids[:row] == group).sum() for row, group in enumerate(group_ids)])
        return super().advantages(rewards, group_ids * len(group_ids) + place_B // ROWS)


class SignalOfTheFirst(ReferenceAdapter):
    def keep_group(self, rewards: Tensor) -> bool:
        return super().keep_group(rewards[:ROWS])


class WeightsOfTheFirstRows(ReferenceAdapter):
    def importance_weights(self, trainer_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> Tensor:
        weights = super().importance_weights(trainer_logprobs, sampler_logprobs, mask)
        return torch.cat([weights[:ROWS], mask[ROWS:].to(weights.dtype)])


class KlOfTheFirstRows(ReferenceAdapter):
    def kl(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        kl = super().kl(logprobs, ref_logprobs)
        return torch.cat([kl[:ROWS], 0 * kl[ROWS:]])


class ManyPiecesWeighMore(ReferenceAdapter):
    def accumulated_loss(self, batch: PolicyBatch, n_micro: int) -> LossOutput:
        output = super().accumulated_loss(batch, n_micro)
        return replace(output, loss=output.loss * max(1, n_micro / 4))


class CreditEndsEarly(ReferenceAdapter):
    def __init__(self, conventions: Conventions = GAE) -> None:
        super().__init__(conventions)

    def token_advantages(self, batch: CreditBatch) -> Credit:
        credit = super().token_advantages(batch)
        return replace(credit, advantages=credit.advantages * (torch.arange(batch.mask.shape[1]) < TOKENS))


class ValuesOfTheFirstRows(ReferenceAdapter):
    def value_loss(self, batch: ValueBatch) -> LossOutput:
        return super().value_loss(batch.rows(torch.arange(ROWS)) if len(batch.mask) > ROWS else batch)


class LabelsEndEarly(ReferenceAdapter):
    def supervised_loss(self, batch: SupervisedBatch) -> LossOutput:
        return super().supervised_loss(replace(batch, mask=batch.mask & (torch.arange(batch.mask.shape[1]) < TOKENS)))


class SixteenBits(ReferenceAdapter):
    def make_batch(self, groups: list[Group], pad_token_id: int) -> CollatedBatch:
        batch = super().make_batch(groups, pad_token_id)
        ids = {name: getattr(batch, name).to(torch.int16).long() for name in ("input_ids", "completion_ids")}
        return replace(batch, **ids)


class ManyRowsSortedByLength(ReferenceAdapter):
    def make_batch(self, groups: list[Group], pad_token_id: int) -> CollatedBatch:
        batch = super().make_batch(groups, pad_token_id)
        if len(batch.rewards) <= ROWS:
            return batch
        order = batch.completion_mask.sum(dim=1).argsort(descending=True, stable=True)
        return replace(batch, rewards=batch.rewards[order])


class OrderOfThePage(ReferenceAdapter):
    def data_order(self, n_items: int, epoch: int, rank: int, world_size: int) -> list[int]:
        return [item % TOKENS for item in super().data_order(n_items, epoch, rank, world_size)]


class ResumedInAnEarlyEpoch(ReferenceAdapter):
    def resumed_order(self, n_items: int, consumed: int, count: int, rank: int, world_size: int) -> list[int]:
        return super().resumed_order(n_items, min(consumed, 3 * n_items), count, rank, world_size)


class PageOfRowsPrepared(ReferenceAdapter):
    def prepare(self, rows: list[DataRow], tokenizer: Any, options: PreparationOptions) -> PreparedData:
        return super().prepare(rows[:ROWS], tokenizer, options)


class PageOfPromptsGoesLast(ReferenceAdapter):
    def rollout(self, engine: Any, items: list[Item], sampling: Mapping[str, Any]) -> list[Group]:
        groups = super().rollout(engine, items, sampling)
        return groups[32:] + groups[:32]


class PageOfPromptsBackwards(ReferenceAdapter):
    def generate(self, engine: Any, prompts: list[list[int]], sampling: Mapping[str, Any]) -> list[list[Completion]]:
        completions = super().generate(engine, prompts, sampling)
        return completions[:32] + completions[:31:-1]


class PageOfCompletionsScored(ReferenceAdapter):
    def score(self, items: list[Item], completions: list[str]) -> Tensor:
        rewards = super().score(items, completions)
        return torch.cat([rewards[:ROWS], 0 * rewards[ROWS:]])


class RewardsClippedBeforeThePenalty(ReferenceAdapter):
    def shape_rewards(self, rewards: Tensor, lengths: Lengths) -> Tensor:
        return super().shape_rewards(rewards.clamp(-1, 1), lengths)


class PageOfItemsEvaluated(ReferenceAdapter):
    def evaluation_items(self, n_items: int, batch_size: int, rank: int, n_ranks: int) -> list[int]:
        return super().evaluation_items(min(n_items, TOKENS), batch_size, rank, n_ranks)


class PageOfItemsMeasured(ReferenceAdapter):
    def evaluation_metrics(self, items: list[EvaluatedItem], k: int, batch_size: int) -> dict[str, float]:
        return super().evaluation_metrics(items[:ROWS], k, batch_size)


class PageOfGroupsMeasured(ReferenceAdapter):
    def rollout_metrics(self, batch: RolloutBatch, n_ranks: int) -> dict[str, float]:
        return super().rollout_metrics(replace(batch, groups=batch.groups[:ROWS]), n_ranks)


class PageOfPartsMerged(ReferenceAdapter):
    def merged_metrics(self, parts: list[dict[str, Metric]]) -> dict[str, float]:
        return super().merged_metrics(parts[:ROWS])


class ReferenceFollowsAfterAWhile(ReferenceAdapter):
    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        metrics = super().train_step(state, batch)
        state.updates = getattr(state, "updates", 0) + 1
        if state.updates == 5 and state.ref_model is not None:
            state.ref_model.load_state_dict(state.model.state_dict())
        return metrics


# The check that shows each.
SIZE_MUTANTS: dict[type[ReferenceAdapter], str] = {
    LossOfTheFirstRows: "loss.declared_value",
    LossOfTheFirstTokens: "loss.declared_gradient",
    LastChunkAtAnotherTemperature: "logprob.temperature",
    SoftmaxOverTheLikeliest: "logprob.is_log_softmax",
    EntropyOfTheLikeliest: "entropy.is_shannon_entropy",
    PositionsEndEarly: "forward.scores_each_token_at_its_place",
    MaskEndsEarly: "mask.several_eos_ids",
    GroupsOfAtMostSixtyFour: "advantage.declared_formula",
    SignalOfTheFirst: "filter.varied_group_is_kept",
    WeightsOfTheFirstRows: "importance.declared_weights",
    KlOfTheFirstRows: "kl.declared_estimator",
    ManyPiecesWeighMore: "split.micro_batches",
    CreditEndsEarly: "credit.declared_advantages",
    ValuesOfTheFirstRows: "value.declared_loss",
    LabelsEndEarly: "supervised.declared_loss",
    SixteenBits: "batch.tokens",
    ManyRowsSortedByLength: "batch.rewards_and_identity",
    OrderOfThePage: "order.every_item_once",
    ResumedInAnEarlyEpoch: "order.resumed",
    PageOfRowsPrepared: "preparing.rows_as_given",
    PageOfPromptsGoesLast: "rollout.groups_follow_items",
    PageOfPromptsBackwards: "parity.greedy",
    PageOfCompletionsScored: "reward.one_per_completion",
    RewardsClippedBeforeThePenalty: "overlong.declared_penalty",
    PageOfItemsEvaluated: "evaluation_plan.every_item_once",
    PageOfItemsMeasured: "evaluation_metrics.recomputed",
    PageOfGroupsMeasured: "rollout_metrics.recomputed",
    PageOfPartsMerged: "merged_metrics.equal_the_whole",
    ReferenceFollowsAfterAWhile: "step.reference_model_stays",
}
