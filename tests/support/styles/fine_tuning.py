"""A fine-tuning trainer: labels of -100, one forward pass over chosen and rejected rows, torch's own loss functions.

It can be set to every convention of these losses, but its teacher is a model, which scores whole rows.
Shapes: B rows, S positions, T completion positions, V vocabulary.
"""

import math
from dataclasses import replace

import torch
from torch.nn import functional

from rlcanary.contract.adapter import Adapter, NotProvided
from rlcanary.contract.batch import LossOutput
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.records.other_losses import DistillationBatch, PreferenceBatch, SupervisedBatch

IGNORED = -100


def reduced(values, keep, how, tokens=None, rows=None):
    """A mean over tokens or rows, or the sum; `tokens` and `rows` are those of the update."""
    values = values * keep
    if how == "token_sum":
        return values.sum()
    if how == "token_mean":
        return values.sum() / (keep.sum().clamp(min=1) if tokens is None else tokens)
    lengths = keep.sum(-1)
    if rows is None:
        rows = (lengths > 0).sum() if how.endswith("nonempty") else len(lengths)
    means = [row.sum() / max(int(length), 1) for row, length in zip(values, lengths, strict=True)]
    return torch.stack(means).sum() / rows


class FineTuning(Adapter):
    name = "fine-tuning-by-hand"

    def __init__(self, conventions=None):
        self.conventions = conventions or Conventions(
            supervised_label_smoothing=0.05, distillation_divergence="jsd", preference_supervised_coef=0.2
        )

    def configured(self, **changes):
        if not changes.get("distillation_whole_rows", True):
            raise NotProvided("the teacher is a model, which scores whole rows")
        return type(self)(self.conventions.replace(**changes))

    def supervised_loss(self, batch):
        labels = functional.pad(batch.labels, (0, 1), value=IGNORED)[:, 1:]
        flat = {"reduction": "none", "ignore_index": IGNORED}
        logits = batch.logits.flatten(0, 1)
        smoothed = self.conventions.supervised_label_smoothing
        losses = functional.cross_entropy(logits, labels.flatten(), label_smoothing=smoothed, **flat).view(labels.shape)
        keep = labels != IGNORED
        how = self.conventions.supervised_aggregation
        loss = reduced(losses, keep, how, batch.global_tokens, batch.global_sequences)
        logged = {"loss": loss.item(), "tokens": keep.sum().item()}
        if keep.any():
            nll = functional.cross_entropy(logits.detach(), labels.flatten(), ignore_index=IGNORED).item()
            hits = batch.logits.argmax(-1) == labels
            logged |= {"nll": nll, "perplexity": math.exp(nll), "accuracy": hits[keep].float().mean().item()}
        return LossOutput(loss, logged)

    def distillation_loss(self, batch):
        chosen, beta = self.conventions.distillation_divergence, self.conventions.distillation_beta
        student = functional.log_softmax(batch.logits / batch.temperature, -1)
        teacher = functional.log_softmax(batch.teacher_logits / batch.temperature, -1)

        def kl(p, q):
            return functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)

        if chosen == "jsd":
            m = (beta * teacher.exp() + (1 - beta) * student.exp()).log()
            each = beta * kl(teacher, m) + (1 - beta) * kl(student, m)
        else:
            weight = {"forward_kl": 1.0, "reverse_kl": 0.0, "mixed_kl": beta}[chosen]
            each = weight * kl(teacher, student) + (1 - weight) * kl(student, teacher)
        losses = each * batch.temperature**2 if self.conventions.distillation_temperature_squared else each
        hard = self.conventions.distillation_label_weight
        if hard > 0:
            wrong = functional.cross_entropy(batch.logits.transpose(1, 2), batch.token_ids, reduction="none")
            losses = torch.lerp(losses, wrong, hard)
        how = self.conventions.distillation_aggregation
        loss = reduced(losses, batch.mask, how, batch.global_tokens, batch.global_sequences)
        return LossOutput(loss, {"loss": loss.item(), "divergence": each[batch.mask].mean().item()})

    def distillation_advantages(self, student_logprobs, teacher_logprobs, mask):
        with torch.no_grad():
            return torch.where(mask, teacher_logprobs - student_logprobs, 0.0)

    def preference_loss(self, batch):
        c = self.conventions
        width = max(batch.chosen_mask.shape[1], batch.rejected_mask.shape[1])

        def stacked(*sides):
            return torch.cat([functional.pad(side, (0, width - side.shape[1])) for side in sides])

        keep = stacked(batch.chosen_mask, batch.rejected_mask)
        policy = stacked(batch.chosen_logprobs, batch.rejected_logprobs).masked_fill(~keep, 0)
        scores = policy.sum(-1)
        if c.preference_reference:
            ref = stacked(batch.ref_chosen_logprobs, batch.ref_rejected_logprobs)
            scores = scores - ref.masked_fill(~keep, 0).sum(-1)
        if c.preference_length_normalised:
            scores = scores / keep.sum(-1).clamp(min=1)
        won, lost = scores.chunk(2)
        ahead = won - lost
        logits = c.preference_beta * ahead - c.preference_margin
        if c.preference_kind == "sigmoid":
            swapped = c.preference_label_smoothing
            losses = -(1 - swapped) * functional.logsigmoid(logits) - swapped * functional.logsigmoid(-logits)
        elif c.preference_kind == "hinge":
            losses = functional.relu(1 - logits)
        else:
            losses = (ahead - 0.5 / c.preference_beta) ** 2
        pairs = len(losses) if batch.global_pairs is None else batch.global_pairs
        loss = losses.sum() / pairs
        if c.preference_supervised_coef:
            nll, kept = -policy.chunk(2)[0], keep.chunk(2)[0]
            counts = batch.global_tokens, batch.global_pairs
            loss = loss + c.preference_supervised_coef * reduced(nll, kept, c.supervised_aggregation, *counts)
        rewards = {"chosen_reward": won, "rejected_reward": lost, "reward_margin": ahead}
        logged = {name: c.preference_beta * value.mean().item() for name, value in rewards.items()}
        return LossOutput(loss, {**logged, "reward_accuracy": (ahead > 0).float().mean().item(), "loss": loss.item()})

    def accumulated_other_loss(self, batch, n_micro):
        return self._in_turn(batch, n_micro, 1)

    def sharded_other_loss(self, batch, n_ranks):
        """Each rank's loss counts as many times as there are ranks, whose gradients are then averaged."""
        return self._in_turn(batch, n_ranks, n_ranks)

    def _in_turn(self, batch, n_pieces, factor):
        if isinstance(batch, SupervisedBatch):
            function, keep, how = self.supervised_loss, batch.mask[:, 1:], self.conventions.supervised_aggregation
        elif isinstance(batch, DistillationBatch):
            function, keep, how = self.distillation_loss, batch.mask, self.conventions.distillation_aggregation
        elif isinstance(batch, PreferenceBatch):
            function, keep, how = self.preference_loss, batch.chosen_mask, "sequence_mean"
        else:
            raise NotProvided("there is no critic")
        rows = keep.any(-1).sum().item() if how.endswith("nonempty") else len(keep)
        counts = {"global_tokens": keep.sum().item()}
        counts["global_pairs" if isinstance(batch, PreferenceBatch) else "global_sequences"] = rows
        places = torch.arange(len(keep)).tensor_split(n_pieces)
        outputs = [function(replace(batch, **counts).rows(place)) for place in places]
        loss = sum(factor * output.loss for output in outputs) / factor
        weights = [len(place) if isinstance(batch, PreferenceBatch) else keep[place].sum().item() for place in places]
        logged = {"loss": loss.item()}
        for name in (
            "nll",
            "accuracy",
            "divergence",
            "chosen_reward",
            "rejected_reward",
            "reward_margin",
            "reward_accuracy",
        ):
            found = [
                (weight, output.metrics[name])
                for weight, output in zip(weights, outputs, strict=True)
                if weight and name in output.metrics
            ]
            if found:
                logged[name] = sum(weight * value for weight, value in found) / sum(weight for weight, _ in found)
        if isinstance(batch, SupervisedBatch):
            logged |= {"perplexity": math.exp(logged["nll"]), "tokens": sum(weights)}
        return LossOutput(loss, logged)
