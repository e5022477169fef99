"""Advantages and the loss of prime-rl in trees that have no algorithms yet, and no weights of the loss's components."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcanary.adapters.frameworks import has_part, part, takes
from rlcanary.adapters.prime_rl.services import SERVICES
from rlcanary.adapters.stubs import absent
from rlcanary.contract.adapter import NotProvided

if TYPE_CHECKING:
    from torch import Tensor

ADVANTAGE = "prime_rl.orchestrator.advantage"
LOSS = "prime_rl.trainer.rl.loss"
# The options of February 2026 that mask tokens and rows by their ratios, without bounds.
OFF = {
    **dict.fromkeys(("token_mask_low", "geo_mask_low", "sequence_mask_low"), 0.0),
    **dict.fromkeys(("token_mask_high", "geo_mask_high", "sequence_mask_high"), float("inf")),
    "kl_tau": 0.0,
}


def advantages_of(rewards: Tensor) -> list[float]:
    """Run the default advantage function on a group of completions of one token."""
    lengths = rewards.new_ones(len(rewards)).long()
    with absent(*SERVICES):
        if has_part(f"{ADVANTAGE}:compute_advantage_drgrpo"):
            return _listed(part(f"{ADVANTAGE}:compute_advantage_drgrpo")(rewards, lengths))
        inputs = part(f"{ADVANTAGE}:AdvantageInputs")
    if "rollouts" in {field.name for field in dataclasses.fields(inputs)}:
        given = inputs(rollouts=[[{"reward": reward} for reward in rewards.tolist()]])
    else:
        given = inputs(rewards=rewards.unsqueeze(0), completion_lengths=lengths.unsqueeze(0))
    return _listed(part(f"{ADVANTAGE}:default_advantage_fn")(given).advantages[0])


def _listed(advantages: Tensor) -> list[float]:
    return advantages.tolist()


def has_components() -> bool:
    """Tell whether the loss has components with weights of their own."""
    return takes(part(f"{LOSS}:compute_loss"), "rl_loss_fn")


def require_components() -> None:
    """Decline a tree whose loss has no components."""
    if not has_components():
        raise NotProvided("the loss of this tree has no components")


def holds_its_ratio() -> bool:
    """Tell whether the default loss multiplies logprobs by ratios that carry no gradient."""
    return has_part(f"{LOSS}:setup_loss_fn")


def ranks_divide_alone() -> bool:
    """Tell whether each rank divides by its own number of tokens, before FSDP averages over the ranks."""
    spec = importlib.util.find_spec("prime_rl.trainer.rl.train")
    return spec is not None and "all_reduce(global_" not in Path(str(spec.origin)).read_text()


def loss_of(given: dict[str, Any], scale: int, options: dict[str, float]) -> Tensor:
    """Compute the loss of a tree that has a loss function for each mode of training, or one alone.

    Args:
        given: logprobs, advantages and masks of the rows.
        scale: the number by which the sum is divided.
        options: of the default loss that has modes.
    """
    if holds_its_ratio():
        made = {"loss_fn": part(f"{LOSS}:setup_loss_fn")(part("prime_rl.trainer.rl.config:LossConfig")(**OFF))}
    else:
        config = part("prime_rl.configs.trainer:DefaultLossConfig")(**options)
        made = {"loss_fns": part(f"{LOSS}:setup_loss_fns")(config)}
    loss, _ = part(f"{LOSS}:compute_loss")(**given, teacher_logprobs=None, **made, loss_scale=scale)
    return loss  # type: ignore[no-any-return]
