"""Bugs in updates that are split over micro-batches or ranks."""

from dataclasses import replace

import torch

from rlcanary import reference
from rlcanary.bugs.museum import Bug
from rlcanary.contract.batch import LossOutput, PolicyBatch
from rlcanary.contract.conventions import Conventions


def local_pieces(batch: PolicyBatch, n_pieces: int, conventions: Conventions) -> list[PolicyBatch]:
    """Split the batch into pieces without the global counts, as if each were the whole."""
    pieces = reference.split(batch, n_pieces, conventions)
    return [replace(piece, global_tokens=None, global_sequences=None) for piece in pieces]


class SumOverMicroBatches(Bug):
    id = "nemo-rl.sum-over-micro-batches"
    source = "NeMo RL d1f0609a2, #86, survey N01"
    effect = "the gradient is too large by the number of micro-batches"

    def accumulated_loss(self, batch: PolicyBatch, n_micro: int) -> LossOutput:
        output = reference.accumulated_loss(batch, n_micro, self.conventions)
        return LossOutput(output.loss * n_micro, output.metrics)


class DividedAfterBackward(Bug):
    id = "verl.divided-after-backward"
    source = "verl e160d3b2e, #3332, survey V37"
    effect = "the logged loss is right, the gradient too large by the number of micro-batches"

    def accumulated_loss(self, batch: PolicyBatch, n_micro: int) -> LossOutput:
        output = reference.accumulated_loss(batch, n_micro, self.conventions)
        undivided = output.loss * n_micro
        return LossOutput(undivided - (undivided - output.loss).detach(), output.metrics)


class MeanOfMeans(Bug):
    id = "nemo-rl.mean-of-means"
    source = "NeMo RL af9f6e861, #266, survey N03"
    effect = "tokens in short micro-batches count more"

    def accumulated_loss(self, batch: PolicyBatch, n_micro: int) -> LossOutput:
        by_tokens = self.conventions.replace(aggregation="token_mean")
        pieces = local_pieces(batch, n_micro, self.conventions)
        return LossOutput(torch.stack([reference.policy_loss(piece, by_tokens).loss for piece in pieces]).mean())


class TokenMeanPerMicroBatch(Bug):
    id = "openrlhf.token-mean-per-micro-batch"
    source = "OpenRLHF c5bebd14, #1249, survey O03"
    effect = "the token mean of each micro-batch is averaged: 3.0 where the mean is 1.8"

    def accumulated_loss(self, batch: PolicyBatch, n_micro: int) -> LossOutput:
        tokens = float(batch.mask.sum())
        losses = [
            reference.policy_loss(piece, self.conventions).loss * tokens / (n_micro * float(piece.mask.sum()))
            for piece in reference.split(batch, n_micro, self.conventions)
        ]
        return LossOutput(torch.stack(losses).sum())


class NormalisedByRank(Bug):
    id = "prime-rl.normalised-by-rank"
    source = "prime-rl 1d9ca9255, #2562, survey P07"
    effect = "ranks with few tokens are over-weighted: 3.0 instead of 1.4"

    def sharded_loss(self, batch: PolicyBatch, n_ranks: int) -> LossOutput:
        by_tokens = self.conventions.replace(aggregation="token_mean")
        pieces = local_pieces(batch, n_ranks, self.conventions)
        return LossOutput(torch.stack([reference.policy_loss(piece, by_tokens).loss for piece in pieces]).mean())


class MetricMeanOfMeans(Bug):
    id = "trl.metric-mean-of-means"
    source = "TRL c1f6f24e1, #6380, survey T32"
    effect = "KL, entropy and clip fraction are biased towards ranks with short completions"

    def sharded_loss(self, batch: PolicyBatch, n_ranks: int) -> LossOutput:
        output = super().sharded_loss(batch, n_ranks)
        logged = [
            reference.policy_loss(piece, self.conventions).metrics
            for piece in local_pieces(batch, n_ranks, self.conventions)
        ]
        return LossOutput(output.loss, {name: sum(each[name] for each in logged) / n_ranks for name in logged[0]})


class LocalDenominator(Bug):
    id = "trl.local-denominator"
    source = "TRL c13de6f9c, #3506, survey T10"
    effect = "a sum over all ranks is divided by the count of one: a fraction exceeds 1"

    def sharded_loss(self, batch: PolicyBatch, n_ranks: int) -> LossOutput:
        output = super().sharded_loss(batch, n_ranks)
        return LossOutput(output.loss, {**output.metrics, "clip_fraction": output.metrics["clip_fraction"] * n_ranks})


class ExtremesAveraged(Bug):
    id = "nemo-rl.extremes-averaged"
    source = "NeMo RL 0eb5fffec, #1818, survey N26"
    effect = "the largest ratio is divided by the number of batches and falls below the mean"

    def sharded_loss(self, batch: PolicyBatch, n_ranks: int) -> LossOutput:
        output = super().sharded_loss(batch, n_ranks)
        divided = {name: output.metrics[name] / n_ranks for name in ("ratio_min", "ratio_max")}
        return LossOutput(output.loss, {**output.metrics, **divided})


class MetricsOfRankZero(Bug):
    id = "verl.metrics-of-rank-zero"
    source = "verl eb06fda2a, #3699, survey V39"
    effect = "the metrics of all ranks but the first are dropped"

    def sharded_loss(self, batch: PolicyBatch, n_ranks: int) -> LossOutput:
        output = super().sharded_loss(batch, n_ranks)
        first = local_pieces(batch, n_ranks, self.conventions)[0]
        return LossOutput(output.loss, reference.policy_loss(first, self.conventions).metrics)


class SampleFactorOnTokenMean(Bug):
    id = "slime.sample-factor-on-token-mean"
    source = "slime 763f18d5b, #987"
    effect = "the factor of the sample mean stands on top of the token mean: micro-batches by rows"

    def accumulated_loss(self, batch: PolicyBatch, n_micro: int) -> LossOutput:
        output = super().accumulated_loss(batch, n_micro)
        return LossOutput(output.loss * n_micro / len(batch.mask), output.metrics)


class EmptyMicroBatchesNotCounted(Bug):
    id = "skyrl.empty-micro-batches-not-counted"
    source = "SkyRL dca8f8f50, #1856"
    effect = "a micro-batch that the overlong filter empties is taken for padding: the other terms grow"

    def accumulated_loss(self, batch: PolicyBatch, n_micro: int) -> LossOutput:
        output = super().accumulated_loss(batch, n_micro)
        pieces = reference.split(batch, n_micro, self.conventions)
        real = sum(bool(piece.mask.any()) for piece in pieces)
        return LossOutput(output.loss * len(pieces) / max(real, 1), output.metrics)


class GradientsNeverReduced(Bug):
    id = "skyrl.gradients-never-reduced"
    source = "SkyRL 0dbea9976, #245"
    effect = "the gradients of the ranks are not added up: each rank trains on its own rows"

    def sharded_loss(self, batch: PolicyBatch, n_ranks: int) -> LossOutput:
        output = super().sharded_loss(batch, n_ranks)
        own = reference.policy_loss(local_pieces(batch, n_ranks, self.conventions)[0], self.conventions).loss
        return LossOutput(own + (output.loss - own).detach(), output.metrics)


class EntropyQuantileOfEachRank(Bug):
    id = "trl.entropy-quantile-per-rank"
    source = "TRL 5d914a412, #3833, survey T15"
    effect = (
        "each rank takes the tokens of the highest entropy among its own: which tokens are trained depends on the ranks"
    )

    def sharded_loss(self, batch: PolicyBatch, n_ranks: int) -> LossOutput:
        output = super().sharded_loss(batch, n_ranks)
        if self.conventions.top_entropy is None:
            return output
        pieces, alone = (cut(batch, n_ranks, self.conventions) for cut in (reference.split, local_pieces))
        losses = [
            reference.policy_loss(piece, self.conventions, own).loss for piece, own in zip(pieces, alone, strict=True)
        ]
        return LossOutput(torch.stack(losses).sum(), output.metrics)
