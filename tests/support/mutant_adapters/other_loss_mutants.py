"""Mistakes in supervised, distillation and preference losses that no shipped bug in the museum makes."""

from dataclasses import replace

import torch
from torch import Tensor

from rlcanary import reference
from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.contract.batch import LossOutput
from rlcanary.contract.records.credit import ValueBatch
from rlcanary.contract.records.other_losses import DistillationBatch, OtherBatch, PreferenceBatch, SupervisedBatch


class LabelsNotShifted(ReferenceAdapter):
    def supervised_loss(self, batch: SupervisedBatch) -> LossOutput:
        return super().supervised_loss(replace(batch, logits=batch.logits.roll(1, 1)))


class LabelsShiftedTwice(ReferenceAdapter):
    """The collator shifts the labels, then the model does."""

    def supervised_loss(self, batch: SupervisedBatch) -> LossOutput:
        mask_BS = batch.mask.roll(-1, 1)
        mask_BS[:, -1] = False
        return super().supervised_loss(replace(batch, token_ids=batch.token_ids.roll(-1, 1), mask=mask_BS))


class RowsJoinedBeforeTheShift(ReferenceAdapter):
    """The last logits of a row predict the first token of the next one."""

    def supervised_loss(self, batch: SupervisedBatch) -> LossOutput:
        joined = {name: getattr(batch, name).flatten(0, 1).unsqueeze(0) for name in ("logits", "token_ids", "mask")}
        return super().supervised_loss(replace(batch, **joined))


class UntrainedTokensInTheDivisor(ReferenceAdapter):
    def supervised_loss(self, batch: SupervisedBatch) -> LossOutput:
        output = super().supervised_loss(batch)
        if self.conventions.supervised_aggregation != "token_mean" or batch.global_tokens is not None:
            return output
        return LossOutput(output.loss * float(batch.mask[:, 1:].float().mean()), output.metrics)


class FirstTokenInTheDivisor(ReferenceAdapter):
    def supervised_loss(self, batch: SupervisedBatch) -> LossOutput:
        return super().supervised_loss(replace(batch, global_tokens=batch.global_tokens or float(batch.mask.sum())))


class MeanOfEachMicroBatch(ReferenceAdapter):
    def supervised_loss(self, batch: SupervisedBatch) -> LossOutput:
        return super().supervised_loss(replace(batch, global_tokens=None, global_sequences=None))


class PromptTrained(ReferenceAdapter):
    def supervised_loss(self, batch: SupervisedBatch) -> LossOutput:
        answers_end_BS = batch.mask.flip(1).cumsum(1).flip(1) > 0
        return super().supervised_loss(replace(batch, mask=answers_end_BS))


class MeanOverRows(ReferenceAdapter):
    """`batchmean` divides by the rows."""

    def distillation_loss(self, batch: DistillationBatch) -> LossOutput:
        if self.conventions.distillation_aggregation != "token_mean":
            return super().distillation_loss(batch)
        return super().distillation_loss(replace(batch, global_tokens=float(len(batch.mask))))


class CrossEntropyInPlaceOfTheDivergence(ReferenceAdapter):
    """The gradient is right; the loss is larger by the teacher's entropy."""

    def distillation_loss(self, batch: DistillationBatch) -> LossOutput:
        output = super().distillation_loss(batch)
        entropy_BT = reference.entropy(batch.teacher_logits / batch.temperature)
        return LossOutput(output.loss + entropy_BT[batch.mask].mean(), output.metrics)


class LogitsCompared(ReferenceAdapter):
    def distillation_loss(self, batch: DistillationBatch) -> LossOutput:
        return LossOutput((batch.logits - batch.teacher_logits)[batch.mask].square().mean())


class TeacherFlattered(ReferenceAdapter):
    """The student's logprob minus the teacher's: the student is rewarded for leaving."""

    def distillation_advantages(self, student_logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor) -> Tensor:
        return -super().distillation_advantages(student_logprobs, teacher_logprobs, mask)


class AdvantagesWithGradient(ReferenceAdapter):
    def distillation_advantages(self, student_logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor) -> Tensor:
        return (teacher_logprobs - student_logprobs).masked_fill(~mask, 0)


class ReferenceOfTheChosenForBoth(ReferenceAdapter):
    def preference_loss(self, batch: PreferenceBatch) -> LossOutput:
        width = batch.rejected_mask.shape[1]
        chosen_BT, wanted_BU = batch.ref_chosen_logprobs, batch.ref_rejected_logprobs
        ref_BU = torch.cat([chosen_BT, wanted_BU], dim=1)[:, :width] if chosen_BT is not None else None
        return super().preference_loss(replace(batch, ref_rejected_logprobs=ref_BU))


class MeansForSums(ReferenceAdapter):
    def preference_loss(self, batch: PreferenceBatch) -> LossOutput:
        return reference.preference_loss(batch, self.conventions.replace(preference_length_normalised=True))


class PromptCounted(ReferenceAdapter):
    def preference_loss(self, batch: PreferenceBatch) -> LossOutput:
        masks = {name: getattr(batch, name).flip(1).cumsum(1).flip(1) > 0 for name in ("chosen_mask", "rejected_mask")}
        return super().preference_loss(replace(batch, **masks))


class PaddingInTheMean(ReferenceAdapter):
    """Averages over the width of the longer completion of the pair."""

    def preference_loss(self, batch: PreferenceBatch) -> LossOutput:
        if not self.conventions.preference_length_normalised:
            return super().preference_loss(batch)
        width = max(batch.chosen_mask.shape[1], batch.rejected_mask.shape[1])
        scaled = {}
        for side in ("chosen", "rejected"):
            share_B1 = getattr(batch, f"{side}_mask").sum(dim=1, keepdim=True) / width
            for name in (f"{side}_logprobs", f"ref_{side}_logprobs"):
                scaled[name] = getattr(batch, name) * share_B1
        return super().preference_loss(replace(batch, **scaled))


class SmoothedTheWrongWay(ReferenceAdapter):
    def preference_loss(self, batch: PreferenceBatch) -> LossOutput:
        output, smoothing = super().preference_loss(batch), self.conventions.preference_label_smoothing
        if not smoothing:
            return output
        plain = reference.preference_loss(batch, self.conventions.replace(preference_label_smoothing=0.0)).loss
        return LossOutput(2 * plain - output.loss, output.metrics)


class Descending(ReferenceAdapter):
    """Chosen and rejected are exchanged, in the policy and in the reference."""

    def preference_loss(self, batch: PreferenceBatch) -> LossOutput:
        return super().preference_loss(
            PreferenceBatch(
                batch.rejected_logprobs,
                batch.chosen_logprobs,
                batch.rejected_mask,
                batch.chosen_mask,
                batch.ref_rejected_logprobs,
                batch.ref_chosen_logprobs,
                batch.global_pairs,
                batch.global_tokens,
            )
        )


class LogOfASigmoid(ReferenceAdapter):
    def preference_loss(self, batch: PreferenceBatch) -> LossOutput:
        output = super().preference_loss(batch)
        return LossOutput(-torch.log(torch.exp(-output.loss)), output.metrics)


class OtherMetricsOfTheLastMicroBatch(ReferenceAdapter):
    def accumulated_other_loss(self, batch: OtherBatch, n_micro: int) -> LossOutput:
        last = reference.other_pieces(batch, n_micro, self.conventions)[-1]
        output = super().accumulated_other_loss(batch, n_micro)
        return LossOutput(output.loss, reference.other_loss(last, self.conventions).metrics)


class OtherMetricsOfTheFirstRank(ReferenceAdapter):
    def sharded_other_loss(self, batch: OtherBatch, n_ranks: int) -> LossOutput:
        first = reference.other_pieces(batch, n_ranks, self.conventions)[0]
        output = super().sharded_other_loss(batch, n_ranks)
        return LossOutput(output.loss, reference.other_loss(first, self.conventions).metrics)


class SupervisedTermOfEachMicroBatch(ReferenceAdapter):
    """The pairs are counted over the whole update, the tokens of the supervised term in each micro-batch."""

    def accumulated_other_loss(self, batch: OtherBatch, n_micro: int) -> LossOutput:
        output = super().accumulated_other_loss(batch, n_micro)
        if not isinstance(batch, PreferenceBatch):
            return output
        pieces = reference.other_pieces(batch, n_micro, self.conventions)
        alone = [replace(piece, global_pairs=None, global_tokens=None) for piece in pieces]
        loss = torch.stack([reference.preference_loss(piece, self.conventions).loss for piece in alone]).mean()
        return LossOutput(loss, output.metrics)


class CriticAddsMeans(ReferenceAdapter):
    def accumulated_other_loss(self, batch: OtherBatch, n_micro: int) -> LossOutput:
        output = super().accumulated_other_loss(batch, n_micro)
        return LossOutput(output.loss * n_micro, output.metrics) if isinstance(batch, ValueBatch) else output


OTHER_LOSS_MUTANTS = [
    OtherMetricsOfTheLastMicroBatch,
    OtherMetricsOfTheFirstRank,
    SupervisedTermOfEachMicroBatch,
    CriticAddsMeans,
    LabelsNotShifted,
    LabelsShiftedTwice,
    RowsJoinedBeforeTheShift,
    UntrainedTokensInTheDivisor,
    FirstTokenInTheDivisor,
    MeanOfEachMicroBatch,
    PromptTrained,
    MeanOverRows,
    CrossEntropyInPlaceOfTheDivergence,
    LogitsCompared,
    TeacherFlattered,
    AdvantagesWithGradient,
    ReferenceOfTheChosenForBoth,
    MeansForSums,
    PromptCounted,
    PaddingInTheMean,
    SmoothedTheWrongWay,
    Descending,
    LogOfASigmoid,
]
