"""AReaL's settings for conventions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.conventions import Conventions

BASELINE = ("advantage_baseline", "advantage_scale", "advantage_ddof", "advantage_eps")


def conventions_of(config: Any, settings: Mapping[str, Any]) -> Conventions:
    """Translate the settings into conventions."""
    from areal.api.cli_args import PPOCriticConfig

    norm, white, correction = config.reward_norm, config.adv_norm, config.rejection_sampling
    levels = {"group": "group", "batch": "batch", None: "none"}
    is_masked = correction is not None and correction.action == "mask"
    return Conventions(
        advantage_baseline=("leave_one_out" if norm.mean_leave1out else "mean") if norm and norm.mean_level else "none",
        advantage_scale=levels[norm.std_level] if norm else "none",  # type: ignore[arg-type]
        advantage_ddof=int(norm.std_unbiased) if norm else 1,
        advantage_eps=norm.eps if norm else 1e-5,
        advantage_std_of_others=False,
        singleton_group="zero",
        reward_clip=config.reward_clip,
        token_credit="gae" if settings.get("gae_lambda") is not None else "outcome",
        discount=config.discount,
        gae_lambda=config.gae_lambda,
        whitening="mean_std" if white else "none",
        whitening_ddof=int(white.std_unbiased) if white else 1,
        overlong_buffer=config.overlong_tokens if config.overlong_reward_penalty else None,
        overlong_penalty=config.overlong_penalty_factor or 1.0,
        objective="sapo" if config.use_sapo_loss else "clip",
        sapo_temperature_positive=config.sapo_tau_pos,
        sapo_temperature_negative=config.sapo_tau_neg,
        ratio_level=config.importance_sampling_level,
        clip_low=config.eps_clip,
        clip_high=config.eps_clip if config.eps_clip_higher is None else config.eps_clip_higher,
        dual_clip=config.c_clip,
        aggregation="token_mean",
        kl_estimator=config.kl_estimator,
        kl_coef=config.kl_ctl,
        kl_placement="reward",
        kl_output_clamp=10.0,
        importance_level=correction.level if correction and config.use_decoupled_loss else "none",
        importance_mode="mask" if is_masked else "truncate",
        importance_low=(correction.lower or 0.0) if correction else 0.0,
        importance_high=correction.upper if correction else 2.0,
        value_clip=settings.get("critic_eps_clip", PPOCriticConfig.eps_clip),
        value_coef=0.5,
        mini_batches=config.ppo_n_minibatches,
        temperature=config.temperature,
        approx_kl_estimator="k1",
        preference_beta=0.1,
    )


def settings_for(wanted: Conventions, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return AReaL's settings for changed conventions; those that it has none for are left out."""
    names = {
        "discount": "discount",
        "clip_low": "eps_clip",
        "dual_clip": "c_clip",
        "kl_estimator": "kl_estimator",
        "kl_coef": "kl_ctl",
        "temperature": "temperature",
        "reward_clip": "reward_clip",
        "mini_batches": "ppo_n_minibatches",
        "value_clip": "critic_eps_clip",
        "ratio_level": "importance_sampling_level",
        "sapo_temperature_positive": "sapo_tau_pos",
        "sapo_temperature_negative": "sapo_tau_neg",
    }
    found: dict[str, Any] = {}
    for name in changes:
        value = getattr(wanted, name)
        match name:
            case "clip_low" | "value_clip" | "reward_clip" if value is None:
                raise NotProvided(f"AReaL's {names[name]} is a number")
            case "clip_high":
                found["eps_clip_higher"] = value
            case "kl_estimator" if value not in ("k1", "k2", "k3"):
                raise NotProvided("AReaL has the estimators k1, k2 and k3")
            case "objective":
                found["use_sapo_loss"] = value == "sapo"
            case "token_credit" | "gae_lambda":
                found["gae_lambda"] = wanted.gae_lambda if wanted.token_credit == "gae" else None
                if wanted.token_credit == "gae":
                    found["reward_norm"] = None
            case "advantage_baseline" | "advantage_scale" if wanted.advantage_scale == "batch":
                raise NotProvided("beside the mean of groups AReaL's batch deviation is that around these means")
            case "advantage_baseline" | "advantage_scale" if wanted.advantage_baseline == "leave_one_out" and (
                wanted.advantage_scale != "none"
            ):
                raise NotProvided("AReaL's deviation is that around the means of the others")
            case "advantage_baseline" | "advantage_scale" | "advantage_ddof":
                found["reward_norm"] = _norm(wanted)
            case "whitening":
                found["adv_norm"] = {} if value == "mean_std" else None
            case "overlong_buffer" | "overlong_penalty":
                found |= {
                    "overlong_reward_penalty": wanted.overlong_buffer is not None,
                    "overlong_tokens": wanted.overlong_buffer,
                    "overlong_penalty_factor": wanted.overlong_penalty,
                }
            case "importance_level" | "importance_mode" | "importance_low" | "importance_high":
                found |= _correction(wanted)
            case _ if name in names:
                found[names[name]] = value
    if found.get("gae_lambda", 0) is None:
        found.pop("gae_lambda")
    return found


def _norm(wanted: Conventions) -> dict[str, Any] | None:
    scale = None if wanted.advantage_scale == "none" else wanted.advantage_scale
    if wanted.advantage_baseline == "none" and scale is None:
        return None
    return {
        "mean_level": None if wanted.advantage_baseline == "none" else "group",
        "mean_leave1out": wanted.advantage_baseline == "leave_one_out",
        "std_level": scale,
        "std_unbiased": wanted.advantage_ddof == 1,
    }


def _correction(wanted: Conventions) -> dict[str, Any]:
    if wanted.importance_level != "token":
        if wanted.importance_level == "sequence":
            raise NotProvided("AReaL's weight of a sequence is the geometric mean of its tokens'")
        return {"use_decoupled_loss": False, "rejection_sampling": None}
    is_masked = wanted.importance_mode == "mask"
    return {
        "use_decoupled_loss": True,
        "rejection_sampling": {
            "level": "token",
            "action": "mask" if is_masked else "clamp",
            "metric": "ratio",
            "upper": wanted.importance_high,
            "lower": wanted.importance_low or None,
        },
    }
