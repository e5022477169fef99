"""Translation between verl's options and conventions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlcanary.adapters.frameworks import has_part, part
from rlcanary.adapters.verl.losses.credit import WORDS, estimator_for, words_of
from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.conventions import Aggregation, Conventions, Custom, KlEstimator, Objective, RatioLevel
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
# The objective and the level of the ratios of each loss mode.
LOSS_MODES: dict[str, tuple[Objective, RatioLevel]] = {
    "vanilla": ("clip", "token"),
    "gspo": ("clip", "sequence"),
    "cispo": ("cispo", "token"),
    "sapo": ("sapo", "token"),
    "geo_mean": ("gmpo", "token"),
}
# What reads `rollout_is_threshold` where it may be a pair of bounds.
THRESHOLD = "verl.trainer.ppo.rollout_corr_helper:_parse_rollout_is_threshold"
# Their policy term is a mean over sequences whatever loss_agg_mode says, by which the KL and the entropy are aggregated.
MEANS_OF_SEQUENCES = ("sapo", "geo_mean")


def require_words(actor: Any) -> None:
    """Refuse settings that the conventions cannot express.

    Args:
        actor: an `ActorConfig`.

    Raises:
        UserError: it has a setting that the conventions cannot express.
    """
    loss_mode, aggregation = actor.policy_loss.loss_mode, actor.loss_agg_mode
    if loss_mode not in LOSS_MODES and not is_of_the_user(loss_mode):
        raise UserError(f"policy_loss.loss_mode={loss_mode!r}: this adapter knows {', '.join(LOSS_MODES)}")
    if aggregation not in AGGREGATIONS:
        raise UserError(f"loss_agg_mode={aggregation!r}: this adapter knows {', '.join(AGGREGATIONS)}")
    if loss_mode in MEANS_OF_SEQUENCES and aggregation != "seq-mean-token-mean":
        raise UserError(
            f"policy_loss.loss_mode={loss_mode!r} is a mean over sequences, its KL and entropy follow loss_agg_mode: the "
            "conventions have one aggregation, set loss_agg_mode='seq-mean-token-mean'"
        )
    if aggregation == "seq-mean-token-sum-norm" and actor.loss_scale_factor is None:
        raise UserError(
            "without a loss_scale_factor 'seq-mean-token-sum-norm' divides by the width of the padded batch, "
            "so that the loss depends on the longest completion: set one"
        )


def is_of_the_user(loss_mode: str) -> bool:
    """Tell whether a loss mode is one that code outside of verl has registered with `register_policy_loss`."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    loss = POLICY_LOSS_REGISTRY.get(loss_mode)
    return loss is not None and not loss.__module__.startswith("verl.")


def conventions_of(actor: Any, algorithm: Any, temperature: float, train_batch_size: int) -> Conventions:
    """Translate an `ActorConfig`, an `AlgoConfig`, settings of the rollouts and the data."""
    loss_mode = actor.policy_loss.loss_mode
    # A loss of the user's is declared by the adapter that names it, or left to the laws.
    custom: tuple[Custom, RatioLevel] = ("custom", "token")
    objective, ratio_level = LOSS_MODES.get(loss_mode, custom)
    low_bound = actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low
    high_bound = actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high
    if loss_mode == "geo_mean":
        # Its bounds are of the log-ratio.
        low_bound, high_bound = -math.expm1(-low_bound), math.expm1(high_bound)
    in_reward = algorithm.use_kl_in_reward
    estimator = KL_ESTIMATORS[algorithm.kl_penalty if in_reward else actor.kl_loss_type]
    correction = algorithm.rollout_correction
    level = correction.rollout_is if correction is not None else None
    low, high = _weight_bounds(correction.rollout_is_threshold) if level is not None else (None, 2.0)
    return Conventions(
        **advantage_words(algorithm),
        objective=objective,
        ratio_level=ratio_level,
        clip_low=low_bound,
        clip_high=high_bound,
        dual_clip=actor.clip_ratio_c if loss_mode == "vanilla" else None,
        log_ratio_clamp=20.0 if loss_mode in ("vanilla", "cispo", "sapo") else None,
        sapo_temperature_positive=actor.tau_pos,
        sapo_temperature_negative=actor.tau_neg,
        aggregation=AGGREGATIONS[actor.loss_agg_mode],
        aggregation_constant=actor.loss_scale_factor or 1.0,
        kl_estimator=estimator,
        kl_coef=algorithm.kl_ctrl.kl_coef if in_reward else actor.kl_loss_coef if actor.use_kl_loss else 0.0,
        kl_placement="reward" if in_reward else "loss",
        kl_input_clamp=20.0 if estimator == "k3" else None,
        kl_output_clamp=10.0 if estimator == "k3" else None,
        entropy_coef=actor.entropy_coeff,
        logprobs_upcast=False,
        temperature=temperature,
        old_logprobs="trainer",
        epochs_per_rollout=actor.ppo_epochs,
        mini_batches=train_batch_size // actor.ppo_mini_batch_size,
        schedule_advances="rollout",
        sync_while_sampling=False,  # requests are aborted first
        training_dropout=True,
        max_grad_norm=actor.optim.clip_grad,
        importance_level=level or "none",
        importance_mode="truncate" if low is None else "mask",
        importance_low=low or 0.0,
        importance_high=high,
        distillation_divergence="forward_kl",
        distillation_aggregation="sequence_mean" if actor.loss_agg_mode == "seq-mean-token-mean" else "token_mean",
    )


def critic_words(critic: Any) -> dict[str, Any]:
    """Translate the group `critic` into conventions.

    Raises:
        UserError: they cannot express its reduction.
    """
    mode = critic.loss_agg_mode
    if mode not in AGGREGATIONS:
        raise UserError(f"critic.loss_agg_mode={mode!r}: this adapter knows {', '.join(AGGREGATIONS)}")
    return {"value_clip": critic.cliprange_value, "value_aggregation": AGGREGATIONS[mode]}


def advantage_words(algorithm: Any) -> dict[str, Any]:
    """Translate the estimator of an `AlgoConfig`, and how it divides, into conventions."""
    return words_of(algorithm) | {
        "advantage_ddof": 1,
        "advantage_eps": 1e-6,
        "advantage_eps_mode": "add",
        "singleton_group": "reward",
    }


def _weight_bounds(threshold: Any) -> tuple[float | None, float]:
    """Parse `rollout_is_threshold`, an upper bound or "lower_upper"."""
    if not has_part(THRESHOLD):
        return None, float(threshold)
    high, low = part(THRESHOLD)(threshold)
    return low, high


def settings_for(
    actor: Mapping[str, Any],
    algorithm: Mapping[str, Any],
    critic: Mapping[str, Any],
    conventions: Conventions,
    train_batch_size: int,
    changes: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return actor, algorithm and critic settings for changed conventions.

    Raises:
        NotProvided: the adapter knows no such option of verl.
    """
    wanted = conventions.replace(**changes)
    actor, algorithm, critic = dict(actor), dict(algorithm), dict(critic)
    estimator = estimator_for(wanted)
    modes = {words: mode for mode, words in LOSS_MODES.items()}
    loss_mode = modes.get((wanted.objective, wanted.ratio_level))
    is_possible = loss_mode not in MEANS_OF_SEQUENCES or wanted.aggregation == "sequence_mean"
    modes_of_loss = {ours: theirs for theirs, ours in AGGREGATIONS.items()}
    for name in changes:
        match name:
            case _ if name in WORDS and estimator:
                algorithm |= estimator
            case "discount":
                algorithm["gamma"] = wanted.discount
            case "gae_lambda":
                algorithm["lam"] = wanted.gae_lambda
            case "value_clip" if wanted.value_clip is not None:
                critic["cliprange_value"] = wanted.value_clip
            case "value_aggregation" if wanted.value_aggregation in modes_of_loss:
                critic["loss_agg_mode"] = modes_of_loss[wanted.value_aggregation]
            case "sapo_temperature_positive":
                actor["tau_pos"] = wanted.sapo_temperature_positive
            case "sapo_temperature_negative":
                actor["tau_neg"] = wanted.sapo_temperature_negative
            case "objective" | "ratio_level" if loss_mode is not None and is_possible:
                actor["policy_loss"] = {**actor.get("policy_loss", {}), "loss_mode": loss_mode}
            case "clip_low" if wanted.clip_low is not None:
                is_log = wanted.objective == "gmpo"
                actor["clip_ratio_low"] = -math.log1p(-wanted.clip_low) if is_log else wanted.clip_low
            case "clip_high" if wanted.clip_high is not None:
                is_log = wanted.objective == "gmpo"
                actor["clip_ratio_high"] = math.log1p(wanted.clip_high) if is_log else wanted.clip_high
            case "dual_clip" if wanted.dual_clip is not None and loss_mode == "vanilla":
                actor["clip_ratio_c"] = wanted.dual_clip
            case "aggregation" if wanted.aggregation in modes_of_loss and is_possible:
                actor["loss_agg_mode"] = modes_of_loss[wanted.aggregation]
                if wanted.aggregation == "constant":
                    actor["loss_scale_factor"] = wanted.aggregation_constant
            case "aggregation_constant":
                actor["loss_scale_factor"] = wanted.aggregation_constant
            case "kl_estimator" | "kl_coef" | "kl_placement":
                is_on, is_in_reward = wanted.kl_coef != 0, wanted.kl_placement == "reward"
                actor |= {"use_kl_loss": is_on and not is_in_reward, "kl_loss_coef": wanted.kl_coef}
                actor["kl_loss_type"] = wanted.kl_estimator
                algorithm |= {"use_kl_in_reward": is_in_reward, "kl_penalty": wanted.kl_estimator}
                algorithm["kl_ctrl"] = {"kl_coef": wanted.kl_coef}
            case "epochs_per_rollout":
                actor["ppo_epochs"] = wanted.epochs_per_rollout
            case "mini_batches" if train_batch_size % wanted.mini_batches == 0:
                actor["ppo_mini_batch_size"] = train_batch_size // wanted.mini_batches
            case "entropy_coef":
                actor["entropy_coeff"] = wanted.entropy_coef
            case "max_grad_norm" if wanted.max_grad_norm is not None:
                actor["optim"] = {**actor.get("optim", {}), "clip_grad": wanted.max_grad_norm}
            case "temperature":
                pass
            case "importance_level" | "importance_mode" | "importance_low" | "importance_high":
                if wanted.importance_mode == "mask" and not has_part(THRESHOLD):
                    raise NotProvided(
                        "rollout_is_threshold of this release is an upper bound, at which weights are cut off"
                    )
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
    return actor, algorithm, critic


def data_words(data: Any) -> dict[str, Any]:
    """Translate the group `data` of the configuration into conventions."""
    truncation = "raise" if data.truncation == "error" else data.truncation
    return {
        "data_order": "shuffled" if data.shuffle else "sequential",
        "long_prompt": "drop" if data.filter_overlong_prompts else truncation,
    }


def data_settings(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of the group `data` for changed conventions."""
    settings: dict[str, Any] = {}
    for name, value in changes.items():
        if name == "data_order":
            settings["shuffle"] = value == "shuffled"
        else:
            truncation = "error" if value in ("drop", "raise") else value
            settings |= {"filter_overlong_prompts": value == "drop", "truncation": truncation}
    return settings
