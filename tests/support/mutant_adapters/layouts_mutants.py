"""Mistakes in rows, updates and vocabularies on several ranks that no shipped bug in the museum has."""

import copy
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.bugs.layouts.layout_scale import larger_gradients
from rlcanary.contract.batch import CollatedBatch
from rlcanary.contract.records.layouts import Layout, RowShard, VocabShards
from rlcanary.contract.records.routing import ReplayLayout, RoutedRow
from rlcanary.reference.layouts import whole_row


def contiguous(whole: RowShard, size: int, rank: int) -> RowShard:
    """The positions from rank × size on, as many as size."""
    cut = {each.name: getattr(whole, each.name) for each in fields(whole)}
    return replace(
        whole, **{name: value[rank * size : (rank + 1) * size] for name, value in cut.items() if value is not None}
    )


class RestOfTheRowDropped(ReferenceAdapter):
    """The length of a shard is a floor division, and what is left belongs to no rank."""

    def shard_rows(self, batch: CollatedBatch, layout: Layout, rank: int) -> list[RowShard]:
        rows = [whole_row(batch, row) for row in range(len(batch.rewards))]
        return [contiguous(row, len(row.input_ids) // layout.context_parallel, rank) for row in rows]


class PositionsOfTheShard(ReferenceAdapter):
    def shard_rows(self, batch: CollatedBatch, layout: Layout, rank: int) -> list[RowShard]:
        shards = super().shard_rows(batch, layout, rank)
        return [replace(shard, position_ids=torch.arange(len(shard.input_ids))) for shard in shards]


class LabelsWithinTheShard(ReferenceAdapter):
    """The next token is taken from the shard, also at its end."""

    def shard_rows(self, batch: CollatedBatch, layout: Layout, rank: int) -> list[RowShard]:
        shards = super().shard_rows(batch, layout, rank)
        return [replace(shard, labels=shard.input_ids.roll(-1)) for shard in shards]


class MaskOfTheTokenItself(ReferenceAdapter):
    """The mask marks trained tokens, the labels are the next ones."""

    def shard_rows(self, batch: CollatedBatch, layout: Layout, rank: int) -> list[RowShard]:
        late = replace(batch, completion_mask=batch.completion_mask.roll(1, dims=1))
        masks = [shard.loss_mask for shard in super().shard_rows(late, layout, rank)]
        shards = super().shard_rows(batch, layout, rank)
        return [replace(shard, loss_mask=mask) for shard, mask in zip(shards, masks, strict=True)]


class ScoresOfTheTokenItself(ReferenceAdapter):
    """Labels are shifted by one, the sampler's logprobs are not."""

    def shard_rows(self, batch: CollatedBatch, layout: Layout, rank: int) -> list[RowShard]:
        assert batch.old_logprobs is not None
        return super().shard_rows(replace(batch, old_logprobs=batch.old_logprobs.roll(1, dims=1)), layout, rank)


class RanksOneBehindTheOther(ReferenceAdapter):
    """A zigzag is put together as if it were contiguous."""

    def gathered_logprobs(self, shards: list[list[Tensor]], batch: CollatedBatch, layout: Layout) -> Tensor:
        rows = []
        for row, of_ranks in enumerate(zip(*shards, strict=True)):
            start = int(batch.attention_mask[row, : int(batch.completion_starts[row])].sum()) - 1
            values = torch.cat(of_ranks)[start : start + batch.completion_ids.shape[1]]
            rows.append(torch.nn.functional.pad(values, (0, batch.completion_ids.shape[1] - len(values))))
        return torch.stack(rows)


class GatherAddsUpInBackward(ReferenceAdapter):
    def gathered_logprobs(self, shards: list[list[Tensor]], batch: CollatedBatch, layout: Layout) -> Tensor:
        once = super().gathered_logprobs(shards, batch, layout)
        return once.detach() + layout.context_parallel * (once - once.detach())


class ScheduleCountsPieces(ReferenceAdapter):
    def sharded_update(self, state: Any, batch: CollatedBatch, layout: Layout) -> dict[str, float]:
        metrics = super().sharded_update(state, batch, layout)
        for _ in range(layout.micro_batches - 1):
            state.scheduler.step()
        return metrics


class GradientsStay(ReferenceAdapter):
    """`zero_grad` is called for each micro-batch but the first."""

    def sharded_update(self, state: Any, batch: CollatedBatch, layout: Layout) -> dict[str, float]:
        kept = [copy.deepcopy(parameter.grad) for parameter in state.model.parameters()]
        hooks = [
            parameter.register_hook(lambda gradient, old=old: gradient + old)
            for parameter, old in zip(state.model.parameters(), kept, strict=True)
            if old is not None and parameter.requires_grad
        ]
        metrics = super().sharded_update(state, batch, layout)
        for hook in hooks:
            hook.remove()
        return metrics


class RowsOfOneRank(ReferenceAdapter):
    """Reward and tokens are logged by the first data-parallel rank alone."""

    def sharded_update(self, state: Any, batch: CollatedBatch, layout: Layout) -> dict[str, float]:
        first = batch.rows(torch.arange(len(batch.rewards) // layout.data_parallel))
        own = {"reward": float(first.rewards.mean()), "tokens": float(first.attention_mask.sum())}
        return super().sharded_update(state, batch, layout) | own


class MaximumOfTheFirstRank(ReferenceAdapter):
    """Exponentials are taken without the largest logit of the other ranks."""

    def vocab_parallel_logprobs(self, shards: VocabShards, token_ids: Tensor, temperature: float) -> Tensor:
        logits = torch.cat(shards.logits, dim=-1)[..., : shards.vocab_size] / temperature
        largest = (shards.logits[0] / temperature).amax(dim=-1, keepdim=True).detach()
        chosen = logits.gather(-1, token_ids.unsqueeze(-1)) - largest
        return (chosen - (logits - largest).exp().sum(dim=-1, keepdim=True).log()).squeeze(-1)


class PaddingInTheVocabulary(ReferenceAdapter):
    def vocab_parallel_logprobs(self, shards: VocabShards, token_ids: Tensor, temperature: float) -> Tensor:
        padded = replace(shards, vocab_size=sum(each.shape[-1] for each in shards.logits))
        return super().vocab_parallel_logprobs(padded, token_ids, temperature)


class LastIdOfARankIsNobodys(ReferenceAdapter):
    """Each rank's range of ids ends one too early."""

    def vocab_parallel_logprobs(self, shards: VocabShards, token_ids: Tensor, temperature: float) -> Tensor:
        width = shards.logits[0].shape[-1]
        logprobs = super().vocab_parallel_logprobs(shards, token_ids, temperature)
        logits = torch.cat(shards.logits, dim=-1).gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
        return torch.where(token_ids % width == width - 1, logprobs - logits / temperature, logprobs)


class ExpertsAveragedOverAllRanks(ReferenceAdapter):
    def sharded_update(self, state: Any, batch: CollatedBatch, layout: Layout) -> dict[str, float]:
        with larger_gradients(state.model, "experts", 1 / layout.expert_parallel):
            return super().sharded_update(state, batch, layout)


class EmbeddingOfEachStage(ReferenceAdapter):
    def sharded_update(self, state: Any, batch: CollatedBatch, layout: Layout) -> dict[str, float]:
        with larger_gradients(state.model, "embed_tokens", layout.pipeline_parallel):
            return super().sharded_update(state, batch, layout)


class RoutesNumberedAnew(ReferenceAdapter):
    def replayed_routes(self, rows: list[RoutedRow], layout: ReplayLayout) -> Tensor:
        laid = super().replayed_routes(rows, layout)
        for row in rows:
            row.routes.add_(1)
        return laid


LAYOUTS_MUTANTS = [
    ExpertsAveragedOverAllRanks,
    EmbeddingOfEachStage,
    RoutesNumberedAnew,
    RestOfTheRowDropped,
    PositionsOfTheShard,
    LabelsWithinTheShard,
    MaskOfTheTokenItself,
    ScoresOfTheTokenItself,
    RanksOneBehindTheOther,
    GatherAddsUpInBackward,
    ScheduleCountsPieces,
    GradientsStay,
    RowsOfOneRank,
    MaximumOfTheFirstRank,
    PaddingInTheVocabulary,
    LastIdOfARankIsNobodys,
]
