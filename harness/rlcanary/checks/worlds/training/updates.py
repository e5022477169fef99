"""Declared and observed optimizer updates."""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from rlcanary import reference
from rlcanary.checks.closeness import close
from rlcanary.checks.worlds.training.states import held, named, own_logprobs, precision, unwrapped
from rlcanary.contract.batch import CollatedBatch
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.layers import copied


@dataclass(frozen=True)
class Declared:
    """Gradients and metrics that an update must have.

    Attributes:
        gradients: gradient of each parameter, clipped as declared, float64.
        metrics: its logged metrics, except for the learning rate.
    """

    gradients: dict[str, Tensor]
    metrics: dict[str, float]


def declared(model: Any, ref_model: Any, batch: CollatedBatch, conventions: Conventions) -> Declared:
    """Compute the update that the conventions declare for this model, with the reference in float64.

    The ratios to the sampler and to the reference model are those of the models in their own precision: in bfloat16
    logprobs are some hundredths off, and a correct trainer clips, and takes the KL, by its own values.

    Args:
        model: the policy as the state holds it, wrapped and rounded as it is. It is left as it is.
        ref_model: the reference model, or None.
        batch: the batch to train on.
        conventions: all of them are used. With `training_dropout` a model that drops out has a random gradient.
    """
    exact, exact_ref = copied((unwrapped(model), unwrapped(ref_model)))
    exact = exact.double().cpu()
    exact_ref = None if exact_ref is None else exact_ref.double().cpu()
    exact_batch, temperature = _double(batch), conventions.temperature
    if precision(model) not in (torch.float32, torch.float64):
        rounding_BT = own_logprobs(exact, batch, temperature) - own_logprobs(model, batch, temperature)
        if exact_batch.old_logprobs is not None:
            exact_batch = replace(exact_batch, old_logprobs=exact_batch.old_logprobs + rounding_BT)
        ref_logprobs_BT = batch.ref_logprobs
        if ref_logprobs_BT is None and ref_model is not None:
            ref_logprobs_BT = own_logprobs(ref_model, batch, temperature)
        if ref_logprobs_BT is not None:
            exact_batch = replace(exact_batch, ref_logprobs=ref_logprobs_BT + rounding_BT)
    output = reference.policy_loss(reference.policy_batch(exact, exact_ref, exact_batch, conventions), conventions)
    parameters = dict(_trainable(exact))
    found = torch.autograd.grad(output.loss, list(parameters.values()), allow_unused=True)
    gradients = {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(parameters.items(), found, strict=True)
    }
    norm = gradient_norm(gradients)
    if conventions.max_grad_norm is not None and norm > conventions.max_grad_norm:
        gradients = {name: gradient * conventions.max_grad_norm / norm for name, gradient in gradients.items()}
    metrics = {
        **output.metrics,
        "loss": float(output.loss.detach()),
        "grad_norm": norm,
        "reward": float(batch.rewards.double().mean()),
        "tokens": float(batch.attention_mask.sum()),
    }
    return Declared(gradients, metrics)


@dataclass(frozen=True)
class Update:
    """One optimizer step: its gradients by parameter, and its learning rates by group."""

    gradients: dict[str, Tensor]
    learning_rates: tuple[float, ...]


def _copied(optimizer: Any) -> Any:
    """Copy an optimizer with the attributes of its own class, which torch's copy leaves out."""
    memo: dict[int, Any] = {}
    twin = copy.deepcopy(optimizer, memo)
    for name, value in vars(optimizer).items():
        if name not in vars(twin) and not callable(value):
            setattr(twin, name, copy.deepcopy(value, memo))
    return twin


class Watch:
    """Recorder of the steps of a state's optimizer.

    Attributes:
        updates: its steps.
        before: the model's parameters as they were, float64.
        held: the tensors that the optimizer moves, by the name of the model's parameter that each is, or is a copy of.
        unknown: number of the optimizer's tensors that are neither.
    """

    def __init__(self, state: Any) -> None:
        self.updates: list[Update] = []
        self._state = state
        self._twin = _copied(state.optimizer)
        self.held, self.unknown = held(state)
        places = {id(tensor): place for place, tensor in enumerate(_moved(state.optimizer))}
        self._places = {name: places[id(tensor)] for name, tensor in self.held.items()}
        self._parameters_at_start = named(state.model)
        self.before = _values(self._parameters_at_start)
        self._started = _values(self.held)
        self._copies = {name for name, tensor in self.held.items() if tensor is not self._parameters_at_start.get(name)}
        self._fills_copies = False
        before_steps(state.optimizer, self._note, self._note_copies)

    def standing_still(self, gradients: dict[str, Tensor]) -> list[str]:
        """Return the parameters that did not move although their gradient among these is not negligible."""
        largest = max((float(gradient.abs().max()) for gradient in gradients.values()), default=0.0)
        after = _values(named(self._state.model))
        return [
            name
            for name, gradient in gradients.items()
            if float(gradient.abs().max()) > 1e-6 * largest and torch.equal(after[name], self.before[name])
        ]

    def astray(self) -> list[str]:
        """Return the parameters that are not where the optimizer takes them with these gradients in exact arithmetic.

        A parameter in half precision is rounded after each step, or rounded from the copy that the optimizer moves; moments
        in half precision are rounded too, which the same steps in that precision tell. A parameter in no optimizer stays,
        except for the last bit of an undone merge.
        """
        parameters, asked, moved = named(self._state.model), self._replayed(), self._moved()
        rounded = self._replayed(None)
        wrong = []
        for name, parameter in parameters.items():
            value, rounding = parameter.detach().double(), torch.finfo(parameter.dtype).eps
            if name not in asked:
                allowed = 2 * rounding * self.before[name].abs().max()
                is_there = bool(((value - self.before[name]).abs() <= allowed).all())
            else:
                start, own = self._started[name], torch.finfo(self.held[name].dtype).eps
                steps = len(self.updates) * own * asked[name].abs() if own > 1e-6 else 0.0
                allowed_by = 1e-6 + max(1e-3, 8 * own) * (asked[name] - start).abs() + steps
                is_there = bool(((moved[name] - asked[name]).abs() <= allowed_by).all())
                is_there |= own > 1e-6 and torch.equal(moved[name], rounded[name])
                is_there &= close(value, moved[name], rounding, 0.0)
            if not is_there:
                wrong.append(name)
        return wrong

    def moved(self) -> list[str]:
        """Return the parameters that are not where they were."""
        after = _values(named(self._state.model))
        return [name for name, before in self.before.items() if not torch.equal(after[name], before)]

    def share_moved(self) -> float:
        """Return the distance that the optimizer's tensors moved relative to its requested step; 0 if it requests none.

        The requested step is in float32: steps of plain SGD below that resolution are not a mistake.
        """
        after, asked = self._moved(), self._replayed(torch.float32)
        wanted = torch.cat([(asked[name] - start).flatten() for name, start in self._started.items()])
        moved = torch.cat([(after[name] - start).flatten() for name, start in self._started.items()])
        return float((moved * wanted.sign()).sum() / wanted.abs().sum().clamp(min=1e-300))

    def _moved(self) -> dict[str, Tensor]:
        """Return the tensors that the optimizer moves, as they are now; the model may hold others than at the start."""
        parameters = named(self._state.model)
        return _values({name: self.held[name] if name in self._copies else parameters[name] for name in self.held})

    def _replayed(self, dtype: torch.dtype | None = torch.float64) -> dict[str, Tensor]:
        """Take the same steps again in this precision, or in that of each tensor -> where the optimizer's tensors end."""
        optimizer = _copied(self._twin)
        tensors = _moved(optimizer)
        for tensor in tensors:
            tensor.data = tensor.data.to(dtype or tensor.dtype)
        for update in self.updates:
            for name, place in self._places.items():
                # A frozen parameter may be in the optimizer, which passes over it.
                tensors[place].grad = update.gradients[name].to(tensors[place]) if name in update.gradients else None
            for group, learning_rate in zip(optimizer.param_groups, update.learning_rates, strict=True):
                group.update(lr=learning_rate, maximize=False)
            # A step that fills the gradients of its copies would fill them from parameters that nobody gave any here.
            (_step_of_torch(optimizer) if self._fills_copies else optimizer.step)()
        return {name: tensors[place].detach().double() for name, place in self._places.items()}

    def _note(self) -> None:
        rates = tuple(float(group["lr"]) for group in self._state.optimizer.param_groups)
        self.updates.append(Update(self._gradients(), rates))

    def _note_copies(self) -> None:
        """Read the gradients of copies again, which the step may have filled itself, and may have emptied."""
        if not self._copies:
            return
        update, gradients = self.updates[-1], self._gradients()
        filled = {name: gradients[name] for name in self._copies & gradients.keys()}
        given = [each.grad for _, each in _trainable(self._state.model) if each.grad is not None]
        is_emptied = any(each.any() for each in given) and not any(each.any() for each in filled.values())
        if not is_emptied and any(
            not torch.equal(gradient, update.gradients[name]) for name, gradient in filled.items()
        ):
            self._fills_copies = True
            self.updates[-1] = replace(update, gradients=update.gradients | filled)

    def _gradients(self) -> dict[str, Tensor]:
        given = {name: self.held.get(name, parameter) for name, parameter in _trainable(self._state.model)}
        gradients = {
            name: descended(
                self._state.optimizer, tensor, torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            )
            for name, tensor in given.items()
        }
        return {name: gradient.detach().clone().cpu() for name, gradient in gradients.items()}


def _step_of_torch(optimizer: Any) -> Callable[[], Any]:
    """Return the step of the torch optimizer that a class derives from; its own where it derives from none."""
    for each in type(optimizer).__mro__:
        step = vars(each).get("step")
        if step is not None and each.__module__.startswith("torch.optim"):
            return MethodType(step, optimizer)
    return optimizer.step  # type: ignore[no-any-return]


def before_steps(optimizer: Any, action: Callable[[], None], after: Callable[[], None] | None = None) -> None:
    """Call this before each step of an optimizer from now on, and that after it.

    A subclass whose `step` calls that of a torch optimizer makes one step, and torch may announce two.
    """
    running: list[bool] = []

    def began(*_: Any) -> None:
        if not running:
            action()
        running.append(True)

    def ended(*_: Any) -> None:
        running.pop()
        if after is not None and not running:
            after()

    optimizer.register_step_pre_hook(began)
    optimizer.register_step_post_hook(ended)


def descended(optimizer: Any, tensor: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient along which the optimizer descends: the negative where it maximises an objective.

    It is also the gradient to give a tensor that has to descend along this one.
    """
    ascends = any(
        group.get("maximize", False) for group in optimizer.param_groups for each in group["params"] if each is tensor
    )
    return -gradient if ascends else gradient


def _moved(optimizer: Any) -> list[Tensor]:
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]


def _values(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().double().clone() for name, tensor in tensors.items()}


def _trainable(model: Any) -> Iterator[tuple[str, Tensor]]:
    return ((name, parameter) for name, parameter in named(model).items() if parameter.requires_grad)


def gradient_norm(gradients: dict[str, Tensor]) -> float:
    """Return the norm of all gradients together."""
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))


def _double(batch: CollatedBatch) -> CollatedBatch:
    exact: dict[str, Any] = {
        field.name: getattr(batch, field.name).double()
        for field in fields(batch)
        if isinstance(getattr(batch, field.name), Tensor) and getattr(batch, field.name).is_floating_point()
    }
    return replace(batch, **exact)
