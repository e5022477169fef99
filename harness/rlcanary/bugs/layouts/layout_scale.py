"""Bugs in updates whose factors, statistics and metrics depend on the layout of ranks."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from rlcanary import reference
from rlcanary.bugs.museum import Bug
from rlcanary.contract.batch import CollatedBatch
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.records.layouts import Layout
from rlcanary.reference.layouts import context_ranks


def scaled_update(state: Any, batch: CollatedBatch, conventions: Conventions, factor: float) -> dict[str, float]:
    """Update on the whole batch with a gradient that is larger by this factor, and log the right loss."""
    output = reference.policy_loss(
        reference.policy_batch(state.model, state.ref_model, batch, conventions), conventions
    )
    metrics = reference.descend(state, output.loss * factor, conventions)
    return {**output.metrics, **metrics, "loss": float(output.loss.detach())}


@contextmanager
def larger_gradients(model: Any, part: str, factor: float) -> Iterator[None]:
    """Multiply the gradients of the parameters whose names contain this part."""
    hooks = [
        parameter.register_hook(lambda gradient: gradient * factor)
        for name, parameter in model.named_parameters()
        if part in name and parameter.requires_grad
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class GradientOverContextRanks(Bug):
    id = "skyrl.gradient-over-context-ranks"
    source = "SkyRL 8376455c8, #1420"
    effect = "the gradient is divided by the context ranks, and the loss that all of them have is logged as their sum"

    def sharded_update(self, state: Any, batch: CollatedBatch, layout: Layout) -> dict[str, float]:
        metrics = scaled_update(state, batch, self.conventions, 1 / layout.context_parallel)
        return {**metrics, "loss": metrics["loss"] * layout.context_parallel}


class LossTimesContextRanks(Bug):
    id = "skyrl.loss-times-context-ranks"
    source = "SkyRL 861e005b4, #1751"
    effect = "the loss is multiplied by the context ranks although the schedule does so already"

    def sharded_update(self, state: Any, batch: CollatedBatch, layout: Layout) -> dict[str, float]:
        return scaled_update(state, batch, self.conventions, layout.context_parallel)


class LossOverContextRanks(Bug):
    id = "veomni.loss-over-sequence-ranks"
    source = "VeOmni #338"
    effect = "the average over all ranks is undone for the data-parallel ones only: gradient and loss are too small"

    def sharded_update(self, state: Any, batch: CollatedBatch, layout: Layout) -> dict[str, float]:
        metrics = scaled_update(state, batch, self.conventions, 1 / layout.context_parallel)
        return {**metrics, "loss": metrics["loss"] / layout.context_parallel}


class WeightOfTheWorld(Bug):
    id = "areal.loss-weight-of-the-world"
    source = "AReaL 6b78aad27, #335"
    effect = "the loss is divided by a weight that is summed over ranks which share rows"

    def sharded_update(self, state: Any, batch: CollatedBatch, layout: Layout) -> dict[str, float]:
        return scaled_update(state, batch, self.conventions, 1 / (layout.context_parallel * layout.tensor_parallel))


class GatherAddsUpInBackward(Bug):
    id = "slime.gather-adds-up-in-backward"
    source = "slime 478b80709, #1748"
    effect = (
        "behind a gather all ranks compute alike, and its backward pass adds them up: attention has a larger gradient"
    )

    def sharded_update(self, state: Any, batch: CollatedBatch, layout: Layout) -> dict[str, float]:
        ranks = layout.tensor_parallel * layout.context_parallel
        with larger_gradients(state.model, "self_attn", ranks):
            return super().sharded_update(state, batch, layout)


class NormCountsTensorRanks(Bug):
    id = "areal.norm-counts-tensor-ranks"
    source = "AReaL 9727753d1, #320"
    effect = "squares of tensor-parallel ranks are counted once for each: the norm is too large and clips too much"

    def sharded_update(self, state: Any, batch: CollatedBatch, layout: Layout) -> dict[str, float]:
        limit, factor = self.conventions.max_grad_norm or math.inf, math.sqrt(layout.tensor_parallel)
        metrics = scaled_update(state, batch, self.conventions.replace(max_grad_norm=limit / factor), 1.0)
        return {**metrics, "grad_norm": metrics["grad_norm"] * factor}


class TokensOfOneContextRank(Bug):
    id = "areal.tokens-of-one-context-rank"
    source = "AReaL 412d22411, #990; 95e2379d0, #1249"
    effect = "tokens are counted on one context rank's part of the mask"

    def sharded_update(self, state: Any, batch: CollatedBatch, layout: Layout) -> dict[str, float]:
        metrics = super().sharded_update(state, batch, layout)
        return {**metrics, "tokens": metrics["tokens"] / layout.context_parallel}


class WhitenedByContextRank(Bug):
    id = "slime.whitened-by-context-rank"
    source = "slime dd7f0379c, #2235"
    effect = "each context rank scales the advantages by the statistics of its own tokens: two halves of a row differ"

    def sharded_update(self, state: Any, batch: CollatedBatch, layout: Layout) -> dict[str, float]:
        policy = reference.policy_batch(state.model, state.ref_model, batch, self.conventions)
        whole_BT = policy.advantages.unsqueeze(1).expand(batch.completion_mask.shape)
        if self.conventions.advantage_scale == "batch":
            owners_BT, local_BT = context_ranks(batch, layout.context_parallel), whole_BT.clone()
            for rank in range(layout.context_parallel):
                own_BT = (owners_BT == rank) & batch.completion_mask
                local_BT[own_BT] /= whole_BT[own_BT].std() / whole_BT[batch.completion_mask].std() + 1e-6
            whole_BT = local_BT
        output = reference.policy_loss(replace(policy, advantages=whole_BT), self.conventions)
        return {**output.metrics, **reference.descend(state, output.loss, self.conventions)}


class TokenMeanOfEachPiece(Bug):
    id = "skyrl.token-mean-of-each-piece"
    source = "SkyRL bf243b8d6, #1296"
    effect = "token means of micro-batches and ranks are averaged: tokens of short pieces weigh more"

    def sharded_update(self, state: Any, batch: CollatedBatch, layout: Layout) -> dict[str, float]:
        policy = reference.policy_batch(state.model, state.ref_model, batch, self.conventions)
        by_tokens = self.conventions.replace(aggregation="token_mean")
        rows = torch.arange(len(policy.mask)).chunk(layout.data_parallel * layout.micro_batches)
        losses = [reference.policy_loss(policy.rows(each), by_tokens).loss for each in rows]
        return reference.descend(state, torch.stack(losses).mean(), self.conventions)
