"""verl's advantage estimators and its critic's loss."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.batch import LossOutput
from rlcanary.contract.conventions import Conventions

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.records.credit import CreditBatch, ValueBatch

# The settings of an estimator in the words of the conventions, and with which standard deviation GRPO divides.
WORDS = ("token_credit", "advantage_baseline", "advantage_scale", "baseline_weighting", "whitening")
ESTIMATORS: dict[tuple[str, ...], tuple[str, bool]] = {
    ("outcome", "mean", "group", "rows", "none"): ("grpo", True),
    ("outcome", "mean", "none", "rows", "none"): ("grpo", False),
    ("outcome", "leave_one_out", "none", "rows", "none"): ("rloo", True),
    ("outcome", "mean", "none", "tokens", "none"): ("opo", True),
    ("outcome", "mean", "none", "rows", "mean_std"): ("reinforce_plus_plus_baseline", True),
    ("returns", "none", "none", "rows", "mean_std"): ("reinforce_plus_plus", True),
    ("gae", "none", "none", "rows", "mean_std"): ("gae", True),
}
# Those of which the advantage of a row follows from rewards and groups alone.
OF_ROWS = ("grpo", "rloo")


def words_of(algorithm: Any) -> dict[str, Any]:
    """Translate the estimator of an `AlgoConfig` into conventions."""
    scaled = algorithm.norm_adv_by_std_in_grpo if algorithm.adv_estimator == "grpo" else True
    words = next(words for words, named in ESTIMATORS.items() if named == (algorithm.adv_estimator, scaled))
    return dict(zip(WORDS, words, strict=True)) | {"discount": algorithm.gamma, "gae_lambda": algorithm.lam}


def estimator_for(wanted: Conventions) -> dict[str, Any]:
    """Return the settings of an `AlgoConfig` for conventions; none if verl has no such estimator."""
    if wanted.token_credit == "gae":  # which has neither a baseline nor a scale
        wanted = wanted.replace(advantage_baseline="none", advantage_scale="none", baseline_weighting="rows")
    named = ESTIMATORS.get(tuple(getattr(wanted, word) for word in WORDS))
    return {} if named is None else {"adv_estimator": named[0], "norm_adv_by_std_in_grpo": named[1]}


def estimated(
    algorithm: Any, rewards_BT: Tensor, mask_BT: Tensor, group_ids: Tensor, values_BT: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run the trainer's `compute_advantage` -> advantages and returns, [B, T]."""
    import numpy as np
    from verl.protocol import DataProto
    from verl.trainer.ppo.core_algos import AdvantageEstimator
    from verl.trainer.ppo.ray_trainer import compute_advantage

    tensors = {"token_level_rewards": rewards_BT, "response_mask": mask_BT.long()}
    if algorithm.adv_estimator == "gae":
        if values_BT is None:
            raise NotProvided("GAE needs the critic's values")
        tensors["values"] = values_BT.masked_fill(~mask_BT, 0)
    data = DataProto.from_dict(
        tensors=tensors, non_tensors={"uid": np.array([str(group) for group in group_ids.tolist()], dtype=object)}
    )
    computed = compute_advantage(
        data,
        adv_estimator=AdvantageEstimator(algorithm.adv_estimator),
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
        config=algorithm,
    )
    return computed.batch["advantages"], computed.batch["returns"]


def token_rewards(batch: CreditBatch) -> Tensor:
    """[B, T] the rewards of tokens, and those of rows at their last trained token.

    Of a row without one the reward is in the last column, as verl's reward managers put it at `valid_response_length - 1`.
    """
    import torch

    mask_BT = batch.mask.bool()
    is_last_BT = mask_BT & (mask_BT.flip(1).cumsum(dim=1).flip(1) == 1)
    is_last_BT[:, -1] |= ~mask_BT.any(dim=1)
    rewards_BT = torch.where(is_last_BT, batch.rewards.unsqueeze(1), 0.0)
    if batch.token_rewards is not None:
        rewards_BT = rewards_BT + batch.token_rewards.masked_fill(~mask_BT, 0)
    return rewards_BT


def value_loss(batch: ValueBatch, conventions: Conventions, aggregation: str) -> LossOutput:
    """Compute the critic's loss as the worker's `value_loss` does, with the counts of the whole mini-batch."""
    from verl.trainer.ppo.core_algos import compute_value_loss

    if batch.old_values is None:
        raise NotProvided("verl always clips the values, around the old ones")
    mask = batch.mask.bool()
    counts = {
        "batch_num_tokens": mask.sum() if batch.global_tokens is None else batch.global_tokens,
        "global_batch_size": len(mask) if batch.global_sequences is None else batch.global_sequences,
        "loss_scale_factor": conventions.aggregation_constant,
    }
    if not counts.keys() <= inspect.signature(compute_value_loss).parameters.keys():
        if batch.global_tokens is not None or batch.global_sequences is not None:
            raise NotProvided("the critic's loss of this release has no global counts")
        counts = {}
    loss, clip_fraction = compute_value_loss(
        vpreds=batch.values.masked_fill(~mask, 0),
        returns=batch.returns.masked_fill(~mask, 0),
        values=batch.old_values.masked_fill(~mask, 0),
        response_mask=mask,
        cliprange_value=conventions.value_clip,
        loss_agg_mode=aggregation,
        **counts,
    )
    return LossOutput(loss, {"value_clip_fraction": float(clip_fraction)})
