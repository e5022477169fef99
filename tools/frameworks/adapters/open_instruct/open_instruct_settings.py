"""open-instruct's options for conventions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.conventions import Conventions

# The estimators of `model_utils.estimate_kl`, by their number.
ESTIMATORS = {0: "k1", 1: "k2", 2: "k3"}


def conventions_of(configs: Any, dpo: Mapping[str, Any]) -> Conventions:
    """Translate a configuration, and the options of DPO, into conventions."""
    from open_instruct.dpo_utils import DPOConfig, DPOLossType

    args, streaming, preference = configs.args, configs.streaming, DPOConfig(**dpo)
    kind = DPOLossType(preference.loss_type)
    is_standard = streaming.advantage_normalization_type == "standard"
    is_token = args.loss_denominator == "token"
    is_masked = args.rho_mask_upper_bound > 0.0
    level = "sequence" if args.rho_mask_sequence_level else "token"
    return Conventions(
        advantage_baseline="mean",
        advantage_scale="group" if is_standard else "none",
        advantage_ddof=0,
        advantage_eps=1e-8,
        mask_truncated=streaming.mask_truncated_completions,
        objective="cispo" if args.loss_fn == "cispo" else "clip",
        clip_low=None if args.loss_fn == "cispo" else args.clip_lower,
        clip_high=args.clip_higher,
        aggregation="token_mean" if is_token else "constant",
        aggregation_constant=1.0,
        kl_estimator=ESTIMATORS[args.kl_estimator],  # type: ignore[arg-type]
        kl_coef=args.beta,
        kl_input_clamp=40.0,
        entropy_coef=0.0,
        # A model of bfloat16 gives logits of bfloat16, which log_softmax leaves as they are.
        logprobs_upcast=False,
        temperature=streaming.temperature,
        old_logprobs="sampler" if args.use_vllm_logprobs else "trainer",
        max_grad_norm=args.max_grad_norm,
        importance_level=level if args.use_rho_correction else "none",  # type: ignore[arg-type]
        importance_mode="mask" if is_masked else "truncate",
        importance_low=args.rho_mask_lower_bound,
        importance_high=args.rho_mask_upper_bound if is_masked else args.rho_clamp_upper_bound,
        evaluation_temperature=streaming.temperature,
        sync_while_sampling=streaming.inflight_updates,
        data_order="shuffled",
        epochs_per_rollout=args.num_epochs,
        mini_batches=args.num_mini_batches,
        schedule_advances="update",
        logged_length="all",
        supervised_aggregation="token_mean",
        preference_beta=preference.beta,
        preference_reference=kind.needs_reference_model,
        preference_length_normalised=kind.is_average_loss,
        preference_margin=preference.beta * preference.gamma_beta_ratio if kind == DPOLossType.simpo else 0.0,
        preference_label_smoothing=preference.label_smoothing,
        buffer_full="refuse",
        long_prompt="drop",
        decayed="all" if args.set_weight_decay_on_bias_and_norm else "matrices",
    )


def settings_for(wanted: Conventions, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return open-instruct's options for changed conventions; those that it has none for are left out."""
    found: dict[str, Any] = {}
    for name in changes:
        value = getattr(wanted, name)
        match name:
            case "advantage_scale" if value != "batch":
                found["advantage_normalization_type"] = "standard" if value == "group" else "centered"
            case "objective":
                found["loss_fn"] = {"clip": "dapo"}.get(str(value), str(value))
            case "clip_low" | "clip_high" if value is None:
                if wanted.objective != "cispo" or name == "clip_high":
                    raise NotProvided(f"open-instruct's {SAME[name]} is a number")
            case "kl_coef":
                found |= {"beta": value, "load_ref_policy": value != 0}
            case "kl_estimator":
                found["kl_estimator"] = {kind: number for number, kind in ESTIMATORS.items()}.get(value)
                if found["kl_estimator"] is None:
                    raise NotProvided("open-instruct's kl_estimator is k1, k2, k3 or k1 times the ratio")
            case "decayed":
                found["set_weight_decay_on_bias_and_norm"] = value == "all"
            case "old_logprobs":
                # Together with its correction open-instruct refuses the sampler's logprobs.
                found["use_vllm_logprobs"] = value == "sampler"
                found |= {"use_rho_correction": False} if value == "sampler" else {}
            case "importance_level" | "importance_mode" | "importance_low" | "importance_high":
                found |= _correction(wanted)
            case _ if name in SAME:
                found[SAME[name]] = value
    return found


def preference_for(wanted: Conventions, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of open-instruct's `DPOConfig` for changed conventions."""
    found: dict[str, Any] = {}
    for name in changes:
        match name:
            case "preference_beta":
                found["beta"] = wanted.preference_beta
            case "preference_label_smoothing":
                found["label_smoothing"] = wanted.preference_label_smoothing
            case "preference_reference" | "preference_length_normalised" | "preference_margin":
                plain = "dpo_norm" if wanted.preference_length_normalised else "dpo"
                found["loss_type"] = plain if wanted.preference_reference else "simpo"
                if not wanted.preference_reference:
                    found["gamma_beta_ratio"] = wanted.preference_margin / wanted.preference_beta
    return found


SAME = {
    "clip_low": "clip_lower",
    "clip_high": "clip_higher",
    "temperature": "temperature",
    "max_grad_norm": "max_grad_norm",
    "epochs_per_rollout": "num_epochs",
    "mini_batches": "num_mini_batches",
    "mask_truncated": "mask_truncated_completions",
}


def _correction(wanted: Conventions) -> dict[str, Any]:
    if wanted.importance_level == "none":
        return {"use_rho_correction": False}
    if wanted.importance_level == "sequence":
        raise NotProvided("the weight of a sequence is the geometric mean of its tokens'")
    is_masked = wanted.importance_mode == "mask"
    return {
        "use_rho_correction": True,
        "rho_clamp_upper_bound": 0.0 if is_masked else wanted.importance_high,
        "rho_mask_upper_bound": wanted.importance_high if is_masked else 0.0,
        "rho_mask_lower_bound": wanted.importance_low if is_masked else 0.0,
    }
