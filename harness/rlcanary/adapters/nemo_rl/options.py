"""NeMo RL's settings and the conventions that they mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.conventions import Conventions

# Settings that change the loss in ways that the conventions cannot express.
WITHOUT_WORDS = (
    "disable_ppo_ratio",
    "force_on_policy_ratio",
    "use_on_policy_kl_approximation",
    "positive_example_nll_weight",
)
# What a run has that says nothing else.
POLICY = {
    "max_grad_norm": 1.0,
    "temperature": 1.0,
    "mini_batches": 1,
    "overlong_buffer_length": None,
    "overlong_buffer_penalty": 1.0,
}
# What `AdvEstimatorConfig` has in the examples of trees in which it has no defaults.
ADVANTAGE = {"use_leave_one_out_baseline": True, "normalize_rewards": True}


class Entries(dict[str, Any]):
    """A configuration of which older trees read entries and newer ones attributes."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


def conventions_of(loss: Any, advantage: Any, policy: Mapping[str, Any], kl_score_term: bool = True) -> Conventions:
    """Translate a `ClippedPGLossConfig`, an `AdvEstimatorConfig` and settings of the policy into conventions."""
    level, mode, low, high = "none", "truncate", 0.0, float("inf")
    if loss.use_importance_sampling_correction:
        level = "sequence" if loss.sequence_level_importance_ratios else "token"
        mode = "mask" if loss.truncated_importance_sampling_type == "icepop" else "truncate"
        low = loss.truncated_importance_sampling_ratio_min or 0.0
        high = loss.truncated_importance_sampling_ratio or float("inf")
    is_in_reward = loss.use_kl_in_reward
    return Conventions(
        advantage_baseline="leave_one_out" if advantage.use_leave_one_out_baseline else "mean",
        advantage_scale="group" if advantage.normalize_rewards else "none",
        advantage_ddof=1,
        advantage_eps=1e-6,
        advantage_eps_mode="skip",
        singleton_group="zero",
        objective="cispo" if getattr(loss, "use_cispo", False) else "clip",
        ratio_level="sequence" if loss.sequence_level_importance_ratios else "token",
        clip_low=loss.ratio_clip_min,
        clip_high=loss.ratio_clip_max,
        dual_clip=loss.ratio_clip_c,
        aggregation="token_mean" if loss.token_level_loss else "sequence_mean",
        kl_estimator=loss.reference_policy_kl_type,
        kl_coef=loss.reference_policy_kl_penalty,
        kl_placement="reward" if is_in_reward else "loss",
        kl_input_clamp=loss.kl_input_clamp_value,
        kl_output_clamp=loss.kl_output_clamp_value,
        kl_score_term=kl_score_term,
        importance_level=level,  # type: ignore[arg-type]
        importance_mode=mode,
        importance_low=low,
        importance_high=high,
        # The defaults of `MseValueLossConfig` and `DPOLossConfig`.
        value_coef=0.5,
        preference_beta=0.05,
        old_logprobs="trainer",
        training_dropout=True,
        mini_batches=policy["mini_batches"],
        overlong_buffer=policy["overlong_buffer_length"],
        overlong_penalty=policy["overlong_buffer_penalty"],
        temperature=policy["temperature"],
        max_grad_norm=policy["max_grad_norm"],
    )


def settings_for(
    loss: Mapping[str, Any],
    advantage: Mapping[str, Any],
    policy: Mapping[str, Any],
    conventions: Conventions,
    changes: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return fields of the two configuration classes, and settings of the policy, for changed conventions.

    Raises:
        NotProvided: the adapter knows no such option of NeMo RL.
    """
    wanted = conventions.replace(**changes)
    loss, advantage, policy = dict(loss), dict(advantage), dict(policy)
    for name in changes:
        match name:
            case "advantage_baseline" if wanted.advantage_baseline != "none":
                advantage["use_leave_one_out_baseline"] = wanted.advantage_baseline == "leave_one_out"
            case "advantage_scale" if wanted.advantage_scale != "batch":
                advantage["normalize_rewards"] = wanted.advantage_scale == "group"
            case "objective" if wanted.objective in ("clip", "cispo"):
                loss["use_cispo"] = wanted.objective == "cispo"
            case "ratio_level":
                loss["sequence_level_importance_ratios"] = wanted.ratio_level == "sequence"
            case "clip_low" if wanted.clip_low is not None:
                loss["ratio_clip_min"] = wanted.clip_low
            case "clip_high" if wanted.clip_high is not None:
                loss["ratio_clip_max"] = wanted.clip_high
            case "dual_clip":
                loss["ratio_clip_c"] = wanted.dual_clip
            case "aggregation" if wanted.aggregation in ("token_mean", "sequence_mean"):
                loss["token_level_loss"] = wanted.aggregation == "token_mean"
            case "kl_estimator" if wanted.kl_estimator != "abs":
                loss["reference_policy_kl_type"] = wanted.kl_estimator
            case "kl_coef":
                loss["reference_policy_kl_penalty"] = wanted.kl_coef
            case "kl_placement":
                loss["use_kl_in_reward"] = wanted.kl_placement == "reward"
            case "kl_input_clamp":
                loss["kl_input_clamp_value"] = wanted.kl_input_clamp
            case "kl_output_clamp":
                loss["kl_output_clamp_value"] = wanted.kl_output_clamp
            case "temperature" | "max_grad_norm" | "mini_batches":
                policy[name] = changes[name]
            case "overlong_buffer" | "overlong_penalty":
                policy |= {
                    "overlong_buffer_length": wanted.overlong_buffer,
                    "overlong_buffer_penalty": wanted.overlong_penalty,
                }
            case "importance_level" | "importance_mode" | "importance_low" | "importance_high":
                loss |= _correction_for(wanted)
            case _:
                raise NotProvided(f"this adapter has no setting of NeMo RL for {name}={changes[name]!r}")
    if wanted.ratio_level == "sequence" and wanted.aggregation != "sequence_mean":
        raise NotProvided("sequence_level_importance_ratios excludes token_level_loss")
    if wanted.objective == "cispo" and (wanted.aggregation != "token_mean" or wanted.dual_clip is not None):
        raise NotProvided("use_cispo needs token_level_loss and excludes ratio_clip_c")
    return loss, advantage, policy


def _correction_for(wanted: Conventions) -> dict[str, Any]:
    if wanted.importance_level == "none":
        return {"use_importance_sampling_correction": False, "truncated_importance_sampling_type": None}
    if wanted.importance_level != wanted.ratio_level:
        raise NotProvided("the correction is at the level of the importance ratio")
    is_mask = wanted.importance_mode == "mask"
    return {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "icepop" if is_mask else "tis",
        "truncated_importance_sampling_ratio": wanted.importance_high,
        "truncated_importance_sampling_ratio_min": wanted.importance_low if is_mask else None,
    }
