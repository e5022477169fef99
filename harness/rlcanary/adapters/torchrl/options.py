"""torchrl's settings in the words of the conventions, and the losses that some of them make."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.conventions import Aggregation, Conventions, ScheduleAdvances, TokenAggregation

if TYPE_CHECKING:
    from torch import Tensor

AGGREGATIONS: dict[str, Aggregation] = {"token_mean": "token_mean", "prompt_mean": "sequence_mean"}
SUPERVISED: dict[tuple[str, bool], TokenAggregation] = {("mean", True): "sequence_mean", ("sum", False): "token_sum"}
"""By `reduction` and `normalize_by_seq_length`."""
TRAINER: dict[str, Any] = {"num_epochs": 1, "mini_batches": 1, "interval": "batch"}
INTERVALS: dict[str, ScheduleAdvances] = {"optim": "update", "batch": "rollout"}


def advantage_words() -> dict[str, Any]:
    """Say in the words of the conventions how `MCAdvantage` divides."""
    return {
        "advantage_ddof": 1,
        "advantage_eps": 1e-6,
        "advantage_eps_mode": "clamp",
        "singleton_group": "nan",
    }


def loss_words(loss: Any) -> dict[str, Any]:
    """Translate a `GRPOLoss`, or one that derives from it, into conventions."""
    return {
        "objective": "cispo" if type(loss).__name__ == "CISPOLoss" else "clip",
        "clip_low": exact(loss.clip_epsilon_low),
        "clip_high": exact(loss.clip_epsilon_high),
        "aggregation": AGGREGATIONS[loss.aggregation],
        "kl_estimator": "k3",
        "kl_coef": loss.kl_to_ref_coeff or 0.0,
        "entropy_coef": loss.entropy_coeff if loss.entropy_bonus else 0.0,
        "logprobs_upcast": False,
        "old_logprobs": "sampler",
    }


def exact(buffer: Tensor) -> float:
    """Return the intended number of a float32: 0.2, not 0.20000000298."""
    return float(f"{float(buffer):.6g}")


def gae_defaults() -> dict[str, Any]:
    """Return the settings of GAE that torchrl's losses make it with."""
    from torchrl.objectives.utils import ValueEstimators, default_value_kwargs

    kwargs = default_value_kwargs(ValueEstimators.GAE)
    return {"gamma": kwargs["gamma"], "lmbda": kwargs["lmbda"], "average_gae": False}


def new_critic_loss(settings: dict[str, Any], values: Any = None) -> Any:
    """Make a PPO loss that is asked for its critic's part alone.

    Args:
        settings: keyword arguments of `ClipPPOLoss`.
        values: the critic's output; None where it is not asked.
    """
    from tensordict.nn import TensorDictModule
    from torchrl.objectives import ClipPPOLoss

    actor = TensorDictModule(lambda _: values, in_keys=["state"], out_keys=["action"])  # is never called
    critic = TensorDictModule(lambda _: values, in_keys=["state"], out_keys=["state_value"])
    return ClipPPOLoss(actor, critic, functional=False, **{"loss_critic_type": "l2", **settings})


def new_supervised_loss(settings: dict[str, Any], actor: Any) -> Any:
    """Make a supervised loss on rows whose tokens and masks are given."""
    from torchrl.objectives.llm import SFTLoss

    return SFTLoss(actor, tokenizer=object(), **settings)


def settings_for(settings: dict[str, Any], declared: Conventions, wanted: Conventions, names: Any) -> dict[str, Any]:
    """Return the adapter's arguments for changed conventions.

    Raises:
        NotProvided: the adapter knows no such option of torchrl.
    """
    result = {name: dict(value) if isinstance(value, dict) else value for name, value in settings.items()}
    if wanted.token_credit != declared.token_credit:
        if wanted.token_credit not in ("outcome", "gae"):
            raise NotProvided(f"torchrl has no advantages of the kind {wanted.token_credit!r}")
        result["estimator"] = gae_defaults() if wanted.token_credit == "gae" else None
    for name in names:
        if name != "token_credit":
            _apply(result, name, declared, wanted)
    return result


def _apply(result: dict[str, Any], name: str, declared: Conventions, wanted: Conventions) -> None:
    value = getattr(wanted, name)
    estimator = result["estimator"]
    match name:
        case "clip_low" | "clip_high" if wanted.clip_low is not None and wanted.clip_high is not None:
            result["loss"]["clip_epsilon"] = (wanted.clip_low, wanted.clip_high)
        case "aggregation" if value in AGGREGATIONS.values():
            result["loss"]["aggregation"] = {ours: theirs for theirs, ours in AGGREGATIONS.items()}[value]
        case "objective" if value in ("clip", "cispo"):
            result["loss_class"] = "CISPOLoss" if value == "cispo" else "GRPOLoss"
        case "kl_coef":
            result["loss"]["kl_to_ref_coeff"] = value
        case "entropy_coef":
            result["loss"] |= {"entropy_bonus": value != 0, "entropy_coeff": value}
        case "discount" if estimator is not None:
            estimator["gamma"] = value
        case "gae_lambda" if estimator is not None:
            estimator["lmbda"] = value
        case "whitening" if estimator is not None and value in ("none", "mean_std"):
            estimator["average_gae"] = value == "mean_std"
        case "value_clip":
            result["critic"]["clip_value"] = value
        case "value_coef":
            result["critic"]["critic_coeff"] = value
        case "epochs_per_rollout":
            result["trainer"]["num_epochs"] = value
        case "mini_batches":
            result["trainer"]["mini_batches"] = value
        case "schedule_advances":
            result["trainer"]["interval"] = {ours: theirs for theirs, ours in INTERVALS.items()}[value]
        case "supervised_aggregation" if value in SUPERVISED.values():
            reduction, is_normalized = {ours: theirs for theirs, ours in SUPERVISED.items()}[value]
            result["supervised"] |= {"reduction": reduction, "normalize_by_seq_length": is_normalized}
        case _ if value != getattr(declared, name):
            raise NotProvided(f"this adapter has no setting of torchrl for {name}={value!r}")
