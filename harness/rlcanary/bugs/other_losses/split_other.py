"""Bugs in the loop around a loss beside the policy's, in micro-batches or over ranks."""

from dataclasses import replace

import torch

from rlcanary import reference
from rlcanary.bugs.museum import Bug
from rlcanary.contract.batch import LossOutput
from rlcanary.contract.records.other_losses import OtherBatch, SupervisedBatch


class MeanOfMicroBatchMeans(Bug):
    id = "torchtune.mean-of-micro-batch-means"
    source = "torchtune, #1875"
    effect = "each micro-batch's mean over its labels counts the same, however few they are"

    def accumulated_other_loss(self, batch: OtherBatch, n_micro: int) -> LossOutput:
        output = super().accumulated_other_loss(batch, n_micro)
        if not isinstance(batch, SupervisedBatch):
            return output
        pieces = reference.other_pieces(batch, n_micro, self.conventions)
        alone = [replace(piece, global_tokens=None, global_sequences=None) for piece in pieces]
        losses = [reference.supervised_loss(piece, self.conventions).loss for piece in alone]
        return LossOutput(torch.stack(losses).mean(), output.metrics)


class DividedByAllDevicesTwice(Bug):
    id = "transformers.divided-by-all-devices-twice"
    source = "transformers, issue #37474"
    effect = "each device divides by the labels of all of them, and the mean over devices divides once more"

    def sharded_other_loss(self, batch: OtherBatch, n_ranks: int) -> LossOutput:
        output = super().sharded_other_loss(batch, n_ranks)
        return LossOutput(output.loss / n_ranks, output.metrics)
