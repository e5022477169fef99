"""Assertions of the checks. A failed one is a finding; each counts the entries that it compared.

Printed programs import them too, so what decides in a check is what its program shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from rlcanary.checks.closeness import close, deviation, share_of_entries, tolerance
from rlcanary.checks.literal import apart, clipped, short
from rlcanary.checks.tally import Compared, Finding, NothingToCompare, Tally
from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.batch import LossOutput

__all__ = [
    "Finding",
    "NothingToCompare",
    "assert_close",
    "assert_equal",
    "assert_metrics",
    "assert_true",
    "assert_unchanged",
    "gradient",
    "leave_out",
    "soft",
    "tallied",
    "unless_raised",
]

_tally: ContextVar[Tally | None] = ContextVar("tally", default=None)


@contextmanager
def tallied(tally: Tally | None) -> Iterator[None]:
    """Count the comparisons of the block in this tally; None counts nothing."""
    token = _tally.set(tally)
    try:
        yield
    finally:
        _tally.reset(token)


@contextmanager
def soft() -> Iterator[None]:
    """Let the check go on after a failed assertion of the block, so that it hides none of those that follow.

    A program stops at it.
    """
    try:
        yield
    except Finding as finding:
        tally = _tally.get()
        if tally is None:
            raise
        tally.note(finding)


def assert_close(
    got: Any,
    expected: Tensor,
    message: str,
    *,
    where: Tensor | None = None,
    scale: float = 1.0,
    within: tuple[float, float] | None = None,
    quantity: str = "value",
) -> None:
    """Assert that a tensor has the expected shape and kind, and agrees within the tolerance of its dtype.

    Args:
        got: a tensor, or numbers from which one is made.
        expected: the values that the property demands.
        message: the property in the words of this case.
        where: bool, of the same shape; only these entries count.
        scale: magnitude of the numbers whose difference the result is, for the tolerance.
        within: relative and absolute tolerance, instead of those of the dtype.
        quantity: the quantity compared, for the finding's fingerprint.

    Raises:
        Finding: the two differ.
    """
    if not isinstance(got, Tensor | list | tuple | bool | int | float):
        raise TypeError(f"{type(got).__name__} was returned, where a tensor belongs")
    got, expected = torch.as_tensor(got).detach(), expected.detach()
    quantity = _numbered(quantity)
    if got.shape != expected.shape:
        told = f"{message}\n  got shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
        compared = Compared(got.tolist(), expected.tolist())
        raise Finding(told, quantity=f"{quantity} of shape {list(got.shape)}", compared=compared)
    if expected.is_floating_point() and not got.is_floating_point():
        told = f"{message}\n  got numbers of {got.dtype}, expected fractions"
        raise Finding(told, quantity=f"{quantity} of {got.dtype}")
    rtol, atol = within or tolerance(got, expected, scale)
    counted = torch.ones_like(expected, dtype=torch.bool) if where is None else where
    _count(int(counted.sum()))
    if not close(got[counted], expected[counted], rtol, atol):
        found, wanted = apart(got, expected.to(got.dtype), counted)
        told = f"{message}\n  got:      {found}\n  expected: {wanted}"
        magnitude = deviation(got[counted], expected[counted])
        raise Finding(told, quantity=quantity, magnitude=magnitude, compared=Compared(got.clone(), expected, counted))


def assert_equal(got: Any, expected: Any, message: str, *, quantity: str = "data") -> None:
    """Assert that numbers, strings and containers of them are equal.

    Raises:
        Finding: the two differ.
    """
    _count(1)
    quantity = _numbered(quantity)
    if got != expected:
        told = f"{message}\n  got:      {clipped(repr(got))}\n  expected: {clipped(repr(expected))}"
        magnitude = share_of_entries(got, expected)
        raise Finding(told, quantity=quantity, magnitude=magnitude, compared=Compared(got, expected))


def assert_true(
    holds: object, message: str, *, quantity: str = "condition", magnitude: float | None = None, compared: int = 1
) -> None:
    """Assert a condition.

    Args:
        holds: the condition's value.
        message: what is wrong if it does not hold.
        quantity: the quantity that it is about, for the finding's fingerprint.
        magnitude: the size of the deviation, if it is a number.
        compared: number of entries that the condition judges; with 0 the check has compared nothing.

    Raises:
        Finding: the condition does not hold.
    """
    _count(compared)
    quantity = _numbered(quantity)
    if not holds:
        raise Finding(message, quantity=quantity, magnitude=magnitude)


def assert_metrics(output: LossOutput | dict[str, float], expected: dict[str, float], told: str) -> None:
    """Assert to a thousandth each metric that is both logged and expected.

    An expected NaN is the metric of no tokens, which has no value: any that is logged will do.

    Args:
        output: the loss that logged them, or the metrics themselves.
        expected: the values that they must have.
        told: the origin of `expected`, in words.

    Raises:
        Finding: one of them differs.
    """
    logged = output.metrics if isinstance(output, LossOutput) else output
    for name in sorted(set(expected) & set(logged)):
        got, wanted = float(logged[name]), float(expected[name])
        if math.isnan(wanted):
            continue
        same = math.isclose(got, wanted, rel_tol=1e-3, abs_tol=1e-5)
        message = f"the metric {name} is {got:.6g}, {told} it is {wanted:.6g}"
        magnitude = deviation(torch.tensor(got), torch.tensor(wanted))
        with soft():
            assert_true(same, message, quantity=f"metric {name}", magnitude=magnitude)


def assert_unchanged(now: Any, before: Any, message: str) -> None:
    """Assert that a tensor, or each tensor of a record or list, equals its copy from before a call.

    Raises:
        Finding: one of them was modified.
    """
    after = dict(_tensors(now))
    for name, expected in _tensors(before):
        told = f"{message}\n  {name} before: {short(expected)}\n  after: {short(after[name])}"
        with soft():
            assert_true(_is_same(after[name], expected), told, quantity=name)


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Tell if two tensors are equal, NaN to NaN."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


def gradient(output: Tensor, leaf: Tensor, weights: Tensor | None = None) -> Tensor:
    """Take the gradient of an output, or of its sum with these weights, with respect to a leaf; 0 if independent of it.

    Args:
        output: any shape.
        leaf: a tensor that requires a gradient.
        weights: of the output's shape.
    """
    if not output.requires_grad:
        return torch.zeros_like(leaf)
    scalar = output.sum() if weights is None else (output * weights).sum()
    (found,) = torch.autograd.grad(scalar, leaf, retain_graph=True, allow_unused=True)
    return torch.zeros_like(leaf) if found is None else found


def unless_raised(function: Callable[..., Any], *arguments: Any) -> Any | None:
    """Call a function that may raise, because an error is not silent; return None if it raised.

    Raises:
        NotProvided: the adapter declines this input.
    """
    try:
        return function(*arguments)
    except NotProvided:
        raise
    except Exception:  # noqa: BLE001 - the adapter is foreign code, and any exception is the right answer here
        _count(1)
        return None


def leave_out(reason: str) -> None:
    """Report a part of the case that cannot be judged; the body goes on with the others."""
    if tally := _tally.get():
        tally.declined.append(reason)


def _count(number: int) -> None:
    if tally := _tally.get():
        tally.compared += number


def _numbered(quantity: str) -> str:
    tally = _tally.get()
    return tally.quantity(quantity) if tally else quantity


def _tensors(value: Any, name: str = "it") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value.detach()
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from _tensors(item, f"{name}[{place}]")
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name), field.name)
