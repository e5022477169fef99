"""Losses over pairs of a chosen and a rejected completion.

Definitions: DPO (arXiv 2305.18290, eq. 7), its label smoothing cDPO (E. Mitchell, "A note on DPO with noisy preferences"),
SLiC-HF's hinge (2305.10425), IPO (2310.12036, eq. 17), SimPO (2405.14734, eq. 6), RPO's supervised term (2404.19733).
Shapes: B pairs, T completion positions.
"""

from torch import Tensor
from torch.nn.functional import softplus

from rlcanary.contract.batch import LossOutput
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.records.other_losses import PreferenceBatch
from rlcanary.reference.masks import masked
from rlcanary.reference.objective.aggregation import aggregate_tokens
from rlcanary.reference.objective.supervised import mean


def preference_loss(batch: PreferenceBatch, conventions: Conventions) -> LossOutput:
    """Mean loss of the pairs' margins, with a supervised term on the chosen completions where one is declared.

    Args:
        batch: the policy's logprobs carry the gradient; those of the reference are taken as constant.
        conventions: the fields that start with `preference_` are used, and supervised_aggregation for the supervised term.

    Returns:
        A scalar loss and its metrics, of which the rewards are beta times the log-ratios.

    Raises:
        ValueError: a reference is declared and the batch has no reference logprobs, shapes differ, or a logprob inside
            a mask is NaN.
    """
    chosen_B = _log_ratio(batch.chosen_logprobs, batch.ref_chosen_logprobs, batch.chosen_mask, conventions)
    rejected_B = _log_ratio(batch.rejected_logprobs, batch.ref_rejected_logprobs, batch.rejected_mask, conventions)
    loss_B = _pair_losses(chosen_B - rejected_B, conventions)
    loss = loss_B.sum() / max(float(len(loss_B)) if batch.global_pairs is None else batch.global_pairs, 1.0)
    if conventions.preference_supervised_coef:
        mask_BT = batch.chosen_mask.bool()
        nll_BT = -masked(batch.chosen_logprobs, mask_BT, "chosen_logprobs")
        # Where rows without a token do not count, this assumes that no chosen completion of an update is empty.
        counts = batch.global_tokens, batch.global_pairs
        supervised = aggregate_tokens(nll_BT, mask_BT, conventions.supervised_aggregation, *counts)
        loss = loss + conventions.preference_supervised_coef * supervised
    beta = conventions.preference_beta
    metrics = {
        "loss": float(loss.detach()),
        "chosen_reward": beta * mean(chosen_B),
        "rejected_reward": beta * mean(rejected_B),
        "reward_margin": beta * mean(chosen_B - rejected_B),
        "reward_accuracy": mean(chosen_B > rejected_B),
    }
    return LossOutput(loss, metrics)


def _log_ratio(logprobs_BT: Tensor, ref_BT: Tensor | None, mask_BT: Tensor, conventions: Conventions) -> Tensor:
    """[B] sum or mean over a completion's tokens of its log-ratio, or of its logprob without a reference; 0 of no token."""
    mask_BT = mask_BT.bool()
    values_BT = masked(logprobs_BT, mask_BT, "logprobs")
    if conventions.preference_reference:
        if ref_BT is None:
            raise ValueError("preference_reference needs the batch to have reference logprobs")
        values_BT = values_BT - masked(ref_BT.detach(), mask_BT, "reference logprobs")
    total_B = values_BT.sum(dim=1)
    return total_B / mask_BT.sum(dim=1).clamp(min=1) if conventions.preference_length_normalised else total_B


def _pair_losses(difference_B: Tensor, conventions: Conventions) -> Tensor:
    """[B] differences of log-ratios -> [B] losses."""
    beta = conventions.preference_beta
    margin_B = beta * difference_B - conventions.preference_margin
    match conventions.preference_kind:
        case "sigmoid":
            smoothing = conventions.preference_label_smoothing
            return (1 - smoothing) * softplus(-margin_B) + smoothing * softplus(margin_B)
        case "hinge":
            return (1 - margin_B).clamp(min=0)
        case "ipo":
            return (difference_B - 1 / (2 * beta)).square()
