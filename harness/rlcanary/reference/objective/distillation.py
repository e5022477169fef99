"""Distillation: divergences between the distributions of a teacher and a student, and their estimate from samples.

Definitions: knowledge distillation (Hinton et al., arXiv 1503.02531), GKD (Agarwal et al., 2306.13649, eq. 1 and section 2).
Shapes: B rows, T completion positions, V vocabulary entries, N trained tokens.
"""

import math

import torch
from torch import Tensor

from rlcanary.contract.batch import LossOutput
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.records.other_losses import DistillationBatch
from rlcanary.reference.masks import masked
from rlcanary.reference.objective.aggregation import aggregate_tokens
from rlcanary.reference.objective.supervised import log_softmax, mean, spread


def distillation_loss(batch: DistillationBatch, conventions: Conventions) -> LossOutput:
    """Divergence between teacher and student at each trained token, with a term of hard labels where one is declared.

    Args:
        batch: the student's logits carry the gradient; the teacher's are taken as constant.
        conventions: the fields that start with `distillation_` are used.

    Returns:
        A scalar loss and its metrics. A batch without a trained token has loss zero and a NaN divergence.
    """
    mask_BT = batch.mask.bool()
    logits_NV, teacher_NV = batch.logits[mask_BT], batch.teacher_logits.detach()[mask_BT]
    divergence_N = divergence(
        log_softmax(logits_NV / batch.temperature), log_softmax(teacher_NV / batch.temperature), conventions
    )
    factor = batch.temperature**2 if conventions.distillation_temperature_squared else 1.0
    loss_N = factor * divergence_N
    weight = conventions.distillation_label_weight
    if weight:
        ids_N1 = batch.token_ids[mask_BT].unsqueeze(1)
        loss_N = (1 - weight) * loss_N - weight * log_softmax(logits_NV).gather(1, ids_N1).squeeze(1)
    aggregation = conventions.distillation_aggregation
    loss = aggregate_tokens(spread(loss_N, mask_BT), mask_BT, aggregation, batch.global_tokens, batch.global_sequences)
    return LossOutput(loss, {"loss": float(loss.detach()), "divergence": mean(divergence_N)})


def divergence(student_NV: Tensor, teacher_NV: Tensor, conventions: Conventions) -> Tensor:
    """The declared divergence of each row in nats.

    Args:
        student_NV: [N, V] logprobs.
        teacher_NV: [N, V] logprobs.
        conventions: distillation_divergence and distillation_beta are used.

    Returns:
        [N], differentiable in both.
    """
    beta = conventions.distillation_beta
    match conventions.distillation_divergence:
        case "forward_kl":
            return kl_between(teacher_NV, student_NV)
        case "reverse_kl":
            return kl_between(student_NV, teacher_NV)
        case "mixed_kl":
            return beta * kl_between(teacher_NV, student_NV) + (1 - beta) * kl_between(student_NV, teacher_NV)
        case "jsd":
            mixture_NV = torch.logaddexp(teacher_NV + math.log(beta), student_NV + math.log1p(-beta))
            return beta * kl_between(teacher_NV, mixture_NV) + (1 - beta) * kl_between(student_NV, mixture_NV)


def kl_between(p_NV: Tensor, q_NV: Tensor) -> Tensor:
    """KL(p ‖ q) from logprobs; an entry of probability 0 under p counts for nothing -> [N]."""
    return (p_NV.exp() * (p_NV - q_NV).masked_fill(p_NV == -math.inf, 0)).sum(dim=1)


def distillation_advantages(student_logprobs_BT: Tensor, teacher_logprobs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Log-ratio of teacher to student of each sampled token, as an advantage of on-policy distillation.

    With x drawn from the student p, E[(log q(x) - log p(x)) ∇ log p(x)] = -∇ KL(p ‖ q), since E[∇ log p(x)] = 0.

    Args:
        student_logprobs_BT: [B, T].
        teacher_logprobs_BT: [B, T].
        mask_BT: [B, T] bool.

    Returns:
        [B, T] without gradient, 0 outside the mask.

    Raises:
        ValueError: shapes differ, or a logprob inside the mask is NaN.
    """
    mask_BT = mask_BT.bool()
    student_BT = masked(student_logprobs_BT.detach(), mask_BT, "student_logprobs")
    return masked(teacher_logprobs_BT.detach(), mask_BT, "teacher_logprobs") - student_BT
