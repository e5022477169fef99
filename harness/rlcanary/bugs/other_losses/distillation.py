"""Bugs in distillation."""

import math
from dataclasses import replace

import torch

from rlcanary import reference
from rlcanary.bugs.museum import Bug
from rlcanary.contract.batch import LossOutput
from rlcanary.contract.records.other_losses import DistillationBatch
from rlcanary.reference.objective.aggregation import aggregate_tokens
from rlcanary.reference.objective.distillation import divergence, kl_between
from rlcanary.reference.objective.supervised import log_softmax, spread


class MixtureSwapped(Bug):
    id = "trl.distillation-mixture"
    source = "TRL b55d9f041, #3043, survey T37"
    effect = "beta weighs the wrong distribution of the mixture, which shows unless it is 0.5"

    def distillation_loss(self, batch: DistillationBatch) -> LossOutput:
        output, beta = super().distillation_loss(batch), self.conventions.distillation_beta
        if self.conventions.distillation_divergence != "jsd":
            return output
        mask_BT = batch.mask
        student_NV, teacher_NV = (
            log_softmax(each[mask_BT] / batch.temperature) for each in (batch.logits, batch.teacher_logits)
        )
        swapped_NV = torch.logaddexp(student_NV + math.log(beta), teacher_NV + math.log1p(-beta))
        loss_N = beta * kl_between(teacher_NV, swapped_NV) + (1 - beta) * kl_between(student_NV, swapped_NV)
        aggregation = self.conventions.distillation_aggregation
        counts = batch.global_tokens, batch.global_sequences
        return LossOutput(aggregate_tokens(spread(loss_N, mask_BT), mask_BT, aggregation, *counts))


class LimitsSwapped(Bug):
    id = "trl.distillation-limits"
    source = "TRL b55d9f041, #3043, survey T37"
    effect = "the limits of beta give each other's direction: forward KL runs where reverse KL is set"

    def distillation_loss(self, batch: DistillationBatch) -> LossOutput:
        limits = {"forward_kl": "reverse_kl", "reverse_kl": "forward_kl"}
        name = self.conventions.distillation_divergence
        swapped = self.conventions.replace(distillation_divergence=limits.get(name, name))
        return reference.distillation_loss(batch, swapped)


class OnePositionLate(Bug):
    id = "trl.distilled-one-position-late"
    source = "TRL a5b98fcf9, #2058, survey T38"
    effect = "the logits of the next position stand beside each token, and padding is distilled too"

    def distillation_loss(self, batch: DistillationBatch) -> LossOutput:
        late = {name: getattr(batch, name).roll(-1, 1) for name in ("logits", "teacher_logits")}
        return super().distillation_loss(replace(batch, **late, mask=torch.ones_like(batch.mask)))


class HardLabelsInTheFusedLoss(Bug):
    id = "trl.hard-labels-in-the-fused-loss"
    source = "TRL 63a78d9e5, #5731, survey T47"
    effect = "the fused loss is half a cross entropy by default, which the plain one does not have"

    def distillation_loss(self, batch: DistillationBatch) -> LossOutput:
        return reference.distillation_loss(batch, self.conventions.replace(distillation_label_weight=0.5))


class EmptyRowsCounted(Bug):
    id = "torchrl.empty-rows-counted"
    source = "torchrl 665e2773c, #4082, survey R04"
    effect = "rows without a trained token pass the guard and count as a loss of 0"

    def distillation_loss(self, batch: DistillationBatch) -> LossOutput:
        conventions = self.conventions
        if conventions.distillation_aggregation == "sequence_mean_nonempty":
            conventions = conventions.replace(distillation_aggregation="sequence_mean")
        return reference.distillation_loss(batch, conventions)


class MaskBehindTheDivergence(Bug):
    id = "trl.mask-behind-the-divergence"
    source = "TRL 43e09b8fb, #5594"
    effect = "where rows end early the teacher's server scored nothing: the gradient is NaN, the loss is right"

    def distillation_loss(self, batch: DistillationBatch) -> LossOutput:
        if self.conventions.distillation_whole_rows:
            return super().distillation_loss(batch)
        student_NV, teacher_NV = (
            log_softmax(each.flatten(0, 1) / batch.temperature) for each in (batch.logits, batch.teacher_logits)
        )
        everywhere_BT = divergence(student_NV, teacher_NV, self.conventions).view(batch.mask.shape)
        counts = batch.global_tokens, batch.global_sequences
        loss_BT, aggregation = everywhere_BT.masked_fill(~batch.mask, 0), self.conventions.distillation_aggregation
        return LossOutput(aggregate_tokens(loss_BT, batch.mask, aggregation, *counts))


class TeacherAtAnotherTemperature(Bug):
    id = "slime.teacher-at-another-temperature"
    source = "slime 1da1bb19e, #2085, survey L45"
    effect = "the teacher is asked without the student's temperature: its distribution is another one"

    def distillation_loss(self, batch: DistillationBatch) -> LossOutput:
        return super().distillation_loss(replace(batch, teacher_logits=batch.teacher_logits * batch.temperature))
