"""Mistakes in advantages, logprobs and entropies."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rlcanary.bugs.mistakes.planting import Function, Patches
from rlcanary.contract.conventions import Conventions

SCORING = ("token_logprobs", "completion_logprobs", "completion_scores", "packed_logprobs")


def _at_temperature(change: Callable[[float], float]) -> Patches:
    """Patch all scoring to another temperature."""

    def patch(exact: Function) -> Function:
        return lambda model, batch, temperature=1.0: exact(model, batch, change(temperature))

    return {f"logprobs.{name}": patch for name in SCORING}


def _grouped(change: Callable[[Tensor, Tensor], Tensor]) -> Patches:
    """Patch the advantages to be taken over other groups, made from the rewards and the group ids."""
    return {
        "advantages.advantages": lambda exact: (
            lambda rewards, groups, *rest: exact(rewards, change(rewards, groups), *rest)
        )
    }


def _rewarded(change: Callable[[Tensor], Tensor]) -> Patches:
    return {"advantages.advantages": lambda exact: lambda rewards, groups, *rest: exact(change(rewards), groups, *rest)}


def _advantages(change: Callable[[Tensor], Tensor]) -> Patches:
    return {"advantages.advantages": lambda exact: lambda *given: change(exact(*given))}


def _less_scaled_mean(exact: Function) -> Function:
    """Divide the mean of the group, not the centred reward, by the standard deviation."""

    def advantages(rewards_G: Tensor, weights_G: Tensor, batch_std: Tensor, conventions: Conventions) -> Tensor:
        centred_G: Tensor = exact(rewards_G, weights_G, batch_std, conventions.replace(advantage_scale="none"))
        if conventions.advantage_scale == "none":
            return centred_G
        std = batch_std
        if conventions.advantage_scale == "group":
            ddof = conventions.advantage_ddof
            std = rewards_G.std(correction=ddof) if len(rewards_G) > ddof else torch.zeros_like(batch_std)
        return rewards_G - (rewards_G - centred_G) / (std + conventions.advantage_eps)

    return advantages


def _slices_of_one_size(_: Tensor, groups_B: Tensor) -> Tensor:
    size = int(groups_B.unique(return_counts=True)[1].max())
    return torch.arange(len(groups_B)) // size


# Each mistake patches functions of the oracle by name.
SIGNAL_MISTAKES: dict[str, Patches] = {
    "the advantages have the wrong sign": {"advantages.advantages": lambda exact: lambda *given: -exact(*given)},
    "the advantages are taken over the whole batch, not over groups": {
        "advantages.advantages": lambda exact: (
            lambda rewards, groups, *rest: exact(rewards, torch.zeros_like(groups), *rest)
        )
    },
    "the mean alone is divided by the standard deviation, not the reward less the mean": {
        "advantages._group_advantages": _less_scaled_mean
    },
    "each completion is a group of its own": _grouped(lambda rewards, _: torch.arange(len(rewards))),
    "groups are taken by position: rows are not sorted by group first": _grouped(
        lambda _, groups: groups.sort().values
    ),
    "groups are slices of one size": _grouped(_slices_of_one_size),
    "the advantages are squared": _advantages(Tensor.square),
    "the sign of the advantages is lost": _advantages(Tensor.abs),
    "only the sign of the advantages is kept": _advantages(Tensor.sign),
    "the advantages are clipped to 1": _advantages(lambda value: value.clamp(-1, 1)),
    "the advantages are those of the previous row": _advantages(lambda value: value.roll(1)),
    "the advantages are those of the next row": _advantages(lambda value: value.roll(-1)),
    "the rewards are rounded to whole numbers": _rewarded(lambda value: value.trunc()),
    "the rewards are taken as right or wrong": _rewarded(lambda value: (value > 0).to(value.dtype)),
    "negative rewards count as 0": _rewarded(lambda value: value.clamp(min=0)),
    "missing rewards count as 0": _rewarded(lambda value: value.nan_to_num(0)),
    "the rewards are normalised over the batch first": _rewarded(
        lambda value: (value - value.nanmean()) / value[~value.isnan()].std() if len(value) > 1 else value
    ),
    "the temperature is left out": _at_temperature(lambda _: 1.0),
    "the logits are multiplied by the temperature": _at_temperature(lambda temperature: 1 / temperature),
    "the logits are divided by the temperature twice": _at_temperature(lambda temperature: temperature**2),
    "the logprobs are one position late": {
        "logprobs.token_logprobs": lambda exact: lambda logits, ids, *rest: exact(logits.roll(1, dims=1), ids, *rest)
    },
    "the logprobs are one position early": {
        "logprobs.token_logprobs": lambda exact: lambda logits, ids, *rest: exact(logits.roll(-1, dims=1), ids, *rest)
    },
    "the logits are taken for logprobs": {
        "logprobs.token_logprobs": lambda _: (
            lambda logits, ids, *rest: (logits.float() / (rest[0] if rest else 1)).gather(-1, ids[..., None])[..., 0]
        )
    },
    "probabilities are taken for logprobs": {
        "logprobs.token_logprobs": lambda exact: lambda *given: exact(*given).exp()
    },
    "the entropy has the wrong unit: bits": {
        "logprobs.entropy": lambda exact: lambda *given: exact(*given) / math.log(2)
    },
}
