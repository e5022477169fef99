"""slime's options for conventions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.conventions import Conventions

ICEPOP = "slime.backends.megatron_utils.loss.icepop_function"


GROUPED = ("grpo", "gspo", "cispo")


def conventions_of(args: Any, mini_batches: int) -> Conventions:
    """Translate the settings into conventions."""
    kind = args.advantage_estimator
    mean = "token_mean" if args.calculate_per_token_loss else "sequence_mean"
    is_clamped = args.kl_loss_type == "low_var_kl"
    return Conventions(
        advantage_baseline="mean" if kind in GROUPED and args.rewards_normalization else "none",
        advantage_scale="group" if kind in GROUPED and args.grpo_std_normalization else "none",
        singleton_group="nan",
        token_credit={"ppo": "gae", "reinforce_plus_plus": "returns"}.get(kind, "outcome"),  # type: ignore[arg-type]
        whitening="mean_std" if args.normalize_advantages else "none",
        discount=args.gamma,
        gae_lambda=args.lambd,
        objective="cispo" if kind == "cispo" else "clip",
        ratio_level="sequence" if kind == "gspo" else "token",
        clip_low=args.eps_clip,
        clip_high=args.eps_clip_high,
        dual_clip=args.eps_clip_c,
        aggregation=mean,  # type: ignore[arg-type]
        kl_estimator="k3" if is_clamped else args.kl_loss_type,
        kl_coef=args.kl_loss_coef if args.use_kl_loss else 0.0,
        kl_output_clamp=10.0 if is_clamped else None,
        kl_ratio_weighted=args.use_unbiased_kl,
        entropy_coef=args.entropy_coef,
        importance_level="token" if args.use_tis else "none",
        importance_mode="mask" if args.custom_tis_function_path == ICEPOP else "truncate",
        importance_low=args.tis_clip_low,
        importance_high=args.tis_clip,
        old_logprobs="sampler" if args.use_rollout_logprobs else "trainer",
        # The logprobs of the update itself are the old ones where there is one update.
        training_dropout=True,
        temperature=args.rollout_temperature,
        max_grad_norm=args.clip_grad or None,
        value_clip=args.value_clip,
        value_coef=1.0,
        value_aggregation=mean,  # type: ignore[arg-type]
        supervised_aggregation=mean,  # type: ignore[arg-type]
        data_order="shuffled" if args.rollout_shuffle else "sequential",
        logged_std="batch",
        logged_length="sampled",
        approx_kl_estimator="k1",
        mini_batches=mini_batches,
        long_prompt="drop",
        # Generation ends, or is aborted, before weights are updated.
        sync_while_sampling=False,
    )


def settings_for(wanted: Conventions, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return slime's options for changed conventions; those that it has no option for are left out."""
    kinds = {"gae": "ppo", "returns": "reinforce_plus_plus"}
    found: dict[str, Any] = {}
    for name in changes:
        match name:
            case "token_credit" | "objective" | "ratio_level":
                outcome = {("cispo", "token"): "cispo", ("clip", "sequence"): "gspo", ("clip", "token"): "grpo"}
                kind = outcome.get((str(wanted.objective), wanted.ratio_level), "grpo")
                found["advantage_estimator"] = kinds.get(wanted.token_credit, kind)
            case "advantage_baseline":
                found["rewards_normalization"] = wanted.advantage_baseline == "mean"
            case "advantage_scale":
                found["grpo_std_normalization"] = wanted.advantage_scale == "group"
            case "whitening":
                found["normalize_advantages"] = wanted.whitening == "mean_std"
            case "clip_low" | "clip_high" | "value_clip" if getattr(wanted, name) is None:
                raise NotProvided(f"slime's {SAME[name]} is a number")
            case "discount" | "gae_lambda" | "clip_low" | "clip_high" | "dual_clip" | "entropy_coef" | "value_clip":
                found[SAME[name]] = getattr(wanted, name)
            case "importance_low" | "importance_high" | "temperature":
                found[SAME[name]] = getattr(wanted, name)
            case "aggregation" | "value_aggregation" | "supervised_aggregation":
                found["calculate_per_token_loss"] = wanted.aggregation == "token_mean"
            case "kl_coef":
                found |= {"use_kl_loss": wanted.kl_coef != 0, "kl_loss_coef": wanted.kl_coef}
            case "kl_estimator" | "kl_output_clamp" if wanted.kl_estimator not in ("k1", "k2", "k3"):
                raise NotProvided("slime's kl_loss_type is k1, k2, k3 or low_var_kl")
            case "kl_estimator" | "kl_output_clamp":
                is_clamped = wanted.kl_estimator == "k3" and wanted.kl_output_clamp == 10.0
                found["kl_loss_type"] = "low_var_kl" if is_clamped else wanted.kl_estimator
            case "kl_ratio_weighted":
                found["use_unbiased_kl"] = wanted.kl_ratio_weighted
            case "importance_level" | "importance_mode":
                found["use_tis"] = wanted.importance_level == "token"
                found["custom_tis_function_path"] = ICEPOP if wanted.importance_mode == "mask" else None
            case "old_logprobs":
                found["use_rollout_logprobs"] = wanted.old_logprobs == "sampler"
            case "max_grad_norm":
                found["clip_grad"] = wanted.max_grad_norm or 0.0
    return found


SAME = {
    "discount": "gamma",
    "gae_lambda": "lambd",
    "clip_low": "eps_clip",
    "clip_high": "eps_clip_high",
    "dual_clip": "eps_clip_c",
    "entropy_coef": "entropy_coef",
    "value_clip": "value_clip",
    "importance_low": "tis_clip_low",
    "importance_high": "tis_clip",
    "temperature": "rollout_temperature",
}
