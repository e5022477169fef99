"""A `GRPOConfig` of ms-swift as conventions, and changed conventions as settings of it."""

from __future__ import annotations

from typing import Any

from rlcanary.contract.conventions import Aggregation, Conventions, Objective
from rlcanary.contract.declining import NotProvided

AGGREGATIONS: dict[str, Aggregation] = {
    "grpo": "sequence_mean",
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "dr_grpo": "constant",
    "cispo": "token_mean",
    "sapo": "sequence_mean",
}
# Loss types that have an objective of their own, and its name.
OBJECTIVES: dict[str, Objective] = {"cispo": "cispo", "sapo": "sapo"}


def conventions_of(args: Any, settings: dict[str, Any]) -> Conventions:
    """Translate a `GRPOConfig`, and the settings beside it, into conventions."""
    objective = OBJECTIVES.get(args.loss_type, "clip")
    level, mode = (args.rollout_importance_sampling_mode or "none_truncate").split("_")
    upper = args.epsilon if args.epsilon_high is None else args.epsilon_high
    return Conventions(
        advantage_baseline="leave_one_out" if args.advantage_estimator == "rloo" else "mean",
        advantage_std_of_others=False,
        advantage_scale=args.scale_rewards,
        advantage_ddof=1,
        advantage_eps=1e-4,
        advantage_eps_mode="add",
        objective=objective,
        sapo_temperature_positive=args.tau_pos,
        sapo_temperature_negative=args.tau_neg,
        off_policy_mask=args.off_policy_sequence_mask_delta,
        ratio_level=args.importance_sampling_level,
        clip_low=args.epsilon if objective == "clip" else None,
        # The bound of "cispo" is that of the ratio itself.
        clip_high=upper - (objective == "cispo"),
        dual_clip=args.delta,
        aggregation=AGGREGATIONS[args.loss_type],
        aggregation_constant=args.max_completion_length,
        top_entropy=None if args.top_entropy_quantile == 1 else args.top_entropy_quantile,
        kl_estimator="k3",
        kl_coef=args.beta,
        kl_input_clamp=20.0,
        kl_output_clamp=10.0,
        logprobs_upcast=False,
        mask_truncated=args.overlong_filter,
        overlong_buffer=settings.get("soft_cache_length"),
        temperature=args.temperature,
        evaluation_temperature=args.temperature,
        old_logprobs="trainer",
        training_dropout=not args.disable_dropout,
        max_grad_norm=args.max_grad_norm or None,
        sync_while_sampling=False,
        data_order="shuffled" if args.dataset_shuffle else "sequential",
        epochs_per_rollout=args.num_iterations,
        mini_batches=max(args.steps_per_generation // args.gradient_accumulation_steps, 1),
        logged_updates="last",
        logged_length="sampled",
        logged_std="batch" if args.scale_rewards == "batch" else "group",
        decayed="matrices",
        importance_level=level,
        importance_mode=mode,
        importance_high=args.rollout_importance_sampling_threshold,
    )


def settings_for(settings: dict[str, Any], wanted: Conventions, changes: dict[str, Any]) -> dict[str, Any]:
    """Return settings for changed conventions.

    Raises:
        NotProvided: the adapter knows no such option of swift.
    """
    result = dict(settings)
    kinds = {ours: theirs for theirs, ours in AGGREGATIONS.items() if theirs not in OBJECTIVES}
    for name in changes:
        match name:
            case "temperature" | "evaluation_temperature":
                if wanted.temperature != wanted.evaluation_temperature and len(changes) > 1:
                    raise NotProvided("evaluations sample at the temperature of training")
                result["temperature"] = changes[name]
            case "advantage_baseline" if changes[name] in ("mean", "leave_one_out"):
                result["advantage_estimator"] = "grpo" if changes[name] == "mean" else "rloo"
            case "advantage_scale":
                result["scale_rewards"] = wanted.advantage_scale
            case "max_grad_norm":
                result["max_grad_norm"] = wanted.max_grad_norm or 0.0
            case "training_dropout":
                result["disable_dropout"] = not wanted.training_dropout
            case "mask_truncated":
                result["overlong_filter"] = wanted.mask_truncated
            case "overlong_buffer":
                result["soft_cache_length"] = wanted.overlong_buffer
            case "data_order":
                result["dataset_shuffle"] = wanted.data_order == "shuffled"
            case "epochs_per_rollout":
                result["num_iterations"] = wanted.epochs_per_rollout
            case "mini_batches":
                result["steps_per_generation"] = wanted.mini_batches * result.get("gradient_accumulation_steps", 1)
            case "kl_coef":
                result["beta"] = wanted.kl_coef
            case "ratio_level":
                result["importance_sampling_level"] = wanted.ratio_level
            case "dual_clip":
                result["delta"] = wanted.dual_clip
            case "sapo_temperature_positive":
                result["tau_pos"] = wanted.sapo_temperature_positive
            case "sapo_temperature_negative":
                result["tau_neg"] = wanted.sapo_temperature_negative
            case "off_policy_mask":
                result["off_policy_sequence_mask_delta"] = wanted.off_policy_mask
            case "objective" | "aggregation" if (wanted.objective, wanted.aggregation) == ("sapo", "sequence_mean"):
                result["loss_type"] = "sapo"
            case "aggregation" if wanted.aggregation in kinds and wanted.objective == "clip":
                result["loss_type"] = kinds[wanted.aggregation]
            case "top_entropy":
                result["top_entropy_quantile"] = 1.0 if wanted.top_entropy is None else wanted.top_entropy
            case "clip_low" if wanted.clip_low is not None:
                result["epsilon"] = wanted.clip_low
            case "clip_high" if wanted.clip_high is not None and wanted.objective == "clip":
                result["epsilon_high"] = wanted.clip_high
            case "aggregation_constant":
                result["max_completion_length"] = int(wanted.aggregation_constant)
            case "importance_level" | "importance_mode" | "importance_high":
                mode = f"{wanted.importance_level}_{wanted.importance_mode}"
                result["rollout_importance_sampling_mode"] = None if wanted.importance_level == "none" else mode
                result["rollout_importance_sampling_threshold"] = wanted.importance_high
            case _:
                raise NotProvided(f"this adapter has no setting of swift for {name}={changes[name]!r}")
    return result
