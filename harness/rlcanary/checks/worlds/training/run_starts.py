"""Starts of runs: built states, the tensors that they train, and the learning rates that their settings allow."""

import copy
import math
from typing import Any

import torch
from torch import Tensor

from rlcanary import reference
from rlcanary.checks.worlds.training.states import held, named, own_logprobs, precision, seeded
from rlcanary.checks.worlds.training.tiny_trainer import GROUPS, sampled
from rlcanary.checks.worlds.training.updates import descended
from rlcanary.contract.adapter import Adapter, NotProvided
from rlcanary.contract.batch import CollatedBatch
from rlcanary.contract.layers import copied
from rlcanary.contract.records.building import LoraSettings, RunSettings
from rlcanary.reference.step import forward_mode

LORA = LoraSettings(rank=2, alpha=6.0, targets=("q_proj", "v_proj"))


def built(adapter: Adapter, settings: RunSettings, model: Any) -> Any:
    """Build a state from a copy of this model under a fixed seed."""
    return seeded(adapter.build, settings, copied(model))


def train(adapter: Adapter, state: Any, model: Any, updates: int) -> None:
    """Take updates on a batch that this model sampled."""
    batch = sampled(model, adapter.conventions)
    for _ in range(updates):
        seeded(adapter.train_step, state, copy.deepcopy(batch))


def gap(one: Any, model: Any) -> float:
    """Return the largest difference in nats of a model from another one in its precision, on the tiny trainer's rows."""
    batch, _ = reference.make_batch(GROUPS, 0)
    scores = [own_logprobs(each, batch).double() for each in (one, copied(model).to(precision(one)))]
    return float((scores[0] - scores[1])[batch.completion_mask].abs().max().nan_to_num(math.inf))


def with_gradient(model: Any) -> set[str]:
    """Return the names of the parameters that the logprobs of the tiny trainer's rows depend on."""
    asked, (batch, _) = copied(model), reference.make_batch(GROUPS, 0)
    found = gradients(asked, batch)
    return {name for name, each in found.items() if each.any()}


def gradients(model: Any, batch: CollatedBatch, training: bool = False) -> dict[str, Tensor]:
    """Return the gradient of the sum of a batch's logprobs in each trained parameter, zero where there is none."""
    model.zero_grad()
    with forward_mode(model, training=training):
        logprobs_BT = reference.completion_logprobs(model, batch, 1.0)
    logprobs_BT[batch.completion_mask].sum().backward()
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in named(model).items()
        if parameter.requires_grad
    }


def targets(model: Any, lora: LoraSettings) -> list[torch.nn.Linear]:
    """List the linear layers of a model that adapters are to be put on.

    Raises:
        NotProvided: there is none.
    """
    found = [
        module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in lora.targets and isinstance(module, torch.nn.Linear)
    ]
    if not found:
        raise NotProvided(f"the model has no linear layer named {' or '.join(lora.targets)}")
    return found


def moved_tensors(state: Any) -> dict[str, Tensor]:
    """Return the tensors that a state's optimizer moves, by parameter.

    Raises:
        NotProvided: some of them are neither parameters of the model nor copies of one.
    """
    found, unknown = held(state)
    if unknown:
        raise NotProvided(f"{unknown} tensors of the optimizer are no parameters, nor copies of one")
    return found


def give_gradient(state: Any, name: str, tensor: Tensor, gradient: Tensor) -> None:
    """Give a tensor that a state's optimizer moves a gradient to descend along, and the parameter that it is a copy of.

    Some optimizers read those of the copies, and others fill them from the model's parameters.
    """
    parameters = named(state.model)
    for each in (parameters.get(name, tensor), tensor):
        each.grad = descended(state.optimizer, tensor, gradient.to(each))


def rate_bounds(settings: RunSettings, update: int) -> tuple[float, float]:
    """Return the least and the largest learning rate that an update, counted from 0, may have.

    They are the rates of the declared course when it begins and when it ends. In between lie all that trainers use: a
    warm-up from 0, from 1 / n or from 1 / (n + 1), and a fall that arrives in the last update or behind it.
    """
    ends = [settings.learning_rate * _course(settings, update + each) for each in (0, 1)]
    return min(ends), max(ends)


def _course(settings: RunSettings, time: int) -> float:
    """The share of the peak at a time in updates, from the start of the run on."""
    if time < settings.warmup_updates:
        return time / settings.warmup_updates
    if settings.rate_shape == "constant":
        return 1.0
    left = (settings.total_updates - time) / (settings.total_updates - settings.warmup_updates)
    if settings.rate_shape == "cosine":
        left = math.sin(math.pi / 2 * left) ** 2
    return settings.final_share + (1 - settings.final_share) * left
