"""Snapshots of a state, its modes and the random generators, and their comparison."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlcanary.checks.asserts import assert_true
from rlcanary.checks.closeness import close
from rlcanary.checks.devices import cuda_generators


def snapshot(state: Any) -> dict[str, Any]:
    """Copy by name the state that training continues from: weights, buffers, gradients, optimizer and schedule."""
    parts = {
        "model": state.model.state_dict(),
        "gradient": {name: parameter.grad for name, parameter in state.model.named_parameters()},
        "requires_grad": {name: parameter.requires_grad for name, parameter in state.model.named_parameters()},
        "optimizer": state.optimizer.state_dict(),
        "moved by the optimizer": [group["params"] for group in state.optimizer.param_groups],
        "scheduler": {} if state.scheduler is None else state.scheduler.state_dict(),
        "ref_model": {} if state.ref_model is None else state.ref_model.state_dict(),
    }
    return {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in _entries("", parts)}


def modes(state: Any) -> dict[str, bool]:
    """Return the training mode of each module of the policy."""
    return {name: module.training for name, module in state.model.named_modules()}


def random_states() -> dict[str, str]:
    """Return the states of the random number generators that trainers share; of GPUs once the process uses them."""
    return {
        "torch": str(torch.get_rng_state().tolist()),
        **{f"torch on cuda:{index}": str(torch.cuda.get_rng_state(index).tolist()) for index in cuda_generators()},
        "random": str(random.getstate()),
        "numpy": str(np.random.get_state(legacy=False)["state"]),
    }


def changed(before: dict[str, Any], after: dict[str, Any], tolerance: float = 0.0) -> list[str]:
    """Return the entries that differ, numbers by more than this relative tolerance."""
    names = sorted({*before, *after})
    return [name for name in names if not _equal(before.get(name), after.get(name), tolerance)]


def but_for_cleared_gradients(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Return a later snapshot with the gradients of an earlier one where it has none, or zero."""
    cleared = {
        name for name, value in after.items() if name.startswith("gradient.") and (value is None or not value.any())
    }
    return {name: before.get(name) if name in cleared else value for name, value in after.items()}


def assert_same_entries(
    got: dict[str, Any], expected: dict[str, Any], message: str, tolerance: float = 0.0, quantity: str = "state"
) -> None:
    """Assert that two snapshots, or two dictionaries of metrics, are equal.

    Args:
        got: the entries by name.
        expected: the entries that the property demands.
        message: the property in the words of this case.
        tolerance: largest relative difference of numbers.
        quantity: the quantity compared, for the finding's fingerprint.

    Raises:
        Finding: an entry differs.
    """
    different = changed(expected, got, tolerance)
    told = f"{message}: {_summed_up(different, expected, got)}"
    compared = len({*got, *expected})
    assert_true(not different, told, quantity=quantity, magnitude=len(different), compared=compared)


def _summed_up(names: list[str], first: dict[str, Any], second: dict[str, Any]) -> str:
    """Summarise the differing entries: a count per part, with one example."""
    parts: dict[str, list[str]] = {}
    for name in names:
        parts.setdefault(name.split(".")[0], []).append(name)
    return "; ".join(
        f"{_told(found[0], first, second)}{f' and {len(found) - 1} more of {part}' if len(found) > 1 else ''}"
        for part, found in parts.items()
    )


def _entries(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list | tuple):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _entries(f"{prefix}.{name}" if prefix else str(name), item)
    else:
        yield prefix, value


def _equal(before: Any, after: Any, tolerance: float) -> bool:
    if isinstance(before, Tensor | float) and isinstance(after, Tensor | float):
        first, second = torch.as_tensor(before), torch.as_tensor(after)
        return first.shape == second.shape and close(first, second, tolerance, tolerance * 1e-3)
    return type(before) is type(after) and bool(before == after)


def _told(name: str, first: dict[str, Any], second: dict[str, Any]) -> str:
    """Describe an entry that differs, with its values if they are numbers."""
    values = first.get(name), second.get(name)
    return name if any(isinstance(value, Tensor) for value in values) else f"{name}, {values[0]!r} and {values[1]!r}"
