"""verl's advantage estimators and its critic's loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlcanary.adapters.verl.workers.engine import jagged, sent, tensordict
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


def estimated(algorithm: Any, batch: CreditBatch) -> tuple[Tensor, Tensor]:
    """Run the trainer's `compute_advantage` -> advantages and returns, [B, T].

    The only rewards of tokens that verl has are its KL in the reward, so they are given as that, which verl masks itself.
    """
    import numpy as np
    import torch
    from verl.protocol import DataProto
    from verl.trainer.ppo.core_algos import AdvantageEstimator, FixedKLController
    from verl.trainer.ppo.ray_trainer import apply_kl_penalty, compute_advantage

    scores_BT = row_rewards(batch)
    tensors = {"token_level_scores": scores_BT, "token_level_rewards": scores_BT, "response_mask": batch.mask.long()}
    if algorithm.adv_estimator == "gae":
        if batch.values is None:
            raise NotProvided("GAE needs the critic's values")
        tensors["values"] = batch.values
    if batch.token_rewards is not None:
        tensors |= {"old_log_probs": -batch.token_rewards, "ref_log_prob": torch.zeros_like(batch.token_rewards)}
    uids = np.array([str(group) for group in batch.group_ids.tolist()], dtype=object)
    data = DataProto.from_dict(tensors=tensors, non_tensors={"uid": uids})
    if batch.token_rewards is not None:
        data, _ = apply_kl_penalty(data, FixedKLController(1.0), "kl")
    computed = compute_advantage(
        data,
        adv_estimator=AdvantageEstimator(algorithm.adv_estimator),
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
        config=algorithm,
    )
    return computed.batch["advantages"], computed.batch["returns"]


def row_rewards(batch: CreditBatch) -> Tensor:
    """[B, T] the rewards of rows at their last trained token.

    Of a row without one the reward is in the last column, as verl's reward managers put it at `valid_response_length - 1`.
    """
    import torch

    mask_BT = batch.mask.bool()
    is_last_BT = mask_BT & (mask_BT.flip(1).cumsum(dim=1).flip(1) == 1)
    is_last_BT[:, -1] |= ~mask_BT.any(dim=1)
    return torch.where(is_last_BT, batch.rewards.unsqueeze(1), 0.0)


def value_loss(batch: ValueBatch, critic: Any, constant: float) -> LossOutput:
    """Run the workers' `value_loss` on one-token prompts and rows without padding, with the counts of the whole update.

    Args:
        batch: its inputs.
        critic: the group `critic` of the configuration.
        constant: the one that the conventions declare.
    """
    import torch
    from verl.workers.utils.losses import value_loss as loss_of_workers

    if batch.old_values is None:
        raise NotProvided("verl always clips the values, around the old ones")
    if critic.loss_agg_mode == "seq-mean-token-sum-norm" and critic.get("loss_scale_factor") != constant:
        raise NotProvided("the conventions have one constant, and the critic's loss_scale_factor is not the actor's")
    rows, width = batch.mask.shape
    tokens = torch.zeros(rows, 1 + width, dtype=torch.long)
    data = tensordict(
        {
            "response_mask": sent(batch.mask.long()),
            "values": sent(batch.old_values),
            "returns": sent(batch.returns),
            "input_ids": jagged(tokens),
            "prompts": sent(tokens[:, :1]),
            "responses": sent(tokens[:, 1:]),
        },
        dp_size=1,
        batch_num_tokens=batch.mask.sum() if batch.global_tokens is None else batch.global_tokens,
        global_batch_size=rows if batch.global_sequences is None else batch.global_sequences,
    )
    # An output stands one position before the token that it scores; the last scores nothing.
    values_BS = torch.cat([batch.values, torch.zeros_like(batch.values[:, :1])], dim=1)
    loss, metrics = loss_of_workers(critic, {"values": jagged(values_BS)}, data)
    return LossOutput(loss, {"value_clip_fraction": metrics["critic/vf_clipfrac"]})
