"""What an optimizer update has to be, and what one was seen to be. Snippets import these names."""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from rlcanary import reference
from rlcanary.batch import CollatedBatch
from rlcanary.checks.training import named
from rlcanary.conventions import Conventions


@dataclass(frozen=True)
class Declared:
    """What an update has to be.

    Attributes:
        gradients: of each parameter, clipped as declared, float64.
        metrics: what it logs, the learning rate apart.
    """

    gradients: dict[str, Tensor]
    metrics: dict[str, float]


def declared(model: Any, ref_model: Any, batch: CollatedBatch, conventions: Conventions) -> Declared:
    """The update that the conventions declare, by the reference in float64."""
    exact, exact_ref = copy.deepcopy((model, ref_model))
    exact = exact.double()
    exact_ref = None if exact_ref is None else exact_ref.double()
    # Scoring knows no dropout, and an update with it has no one gradient.
    conventions = conventions.replace(training_dropout=False)
    output = reference.policy_loss(reference.policy_batch(exact, exact_ref, _double(batch), conventions), conventions)
    parameters = dict(_trainable(exact))
    found = torch.autograd.grad(output.loss, list(parameters.values()), allow_unused=True)
    gradients = {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(parameters.items(), found, strict=True)
    }
    norm = _norm(gradients)
    if conventions.max_grad_norm is not None and norm > conventions.max_grad_norm:
        gradients = {name: gradient * conventions.max_grad_norm / norm for name, gradient in gradients.items()}
    metrics = {
        **output.metrics,
        "grad_norm": norm,
        "reward": float(batch.rewards.double().mean()),
        "tokens": float(batch.attention_mask.sum()),
    }
    return Declared(gradients, metrics)


@dataclass(frozen=True)
class Update:
    """One step of an optimizer: the gradients that it was given, by parameter, and its learning rates, by group."""

    gradients: dict[str, Tensor]
    learning_rates: tuple[float, ...]


class Watch:
    """What the optimizer of a state does from now on.

    Attributes:
        updates: its steps.
        before: the parameters as they were, float64.
    """

    def __init__(self, state: Any) -> None:
        self.updates: list[Update] = []
        self._model = state.model
        self._twin = copy.deepcopy((state.model, state.optimizer))
        self.before = self._parameters()
        state.optimizer.register_step_pre_hook(self._note)

    def driven(self) -> list[str]:
        """The parameters that were given a gradient other than zero."""
        return [name for name in self.before if any(update.gradients[name].any() for update in self.updates)]

    def standing_still(self) -> list[str]:
        """The parameters that were given a gradient other than zero and are where they were."""
        after = self._parameters()
        return [name for name in self.driven() if torch.equal(after[name], self.before[name])]

    def astray(self) -> list[str]:
        """The parameters that are not where the optimizer, given these gradients, takes them in exact arithmetic."""
        after, asked = self._parameters(), self._replayed()
        return [
            name
            for name, before in self.before.items()
            if not torch.allclose(after[name] - before, asked[name] - before, rtol=1e-3, atol=1e-6)
        ]

    def share_moved(self) -> float:
        """How far the parameters moved, as a share of what the optimizer asks for in exact arithmetic."""
        after, asked = self._parameters(), self._replayed()
        wanted = torch.cat([(asked[name] - before).flatten() for name, before in self.before.items()])
        moved = torch.cat([(after[name] - before).flatten() for name, before in self.before.items()])
        return float((moved * wanted.sign()).sum() / wanted.abs().sum())

    def _replayed(self) -> dict[str, Tensor]:
        model, optimizer = copy.deepcopy(self._twin)
        parameters = dict(_trainable(model))
        for parameter in parameters.values():
            parameter.data = parameter.data.double()
        for update in self.updates:
            for name, parameter in parameters.items():
                parameter.grad = update.gradients[name].double()
            for group, learning_rate in zip(optimizer.param_groups, update.learning_rates, strict=True):
                group["lr"] = learning_rate
            optimizer.step()
        return {name: parameter.detach() for name, parameter in parameters.items()}

    def _parameters(self) -> dict[str, Tensor]:
        return {name: parameter.detach().double().clone() for name, parameter in _trainable(self._model)}

    def _note(self, optimizer: Any, *_: Any) -> None:
        gradients = {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()
            for name, parameter in _trainable(self._model)
        }
        self.updates.append(Update(gradients, tuple(float(group["lr"]) for group in optimizer.param_groups)))


def gradients_of(adapter: Any, state: Any, batch: CollatedBatch) -> dict[str, Tensor]:
    """The gradients that the optimizer is given when the adapter trains on a batch."""
    watch = Watch(state)
    adapter.train_step(state, batch)
    return watch.updates[-1].gradients


def _trainable(model: Any) -> Iterator[tuple[str, Tensor]]:
    return ((name, parameter) for name, parameter in named(model).items() if parameter.requires_grad)


def _norm(gradients: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))


def _double(batch: CollatedBatch) -> CollatedBatch:
    exact: dict[str, Any] = {
        field.name: getattr(batch, field.name).double()
        for field in fields(batch)
        if isinstance(getattr(batch, field.name), Tensor) and getattr(batch, field.name).is_floating_point()
    }
    return replace(batch, **exact)
