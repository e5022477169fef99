"""Translation between verl's options and conventions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.conventions import Aggregation, Conventions, KlEstimator
from rlcanary.errors import UserError

# The trainer divides sequence losses by ppo_mini_batch_size, so rows without a trained token count.
AGGREGATIONS: dict[str, Aggregation] = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "constant",
}
KL_ESTIMATORS: dict[str, KlEstimator] = {
    "kl": "k1",
    "k1": "k1",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
    "abs": "abs",
}
LOSS_MODES = ("vanilla", "gspo", "cispo")


def require_words(actor: Any) -> None:
    """Refuse settings that the conventions cannot express.

    Args:
        actor: an `ActorConfig`.

    Raises:
        UserError: it has a setting that the conventions cannot express.
    """
    loss_mode, aggregation = actor.policy_loss.loss_mode, actor.loss_agg_mode
    if loss_mode not in LOSS_MODES:
        raise UserError(f"policy_loss.loss_mode={loss_mode!r}: this adapter knows {', '.join(LOSS_MODES)}")
    if aggregation not in AGGREGATIONS:
        raise UserError(f"loss_agg_mode={aggregation!r}: this adapter knows {', '.join(AGGREGATIONS)}")
    if aggregation == "seq-mean-token-sum-norm" and actor.loss_scale_factor is None:
        raise UserError(
            "without a loss_scale_factor 'seq-mean-token-sum-norm' divides by the width of the padded batch, "
            "so that the loss depends on the longest completion: set one"
        )


def conventions_of(actor: Any, algorithm: Any, temperature: float) -> Conventions:
    """Translate an `ActorConfig`, an `AlgoConfig` and the rollouts' temperature into conventions."""
    loss_mode = actor.policy_loss.loss_mode
    estimator = KL_ESTIMATORS[actor.kl_loss_type]
    correction = algorithm.rollout_correction
    level = correction.rollout_is if correction is not None else None
    low, high = _weight_bounds(correction.rollout_is_threshold) if level is not None else (None, 2.0)
    is_rloo = algorithm.adv_estimator == "rloo"
    return Conventions(
        advantage_baseline="leave_one_out" if is_rloo else "mean",
        advantage_scale="group" if algorithm.norm_adv_by_std_in_grpo and not is_rloo else "none",
        advantage_ddof=1,
        advantage_eps=1e-6,
        advantage_eps_mode="add",
        singleton_group="reward",
        objective="cispo" if loss_mode == "cispo" else "clip",
        ratio_level="sequence" if loss_mode == "gspo" else "token",
        clip_low=actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low,
        clip_high=actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high,
        dual_clip=actor.clip_ratio_c if loss_mode == "vanilla" else None,
        log_ratio_clamp=None if loss_mode == "gspo" else 20.0,
        aggregation=AGGREGATIONS[actor.loss_agg_mode],
        aggregation_constant=actor.loss_scale_factor or 1.0,
        kl_estimator=estimator,
        kl_coef=actor.kl_loss_coef if actor.use_kl_loss else 0.0,
        kl_input_clamp=20.0 if estimator == "k3" else None,
        kl_output_clamp=10.0 if estimator == "k3" else None,
        entropy_coef=actor.entropy_coeff,
        logprobs_upcast=False,
        temperature=temperature,
        old_logprobs="trainer",
        training_dropout=True,
        max_grad_norm=actor.optim.clip_grad,
        importance_level=level or "none",
        importance_mode="truncate" if low is None else "mask",
        importance_low=low or 0.0,
        importance_high=high,
    )


def _weight_bounds(threshold: Any) -> tuple[float | None, float]:
    """Parse `rollout_is_threshold`, an upper bound or "lower_upper"."""
    from verl.trainer.ppo.rollout_corr_helper import _parse_rollout_is_threshold

    high, low = _parse_rollout_is_threshold(threshold)
    return low, high


def settings_for(
    actor: Mapping[str, Any], algorithm: Mapping[str, Any], conventions: Conventions, changes: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return actor and algorithm settings for changed conventions.

    Raises:
        NotProvided: the adapter knows no such option of verl.
    """
    wanted = conventions.replace(**changes)
    actor, algorithm = dict(actor), dict(algorithm)
    advantage = (wanted.advantage_baseline, wanted.advantage_scale)
    loss_mode = {("clip", "token"): "vanilla", ("clip", "sequence"): "gspo", ("cispo", "token"): "cispo"}.get(
        (wanted.objective, wanted.ratio_level)
    )
    for name in changes:
        match name:
            case "advantage_baseline" | "advantage_scale" if advantage in (("mean", "group"), ("mean", "none")):
                algorithm |= {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": wanted.advantage_scale == "group"}
            case "advantage_baseline" | "advantage_scale" if advantage == ("leave_one_out", "none"):
                algorithm["adv_estimator"] = "rloo"
            case "objective" | "ratio_level" if loss_mode is not None:
                actor["policy_loss"] = {**actor.get("policy_loss", {}), "loss_mode": loss_mode}
            case "clip_low" if wanted.clip_low is not None:
                actor["clip_ratio_low"] = wanted.clip_low
            case "clip_high" if wanted.clip_high is not None:
                actor["clip_ratio_high"] = wanted.clip_high
            case "dual_clip" if wanted.dual_clip is not None and loss_mode == "vanilla":
                actor["clip_ratio_c"] = wanted.dual_clip
            case "aggregation" if wanted.aggregation in AGGREGATIONS.values():
                actor["loss_agg_mode"] = {ours: theirs for theirs, ours in AGGREGATIONS.items()}[wanted.aggregation]
                if wanted.aggregation == "constant":
                    actor["loss_scale_factor"] = wanted.aggregation_constant
            case "aggregation_constant":
                actor["loss_scale_factor"] = wanted.aggregation_constant
            case "kl_estimator":
                actor["kl_loss_type"] = wanted.kl_estimator
            case "kl_coef":
                actor |= {"use_kl_loss": wanted.kl_coef != 0, "kl_loss_coef": wanted.kl_coef}
            case "entropy_coef":
                actor["entropy_coeff"] = wanted.entropy_coef
            case "max_grad_norm" if wanted.max_grad_norm is not None:
                actor["optim"] = {**actor.get("optim", {}), "clip_grad": wanted.max_grad_norm}
            case "temperature":
                pass
            case "importance_level" | "importance_mode" | "importance_low" | "importance_high":
                if wanted.importance_mode == "mask" and wanted.importance_low <= 0:
                    raise NotProvided("the lower bound of rollout_is_threshold has to be above zero")
                high, low = wanted.importance_high, wanted.importance_low
                algorithm["rollout_correction"] = {
                    **(algorithm.get("rollout_correction") or {}),
                    "rollout_is": None if wanted.importance_level == "none" else wanted.importance_level,
                    "rollout_is_threshold": f"{low}_{high}" if wanted.importance_mode == "mask" else high,
                }
            case _:
                raise NotProvided(f"this adapter has no setting of verl for {name}={changes[name]!r}")
    return actor, algorithm
