"""A `GRPOConfig` as conventions, and changed conventions as settings of it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from rlcanary.adapters.trl.releases import has_part, knows_loss, part
from rlcanary.contract.conventions import Aggregation, Conventions, Objective
from rlcanary.contract.declining import NotProvided

AGGREGATIONS: dict[str, Aggregation] = {
    "grpo": "sequence_mean",
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "dr_grpo": "constant",
    "cispo": "token_mean",
    "sapo": "sequence_mean",
    "luspo": "sequence_sum",
}
# The losses of `DPOConfig`: their kind, and whether logprobs are means.
KINDS: dict[str, tuple[str, bool]] = {
    "sigmoid": ("sigmoid", False),
    "sigmoid_norm": ("sigmoid", True),
    "hinge": ("hinge", False),
    "ipo": ("ipo", True),
}
# Loss types that have an objective of their own, and its name.
OBJECTIVES: dict[str, Objective] = {"cispo": "cispo", "sapo": "sapo"}


# What a release does that has no such option, as a value of the option.
WITHOUT: dict[str, Any] = {
    "entropy_coef": 0.0,
    "off_policy_mask_threshold": None,
    "sapo_temperature_neg": 1.05,
    "sapo_temperature_pos": 1.0,
    "use_bias_correction_kl": False,
    "vllm_importance_sampling_clip_max": None,
    "vllm_importance_sampling_clip_min": None,
    "vllm_importance_sampling_correction": False,
    "vllm_importance_sampling_mode": "token_truncate",
}
# Options that had another name.
FORMERLY = {"vllm_importance_sampling_clip_max": "vllm_importance_sampling_cap"}


class _Options:
    """The options of a `GRPOConfig`, with those that its release does not have."""

    def __init__(self, args: Any) -> None:
        self._args = args

    def __getattr__(self, name: str) -> Any:
        former = FORMERLY.get(name, name)
        if hasattr(self._args, name) or hasattr(self._args, former):
            return getattr(self._args, name if hasattr(self._args, name) else former)
        return WITHOUT[name]


def conventions_of(args: Any, uses_vllm: bool) -> Conventions:
    """Translate a `GRPOConfig` into conventions; `uses_vllm` tells whether an engine other than the trainer samples."""
    args = _Options(args)
    objective = OBJECTIVES.get(args.loss_type, "clip")
    level, mode = args.vllm_importance_sampling_mode.split("_")
    is_corrected = uses_vllm and args.vllm_importance_sampling_correction
    return Conventions(
        advantage_scale={True: "group", False: "none"}.get(args.scale_rewards, args.scale_rewards),
        advantage_ddof=1,
        advantage_eps=1e-4,
        advantage_eps_mode="add",
        nan_reward="exclude",
        objective=objective,
        sapo_temperature_positive=args.sapo_temperature_pos,
        sapo_temperature_negative=args.sapo_temperature_neg,
        off_policy_mask=args.off_policy_mask_threshold,
        ratio_level=args.importance_sampling_level,
        clip_low=args.epsilon if objective == "clip" else None,
        clip_high=(args.epsilon if args.epsilon_high is None else args.epsilon_high) - (objective == "cispo"),
        dual_clip=args.delta,
        aggregation=AGGREGATIONS[args.loss_type],
        aggregation_constant=args.max_completion_length,
        top_entropy=None if args.top_entropy_quantile == 1 else args.top_entropy_quantile,
        entropy_aggregation="token_mean",
        kl_estimator="k3",
        kl_coef=args.beta,
        kl_ratio_weighted=args.use_bias_correction_kl,
        entropy_coef=args.entropy_coef,
        logprobs_upcast=False,
        mask_truncated=args.mask_truncated_completions,
        temperature=args.temperature,
        evaluation_temperature=args.temperature,
        old_logprobs="trainer",
        training_dropout=not args.disable_dropout,
        max_grad_norm=args.max_grad_norm or None,
        sync_while_sampling=False,
        data_order="shuffled" if args.shuffle_dataset else "sequential",
        epochs_per_rollout=args.num_iterations,
        mini_batches=max(args.steps_per_generation // args.gradient_accumulation_steps, 1),
        logged_updates="last",
        logged_length="sampled",
        unscored="exclude",
        decayed="matrices",
        importance_level=level if is_corrected else "none",
        importance_mode=mode,
        importance_low=args.vllm_importance_sampling_clip_min or 0.0,
        importance_high=_or_infinite(args.vllm_importance_sampling_clip_max),
    )


def other_conventions(sft: dict[str, Any], dpo: dict[str, Any], distillation: dict[str, Any]) -> dict[str, Any]:
    """Translate the settings of the other trainers, where they are given or by TRL's defaults, into conventions."""
    from trl import DPOConfig, SFTConfig

    def value(config: Any, settings: dict[str, Any], name: str) -> Any:
        return settings.get(name, next(each.default for each in fields(config) if each.name == name))

    kinds = dpo.get("loss_type", ["sigmoid"])
    weights = dpo.get("loss_weights") or [1.0] * len(kinds)
    kind, is_normalised = KINDS[kinds[0]]
    return _of_distillation(distillation) | {
        "supervised_aggregation": "token_mean",
        "supervised_label_smoothing": value(SFTConfig, sft, "label_smoothing_factor"),
        "preference_kind": kind,
        "preference_length_normalised": is_normalised,
        "preference_beta": value(DPOConfig, dpo, "beta"),
        "preference_supervised_coef": dict(zip(kinds, weights, strict=True)).get("sft", 0.0),
    }


def _of_distillation(settings: dict[str, Any]) -> dict[str, Any]:
    """Translate the settings of distillation, if the release has that trainer."""
    if not has_part("trl:DistillationConfig"):
        return {}
    default = next(each.default for each in fields(part("trl:DistillationConfig")) if each.name == "beta")
    beta = settings.get("beta", default)
    divergence = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, "jsd")
    return {
        "distillation_divergence": divergence,
        "distillation_beta": beta if divergence == "jsd" else 0.5,
        "distillation_aggregation": "token_mean",
    }


def _or_infinite(bound: float | None) -> float:
    return float("inf") if bound is None else bound


def settings_for(settings: dict[str, Any], conventions: Conventions, changes: dict[str, Any]) -> dict[str, Any]:
    """Return GRPOConfig settings for changed conventions.

    Raises:
        NotProvided: the adapter knows no such option of TRL.
    """
    wanted = conventions.replace(**changes)
    result = dict(settings)
    for name in changes:
        match name:
            case "temperature" | "evaluation_temperature":
                if wanted.temperature != wanted.evaluation_temperature and len(changes) > 1:
                    raise NotProvided("evaluations sample at the temperature of training")
                result["temperature"] = changes[name]
            case "max_grad_norm":
                result["max_grad_norm"] = wanted.max_grad_norm or 0.0
            case "training_dropout":
                result["disable_dropout"] = not wanted.training_dropout
            case "mask_truncated":
                result["mask_truncated_completions"] = wanted.mask_truncated
            case "data_order":
                result["shuffle_dataset"] = wanted.data_order == "shuffled"
            case "epochs_per_rollout":
                result["num_iterations"] = wanted.epochs_per_rollout
            case "mini_batches":
                accumulated = result.get("gradient_accumulation_steps", 1)
                result["steps_per_generation"] = wanted.mini_batches * accumulated
            case "overlong_buffer":
                result["overlong_buffer"] = wanted.overlong_buffer
            case "kl_coef":
                result["beta"] = wanted.kl_coef
            case "advantage_scale":
                result["scale_rewards"] = wanted.advantage_scale
            case "ratio_level":
                result["importance_sampling_level"] = wanted.ratio_level
            case "kl_ratio_weighted":
                result["use_bias_correction_kl"] = wanted.kl_ratio_weighted
            case "dual_clip":
                result["delta"] = wanted.dual_clip
            case "sapo_temperature_positive":
                result["sapo_temperature_pos"] = wanted.sapo_temperature_positive
            case "sapo_temperature_negative":
                result["sapo_temperature_neg"] = wanted.sapo_temperature_negative
            case "off_policy_mask":
                result["off_policy_mask_threshold"] = wanted.off_policy_mask
            case "objective" | "aggregation" if (wanted.objective, wanted.aggregation) == ("sapo", "sequence_mean"):
                result["loss_type"] = "sapo"
            case "entropy_coef" if wanted.aggregation == "token_mean" or wanted.entropy_aggregation == "token_mean":
                result["entropy_coef"] = wanted.entropy_coef
            case "entropy_aggregation" if wanted.entropy_aggregation == "token_mean":
                pass  # It is so under every loss.
            case "top_entropy":
                result["top_entropy_quantile"] = 1.0 if wanted.top_entropy is None else wanted.top_entropy
            case "clip_low" if wanted.clip_low is not None:
                result["epsilon"] = wanted.clip_low
            case "clip_high" if wanted.clip_high is not None and wanted.objective == "clip":
                result["epsilon_high"] = wanted.clip_high
            case "aggregation_constant":
                result["max_completion_length"] = int(wanted.aggregation_constant)
            case "aggregation" if wanted.aggregation in AGGREGATIONS.values() and wanted.objective == "clip":
                kinds = {ours: theirs for theirs, ours in AGGREGATIONS.items() if theirs not in OBJECTIVES}
                kind = result["loss_type"] = kinds[wanted.aggregation]
                if not knows_loss(kind, "trl:GRPOTrainer"):
                    raise NotProvided(f"this release of TRL has no loss_type {kind}")
            case "supervised_label_smoothing":
                result["sft"] = {**result["sft"], "label_smoothing_factor": wanted.supervised_label_smoothing}
            case "supervised_aggregation" | "distillation_aggregation" if changes[name] == "token_mean":
                pass  # The only one.
            case "preference_beta":
                result["dpo"] = {**result["dpo"], "beta": wanted.preference_beta}
            case "preference_reference" if wanted.preference_reference:
                pass  # There always is one.
            case "preference_margin" | "preference_label_smoothing" if not changes[name]:
                pass  # There is none.
            case "preference_kind" | "preference_length_normalised" | "preference_supervised_coef":
                result["dpo"] = {**result["dpo"], **_losses_of_pairs(wanted)}
            case "distillation_divergence" | "distillation_beta" if wanted.distillation_divergence != "mixed_kl":
                limits = {"forward_kl": 0.0, "reverse_kl": 1.0}
                beta = limits.get(wanted.distillation_divergence, wanted.distillation_beta)
                result["distillation"] = {**result["distillation"], "beta": beta}
            case "distillation_temperature_squared" | "distillation_label_weight" if not changes[name]:
                pass  # There is none.
            case "importance_level" | "importance_mode" | "importance_low" | "importance_high":
                level = "token" if wanted.importance_level == "none" else wanted.importance_level
                result |= {
                    "use_vllm": wanted.importance_level != "none",
                    "vllm_importance_sampling_mode": f"{level}_{wanted.importance_mode}",
                    "vllm_importance_sampling_clip_max": wanted.importance_high,
                    "vllm_importance_sampling_clip_min": wanted.importance_low or None,
                }
                # TRL's truncation also has a lower bound, which the conventions cannot express.
                if wanted.importance_mode == "truncate":
                    result["vllm_importance_sampling_clip_min"] = None
            case _:
                raise NotProvided(f"this adapter has no setting of TRL for {name}={changes[name]!r}")
    return of_the_release(result)


def of_the_release(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings under the names that the release has for them.

    Raises:
        NotProvided: it has no such option.
    """
    known = {each.name for each in fields(part("trl:GRPOConfig"))}
    result = {}
    for name, value in settings.items():
        former = FORMERLY.get(name, name)
        if name in known or name not in WITHOUT:
            result[name] = value
        elif former in known:
            result[former] = value
        elif value != WITHOUT[name]:
            raise NotProvided(f"this release of TRL has no option {name}")
    return result


def _losses_of_pairs(wanted: Conventions) -> dict[str, Any]:
    """Return the `loss_type` and `loss_weights` of a `DPOConfig`.

    Raises:
        NotProvided: it has no such loss.
    """
    kinds = {ours: theirs for theirs, ours in KINDS.items()}
    kind = kinds.get((wanted.preference_kind, wanted.preference_length_normalised))
    if kind is None or not knows_loss(kind):
        normalised = "means" if wanted.preference_length_normalised else "sums"
        raise NotProvided(f"DPOConfig has no loss_type {wanted.preference_kind!r} of {normalised} of logprobs")
    if not wanted.preference_supervised_coef:
        return {"loss_type": [kind], "loss_weights": None}
    if wanted.supervised_aggregation != "token_mean":
        raise NotProvided("the added supervised term is the mean over the tokens")
    return {"loss_type": [kind, "sft"], "loss_weights": [1.0, wanted.preference_supervised_coef]}
