"""OpenRLHF's options, by their dotted names, and the conventions that they make."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.conventions import Aggregation, Baseline, Conventions, Scale
from rlcanary.errors import UserError

# The defaults of openrlhf/cli/train_ppo_ray.py and, of models, of train_sft.py and train_dpo.py, whose parsers cannot be
# imported; the advantage estimator is the one of GRPO.
DEFAULTS: dict[str, Any] = {
    "actor.eps_clip_low_high": (0.2, 0.2),
    "actor.dual_clip": None,
    "actor.policy_loss_type": "ppo",
    "actor.entropy_coef": None,
    "actor.aux_loss_coef": 0.0,
    "actor.max_norm": 1.0,
    "algo.dynamic_filtering_range": (0, 1),
    "algo.kl.init_coef": 0.01,
    "algo.kl.estimator": "k1",
    "algo.kl.use_loss": False,
    "algo.advantage.estimator": "group_norm",
    "algo.advantage.gamma": 1.0,
    "algo.advantage.lambd": 1.0,
    "algo.advantage.no_std_norm": False,
    "algo.advantage.is_correction_enable": False,
    "algo.advantage.is_correction_threshold": (0.5, 5.0),
    "algo.advantage.is_correction_type": "tis",
    "reward.clip_range": (-10.0, 10.0),
    "reward.overlong_buffer_len": None,
    "reward.overlong_penalty_factor": 1.0,
    "reward.stop_properly_penalty_coef": None,
    "ckpt.save_steps": -1,
    "critic.value_clip": 0.5,
    "ds.packing_samples": False,
    "ds.ring_attn_size": 1,
    "ds.tensor_parallel_size": 1,
    "eval.steps": -1,
    "model.aux_loss_coef": 0.0,
    "model.beta": 0.1,
    "model.label_smoothing": 0.0,
    "model.nll_loss_coef": 0.0,
    "rollout.temperature": 1.0,
    "train.async_enable": False,
    "train.colocate_actor_ref": False,
    "train.colocate_all": False,
    "train.colocate_critic_reward": False,
    "train.dynamic_batch_enable": False,
    "train.max_epochs": 1,
    "train.seed": 42,
    "vllm.sync_backend": "nccl",
}
ESTIMATORS: dict[str, tuple[Baseline, Scale]] = {
    "group_norm": ("mean", "group"),
    "dr_grpo": ("mean", "none"),
    "rloo": ("leave_one_out", "none"),
    "gae": ("none", "none"),
    "reinforce": ("none", "none"),
    "reinforce_baseline": ("mean", "none"),
}
SAME = {
    "dual_clip": "actor.dual_clip",
    "kl_coef": "algo.kl.init_coef",
    "entropy_coef": "actor.entropy_coef",
    "overlong_buffer": "reward.overlong_buffer_len",
    "overlong_penalty": "reward.overlong_penalty_factor",
    "gae_lambda": "algo.advantage.lambd",
    "value_clip": "critic.value_clip",
    "preference_beta": "model.beta",
    "preference_label_smoothing": "model.label_smoothing",
    "temperature": "rollout.temperature",
    "epochs_per_rollout": "train.max_epochs",
    "mini_batches": "mini_batches",
}
"""The options that are conventions, by their names there."""
WHITENED = ("gae", "reinforce", "reinforce_baseline")
"""The estimators whose advantages are whitened, and discounted."""


def args_of(settings: Mapping[str, Any]) -> Any:
    """Return the parsed options as OpenRLHF nests them: `args.algo.kl.estimator`."""
    args = SimpleNamespace()
    for name, value in {**DEFAULTS, **settings}.items():
        *groups, option = name.split(".")
        place = args
        for group in groups:
            if not hasattr(place, group):
                setattr(place, group, SimpleNamespace())
            place = getattr(place, group)
        setattr(place, option, value)
    return args


def check_settings(settings: Mapping[str, Any]) -> None:
    """Refuse settings that the conventions cannot express.

    Raises:
        UserError: the conventions cannot express a setting.
    """
    estimator = settings["algo.advantage.estimator"]
    if estimator not in ESTIMATORS:
        raise UserError(f"algo.advantage.estimator={estimator!r}: this adapter knows {', '.join(ESTIMATORS)}")
    correction = settings["algo.advantage.is_correction_type"]
    if settings["algo.advantage.is_correction_enable"]:
        if correction == "seq-mask-tis":
            raise UserError("the conventions cannot express is_correction_type='seq-mask-tis'")
        if correction == "tis" and settings["algo.advantage.is_correction_threshold"][0] > 0:
            raise UserError("the conventions cannot express a lower threshold of 'tis': set it to 0")
        if settings["actor.policy_loss_type"] == "gspo":
            raise UserError("the conventions cannot express 'gspo' with is_correction_enable")


def conventions_of(settings: Mapping[str, Any]) -> Conventions:
    """Translate OpenRLHF's options into conventions."""
    baseline, scale = ESTIMATORS[settings["algo.advantage.estimator"]]
    is_sequence = settings["actor.policy_loss_type"] == "gspo"
    aggregation: Aggregation = "sequence_mean_nonempty" if is_sequence else "token_mean"
    clip_low, clip_high = settings["actor.eps_clip_low_high"]
    low, high = settings["algo.advantage.is_correction_threshold"]
    estimator = settings["algo.advantage.estimator"]
    centred = "mean" if settings["algo.advantage.no_std_norm"] else "mean_std"
    buffer = settings["reward.overlong_buffer_len"]
    return Conventions(
        advantage_baseline=baseline,
        advantage_scale=scale,
        advantage_ddof=1,
        advantage_eps=1e-9,
        advantage_eps_mode="add",
        singleton_group="nan",
        ratio_level="sequence" if is_sequence else "token",
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=settings["actor.dual_clip"],
        log_ratio_clamp=None if is_sequence else 20.0,
        aggregation=aggregation,
        kl_estimator=settings["algo.kl.estimator"],
        kl_coef=settings["algo.kl.init_coef"],
        kl_placement="loss" if settings["algo.kl.use_loss"] else "reward",
        kl_output_clamp=10.0,
        entropy_coef=settings["actor.entropy_coef"] or 0.0,
        importance_level="token" if settings["algo.advantage.is_correction_enable"] else "none",
        importance_mode="mask" if settings["algo.advantage.is_correction_type"] == "icepop" else "truncate",
        importance_low=low,
        importance_high=high,
        overlong_buffer=None if buffer is None else int(buffer),
        overlong_penalty=settings["reward.overlong_penalty_factor"],
        # Also of group_norm: the KL of a token counts for it and those before.
        token_credit="gae" if estimator == "gae" else "returns",
        # The other estimators take 1.
        discount=settings["algo.advantage.gamma"] if estimator in WHITENED else 1.0,
        gae_lambda=settings["algo.advantage.lambd"],
        whitening=centred if estimator in WHITENED else "none",  # type: ignore[arg-type]
        whitening_ddof=0,
        value_clip=settings["critic.value_clip"],
        preference_beta=settings["model.beta"],
        preference_label_smoothing=settings["model.label_smoothing"],
        temperature=settings["rollout.temperature"],
        max_grad_norm=settings["actor.max_norm"] or None,
        old_logprobs="trainer",
        training_dropout=True,
        epochs_per_rollout=settings["train.max_epochs"],
        mini_batches=settings.get("mini_batches", 1),
    )


def settings_for(settings: Mapping[str, Any], conventions: Conventions, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return OpenRLHF's options for changed conventions.

    Raises:
        NotProvided: the adapter knows no such option of OpenRLHF.
    """
    wanted = conventions.replace(**changes)
    result = dict(settings)
    estimators = {ours: theirs for theirs, ours in ESTIMATORS.items() if theirs not in WHITENED}
    advantage = (wanted.advantage_baseline, wanted.advantage_scale)
    for name in changes:
        match name:
            case "advantage_baseline" | "advantage_scale" if advantage in estimators:
                result["algo.advantage.estimator"] = estimators[advantage]
            case "ratio_level" | "aggregation" if (wanted.ratio_level, wanted.aggregation) == ("token", "token_mean"):
                result["actor.policy_loss_type"] = "ppo"
            case "ratio_level" | "aggregation" if (wanted.ratio_level, wanted.aggregation) == (
                "sequence",
                "sequence_mean_nonempty",
            ):
                result["actor.policy_loss_type"] = "gspo"
            case "clip_low" | "clip_high" if wanted.clip_low is not None and wanted.clip_high is not None:
                result["actor.eps_clip_low_high"] = (wanted.clip_low, wanted.clip_high)
            case _ if name in SAME:
                result[SAME[name]] = getattr(wanted, name)
            case "max_grad_norm":
                result["actor.max_norm"] = wanted.max_grad_norm or 0.0
            case "kl_estimator" if wanted.kl_estimator != "abs":
                result["algo.kl.estimator"] = wanted.kl_estimator
            case "kl_placement":
                result["algo.kl.use_loss"] = wanted.kl_placement == "loss"
            case "importance_level" | "importance_mode" | "importance_low" | "importance_high":
                if wanted.importance_level == "sequence":
                    raise NotProvided("this adapter has no setting of OpenRLHF for importance_level='sequence'")
                is_mask = wanted.importance_mode == "mask"
                result |= {
                    "algo.advantage.is_correction_enable": wanted.importance_level == "token",
                    "algo.advantage.is_correction_type": "icepop" if is_mask else "tis",
                    "algo.advantage.is_correction_threshold": (
                        wanted.importance_low if is_mask else 0.0,
                        wanted.importance_high,
                    ),
                }
            case _:
                raise NotProvided(f"this adapter has no setting of OpenRLHF for {name}={changes[name]!r}")
    return result
