"""SkyRL's settings in the words of the conventions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.conventions import (
    Aggregation,
    Baseline,
    Conventions,
    ImportanceLevel,
    Objective,
    TokenCredit,
)
from rlcanary.errors import UserError

REDUCTIONS: dict[str, Aggregation] = {
    "token_mean": "token_mean",
    "sequence_mean": "sequence_mean",
    "seq_mean_token_sum_norm": "constant",
    "prompt_mean": "group_token_mean",
}
LOSSES: dict[str, Objective] = {
    "regular": "clip",
    "dual_clip": "clip",
    "gspo": "clip",
    "cispo": "cispo",
    "sapo": "sapo",
}
ESTIMATORS: dict[str, tuple[TokenCredit, Baseline]] = {
    "grpo": ("outcome", "mean"),
    "rloo": ("outcome", "leave_one_out"),
    "reinforce++": ("returns", "none"),
    "gae": ("gae", "none"),
}


def conventions_of(algorithm: Any, max_grad_norm: float, epochs: int, mini_batches: int) -> Conventions:
    """Translate an `AlgorithmConfig` into conventions.

    Raises:
        UserError: the conventions cannot express a setting.
    """
    tables: dict[str, Mapping[str, Any]] = {
        "policy_loss_type": LOSSES,
        "loss_reduction": REDUCTIONS,
        "advantage_estimator": ESTIMATORS,
    }
    for name, known in tables.items():
        if getattr(algorithm, name) not in known:
            raise UserError(f"{name}={getattr(algorithm, name)!r}: this adapter knows {', '.join(known)}")
    loss = algorithm.policy_loss_type
    credit, baseline = ESTIMATORS[algorithm.advantage_estimator]
    is_scaled = algorithm.advantage_estimator == "grpo" and algorithm.grpo_norm_by_std
    bounds = (
        (algorithm.cispo.cispo_eps_clip_low, algorithm.cispo.cispo_eps_clip_high)
        if loss == "cispo"
        else (algorithm.eps_clip_low, algorithm.eps_clip_high)
    )
    correction = algorithm.off_policy_correction
    level: ImportanceLevel = correction.tis_ratio_type or "none"
    is_k3 = algorithm.kl_estimator_type == "k3"
    return Conventions(
        advantage_baseline=baseline,
        advantage_scale="group" if is_scaled else "none",
        singleton_group="reward" if algorithm.advantage_estimator == "grpo" else "zero",
        objective=LOSSES[loss],
        ratio_level="sequence" if loss == "gspo" else "token",
        sapo_temperature_positive=algorithm.sapo.tau_pos,
        sapo_temperature_negative=algorithm.sapo.tau_neg,
        clip_low=bounds[0],
        clip_high=bounds[1],
        dual_clip=algorithm.clip_ratio_c if loss == "dual_clip" else None,
        log_ratio_clamp=None if loss == "gspo" else 20.0,
        aggregation=REDUCTIONS[algorithm.loss_reduction],
        aggregation_constant=float(algorithm.max_seq_len or 1),
        kl_aggregation="sequence_mean",
        entropy_aggregation="token_mean",
        kl_estimator=algorithm.kl_estimator_type,
        kl_coef=algorithm.kl_loss_coef if algorithm.use_kl_loss or algorithm.use_kl_in_reward else 0.0,
        kl_placement="reward" if algorithm.use_kl_in_reward else "loss",
        kl_input_clamp=20.0 if is_k3 else None,
        kl_output_clamp=10.0 if is_k3 else None,
        entropy_coef=algorithm.entropy_loss_coef if algorithm.use_entropy_loss else 0.0,
        logprobs_upcast=False,
        temperature=algorithm.temperature,
        old_logprobs="trainer",
        training_dropout=True,
        max_grad_norm=max_grad_norm,
        importance_level=level,
        importance_high=(
            correction.sequence_tis_ratio_clip_high if level == "sequence" else correction.token_tis_ratio_clip_high
        ),
        sync_while_sampling=False,
        answer_taken="first",
        epochs_per_rollout=epochs,
        mini_batches=mini_batches,
        token_credit=credit,
        discount=algorithm.gamma,
        gae_lambda=algorithm.lambd,
        whitening="mean_std" if credit in ("returns", "gae") else "none",
        value_clip=algorithm.value_clip,
        value_aggregation="sequence_mean",
        value_coef=0.5,
    )


def settings_for(settings: Mapping[str, Any], declared: Conventions, wanted: Conventions, names: Any) -> dict[str, Any]:
    """Return the fields of `AlgorithmConfig` for changed conventions, nested ones with dots.

    Raises:
        NotProvided: the adapter knows no such option of SkyRL.
    """
    result = dict(settings)
    for name in names:
        if getattr(wanted, name) != getattr(declared, name):
            result |= _fields(name, wanted)
    return result


def _fields(name: str, wanted: Conventions) -> dict[str, Any]:
    value = getattr(wanted, name)
    match name:
        case "objective" | "ratio_level" | "dual_clip" if (loss := _loss(wanted)) is not None:
            dual = {} if wanted.dual_clip is None else {"clip_ratio_c": wanted.dual_clip}
            return {"policy_loss_type": loss, **_bounds(wanted, loss), **dual}
        case "clip_low" | "clip_high" if wanted.clip_low is not None and wanted.clip_high is not None:
            return _bounds(wanted, _loss(wanted) or "regular")
        case "sapo_temperature_positive":
            return {"sapo.tau_pos": value}
        case "sapo_temperature_negative":
            return {"sapo.tau_neg": value}
        case "aggregation" | "aggregation_constant" if wanted.aggregation in REDUCTIONS.values():
            reduction = {ours: theirs for theirs, ours in REDUCTIONS.items()}[wanted.aggregation]
            limit = {"max_seq_len": wanted.aggregation_constant} if wanted.aggregation == "constant" else {}
            return {"loss_reduction": reduction, **limit}
        case "token_credit" | "advantage_baseline" | "advantage_scale" | "whitening":
            return _estimator(wanted)
        case "kl_coef" | "kl_placement":
            in_reward = wanted.kl_placement == "reward"
            return {"kl_loss_coef": wanted.kl_coef, "use_kl_in_reward": in_reward, "use_kl_loss": not in_reward}
        case "kl_estimator" | "kl_input_clamp" | "kl_output_clamp" if isinstance(wanted.kl_estimator, str):
            return {"kl_estimator_type": wanted.kl_estimator}
        case "entropy_coef":
            return {"use_entropy_loss": value != 0, "entropy_loss_coef": value}
        case "temperature":
            return {"temperature": value}
        case "importance_low" if wanted.importance_mode == "truncate":
            return {}
        case "importance_level" | "importance_high" if wanted.importance_mode == "truncate":
            level = wanted.importance_level
            high = (
                {f"off_policy_correction.{level}_tis_ratio_clip_high": wanted.importance_high}
                if level != "none"
                else {}
            )
            return {"off_policy_correction.tis_ratio_type": None if level == "none" else level, **high}
        case "discount":
            return {"gamma": value}
        case "gae_lambda":
            return {"lambd": value}
        case "value_clip":
            return {"value_clip": value}
        case "epochs_per_rollout":
            return {"update_epochs_per_batch": value}
        case "mini_batches":
            return {"mini_batches": value}
    raise NotProvided(f"this adapter has no setting of SkyRL for {name}={value!r}")


def _loss(wanted: Conventions) -> str | None:
    match wanted.objective, wanted.ratio_level:
        case "clip", "token":
            return "regular" if wanted.dual_clip is None else "dual_clip"
        case "clip", "sequence":
            return "gspo" if wanted.dual_clip is None else None
        case ("cispo" | "sapo") as name, "token":
            return name
    return None


def _bounds(wanted: Conventions, loss: str) -> dict[str, Any]:
    names = (
        ("cispo.cispo_eps_clip_low", "cispo.cispo_eps_clip_high")
        if loss == "cispo"
        else ("eps_clip_low", "eps_clip_high")
    )
    return dict(zip(names, (wanted.clip_low, wanted.clip_high), strict=True))


def _estimator(wanted: Conventions) -> dict[str, Any]:
    is_white = wanted.whitening == "mean_std"
    match wanted.token_credit, wanted.advantage_baseline, wanted.advantage_scale:
        case "outcome", "mean", ("group" | "none") as scale if not is_white:
            return {"advantage_estimator": "grpo", "grpo_norm_by_std": scale == "group"}
        case "outcome", "leave_one_out", "none" if not is_white:
            return {"advantage_estimator": "rloo"}
        case "returns", "none", "none" if is_white:
            return {"advantage_estimator": "reinforce++"}
        case "gae", "none", "none" if is_white:
            return {"advantage_estimator": "gae"}
    raise NotProvided("SkyRL has no such advantage estimator")
