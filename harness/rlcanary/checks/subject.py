"""The implementation under test, with calls that record their arguments and results."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlcanary.checks.closeness import close, deviation, share_of_entries, tolerance
from rlcanary.checks.literal import Written, clipped, literal, short
from rlcanary.checks.program import Program
from rlcanary.checks.tally import Finding, NothingToCompare, Tally
from rlcanary.contract.adapter import Adapter, NotProvided
from rlcanary.contract.batch import LossOutput, PolicyBatch
from rlcanary.contract.conventions import Conventions

__all__ = ["Call", "Derived", "Finding", "NothingToCompare", "Subject", "Tally", "close", "tolerance"]


class Subject:
    """The adapter that a check calls.

    Attributes:
        spec: the adapter's name for `load_adapter`, for snippets.
        changes: the conventions that were changed from the adapter's own.
    """

    def __init__(
        self, adapter: Adapter, spec: str, changes: dict[str, Any] | None = None, tally: Tally | None = None
    ) -> None:
        self.adapter = adapter
        self.spec = spec
        self.changes = changes or {}
        self.tally = tally or Tally()

    @property
    def conventions(self) -> Conventions:
        return self.adapter.conventions

    def configured(self, **changes: Any) -> Subject:
        """Return the same implementation under other conventions; itself if they are already set.

        Raises:
            NotProvided: the adapter has no such setting.
        """
        wanted = {name: value for name, value in changes.items() if getattr(self.conventions, name) != value}
        if not wanted:
            return self
        return Subject(self.adapter.configured(**wanted), self.spec, {**self.changes, **wanted}, self.tally)

    def call(self, capability: str, *arguments: Any) -> Call:
        """Call a capability on copies of the arguments and keep the result.

        Raises:
            NotProvided: the adapter declines this input.
        """
        given = [argument.value if isinstance(argument, Written) else _fresh(argument) for argument in arguments]
        shapes = [str(list(each.shape)) if isinstance(each, Tensor) else type(each).__name__ for each in given]
        self.tally.calling = f"{capability}({', '.join(shapes)})"
        # Code may work in place on logits that its own forward pass made; a leaf that requires a gradient would forbid it.
        received = [each.clone() if _is_leaf(each) else each for each in given]
        output = getattr(self.adapter, capability)(*received)
        self.tally.made += 1
        return Call(self, capability, arguments, given, output, received)

    def call_unless_raised(self, capability: str, *arguments: Any) -> Call | None:
        """Call a capability that may raise, because an error is not silent; return None if it raised.

        Raises:
            NotProvided: the adapter declines this input.
        """
        try:
            return self.call(capability, *arguments)
        except NotProvided:
            raise
        except Exception:  # noqa: BLE001 - the adapter is foreign code, and any exception is the right answer here
            self.tally.made += 1
            self.compared()
            return None

    def compared(self, number: int = 1) -> None:
        """Count comparisons that a check makes without `Call.expect…`; 0 if there was nothing to compare."""
        self.tally.compared += number

    def case(self, *parts: object) -> AbstractContextManager[None]:
        """Run one case of a check. The check goes on with its other cases even if this one fails.

        Args:
            parts: the label of the case: text, numbers, options, or a record or tensor for its shape.
        """
        return self.tally.case(", ".join(filter(None, map(_label, parts))))

    def weigh(self, alternatives: Iterable[dict[str, Any]], explains: Callable[[Conventions], bool]) -> None:
        """Find out which other declarations explain this case; the report names those that explain every case.

        Args:
            alternatives: the changed conventions of each alternative.
            explains: tells whether the output of this case matches these conventions.
        """
        self.tally.weigh(alternatives, lambda other: explains(self.conventions.replace(**other)))


@dataclass
class Call:
    """One recorded call of a capability.

    `expect…` compares its output with the value that a property demands. A difference is recorded, and the check goes
    on.

    Attributes:
        arguments: the arguments that the check passed.
        given: copies of them, with respect to which gradients are taken.
        output: the result.
        received: the arguments that the adapter received: the copies, and clones of those that require a gradient.
    """

    subject: Subject
    capability: str
    arguments: tuple[Any, ...]
    given: list[Any]
    output: Any
    received: list[Any] = field(default_factory=list)

    @property
    def value(self) -> Tensor:
        """Return the output as a tensor without gradient; for a `LossOutput`, its loss."""
        tensor = self.output.loss if isinstance(self.output, LossOutput) else self.output
        if not isinstance(tensor, Tensor | list | tuple | bool | int | float):
            raise TypeError(f"{self.capability} returned {type(tensor).__name__}, where a tensor belongs")
        return torch.as_tensor(tensor).detach()

    def gradient(self, name: str | None = None, weights: Tensor | None = None) -> Tensor:
        """Take the gradient of the output with respect to the first argument, or to a field of it.

        Args:
            name: a field of the first argument, which is a record.
            weights: of the output's shape; the gradient of their weighted sum is taken. Not needed for a scalar.
        """
        leaf = self.given[0] if name is None else getattr(self.given[0], name)
        output = self.output.loss if isinstance(self.output, LossOutput) else self.output
        if not output.requires_grad:
            return torch.zeros_like(leaf)
        scalar = output.sum() if weights is None else (output * weights).sum()
        (gradient,) = torch.autograd.grad(scalar, leaf, retain_graph=True, allow_unused=True)
        return torch.zeros_like(leaf) if gradient is None else gradient

    def gives(self, expected: Tensor, gradient: Tensor | None = None, scale: float = 1.0) -> bool:
        """Tell whether the output, and the gradient if one is given, equal these. Does not count as a comparison."""
        both = [(self.value, expected)]
        both += [] if gradient is None else [(self.gradient("logprobs"), gradient)]
        return all(
            got.shape == wanted.shape and close(got, wanted, *tolerance(got, wanted, scale)) for got, wanted in both
        )

    def expect(
        self,
        expected: Tensor,
        message: str,
        where: Tensor | None = None,
        scale: float = 1.0,
        derived: Derived | None = None,
    ) -> None:
        """Compare the output with the value that the property demands.

        Args:
            expected: of the output's shape.
            message: the property in the words of this case.
            where: bool, of the output's shape; only these entries count.
            scale: magnitude of the numbers whose difference the result is, for the tolerance.
            derived: derivation of `expected` from another call of the same implementation, for the snippet.
        """
        source = None if derived is None else derived.call._program.value("expected", "before", derived.form)
        self._compare("value", self.value, expected, message, where, scale, self._program.value(), derived, source)

    def expect_gradient(
        self,
        expected: Tensor,
        message: str,
        name: str | None = None,
        weights: Tensor | None = None,
        where: Tensor | None = None,
        scale: float = 1.0,
        derived: Derived | None = None,
    ) -> None:
        """Compare the gradient, as `gradient` takes it, with the one that the property demands."""
        lines = self._program.gradient(name, weights, may_be_missing=not expected.any())
        source = None
        if derived is not None:
            source = derived.call._program.gradient(name, weights, "expected", "before", derived.form)
        got = self.gradient(name, weights)
        self._compare("gradient", got, expected, message, where, scale, lines, derived, source)

    def expect_true(
        self,
        holds: bool,
        message: str,
        condition: str,
        before: Call | None = None,
        magnitude: float | None = None,
    ) -> None:
        """Demand a condition on the output.

        Args:
            holds: the condition's value.
            message: the property in the words of this case.
            condition: as Python over the names `got` and, with `before`, `expected`.
            before: the call that `expected` came from.
            magnitude: the size of the deviation, if it is a number.
        """
        self.subject.compared()
        quantity = self.subject.tally.quantity("condition" if magnitude is None else "value")
        if not holds:
            source = [] if before is None else [*before._program.before(), *before._program.value("expected", "before")]
            lines = [*self._program.value(), *source, f"assert {condition}, got"]
            self._fails(f"{message}\n  got: {short(self.value)}", lines, quantity, magnitude)

    def expect_equal(
        self, expression: str, expected: Any, message: str, may_raise: bool = False, before: Call | None = None
    ) -> None:
        """Compare plain Python data with the value that the property demands.

        Args:
            expression: Python over the names `output` (the result), `arguments` (as the adapter received them) and
                `adapter`.
            expected: numbers, strings and containers of them.
            message: the property in the words of this case.
            may_raise: whether an exception of the capability would do as well, for the snippet.
            before: an earlier call that this one came after, for the snippet.
        """
        names = {"torch": torch, "adapter": self.subject.adapter, "arguments": self.received, "output": self.output}
        got = eval(expression, names)
        self.subject.compared()
        quantity = self.subject.tally.quantity("data")
        if got == expected:
            return
        run = f"output = adapter.{self.capability}(*arguments)"
        lines = [f"got = {expression}", f"assert got == {literal(expected)}, got"]
        if may_raise:
            caught = ["try:", f"    {run}", "except Exception as error:", "    print('raised, which is loud:', error)"]
            lines = [*caught, "else:", *(f"    {line}" for line in lines)]
        else:
            lines = [run, *lines]
        if before is not None:
            lines = [*before._program.before(), f"adapter.{before.capability}(*before)", *lines]
        shown = f"{message}\n  got:      {clipped(repr(got))}\n  expected: {clipped(repr(expected))}"
        self._fails(shown, lines, quantity, share_of_entries(got, expected))

    def expect_inputs_untouched(self, message: str) -> None:
        """Demand that the adapter did not modify the tensors that it was given."""
        for position, (argument, given) in enumerate(zip(self.arguments, self.received, strict=True)):
            for label, before, after in _tensors(argument, given):
                self.subject.compared()
                if not torch.equal(torch.nan_to_num(before), torch.nan_to_num(after.detach())):
                    name = f"argument {position}{label}"
                    lines = [
                        "import copy",
                        "before = copy.deepcopy(arguments)",
                        f"adapter.{self.capability}(*arguments)",
                        f"torch.testing.assert_close(arguments[{position}]{label}, before[{position}]{label}, "
                        "equal_nan=True)",
                    ]
                    self._fails(
                        f"{message}\n  {name} before: {short(before)}\n  after: {short(after.detach())}", lines, name
                    )

    def expect_metric(self, name: str, expected: float, told: str, derived: Call | None = None) -> None:
        """Compare a logged metric of a loss, to a thousandth.

        Args:
            name: the metric's name.
            expected: the value that it must have; NaN equals NaN.
            told: the origin of `expected`, in words.
            derived: the earlier call that logged `expected`, for the snippet.
        """
        got = float(self.output.metrics[name])
        self.subject.compared()
        quantity = self.subject.tally.quantity(f"metric {name}")
        if math.isclose(got, expected, rel_tol=1e-3, abs_tol=1e-5) or (math.isnan(got) and math.isnan(expected)):
            return
        logged = f"float(adapter.{self.capability}(*{{}}).metrics[{name!r}])"
        lines = [f"got = {logged.format('arguments')}"]
        if derived is None:
            lines.append(f"expected = {literal(expected)}")
        else:
            lines += [*derived._program.before(), f"expected = {logged.format('before')}"]
        lines.append("assert abs(got - expected) <= 1e-3 * abs(expected) + 1e-5, (got, expected)")
        message = f"the metric {name} is {got:.6g}, {told} it is {expected:.6g}"
        magnitude = deviation(torch.tensor(got), torch.tensor(expected))
        self._fails(message, lines, quantity, magnitude)

    def _fails(self, message: str, lines: list[str], quantity: str, magnitude: float | None = None) -> None:
        self.subject.tally.note(Finding(message, self.snippet(lines), quantity, magnitude))

    def snippet(self, lines: list[str]) -> str:
        """A program that makes this call's inputs and goes on with these lines."""
        return self._program.whole(lines)

    @property
    def _program(self) -> Program:
        subject = self.subject
        is_loss, leaves = isinstance(self.output, LossOutput), tuple(map(_is_leaf, self.given))
        return Program(subject.spec, subject.changes, self.capability, self.arguments, leaves, is_loss)

    def _compare(
        self,
        name: str,
        got: Tensor,
        expected: Tensor,
        message: str,
        where: Tensor | None,
        scale: float,
        lines: list[str],
        derived: Derived | None,
        source: list[str] | None,
    ) -> None:
        expected = expected.detach()
        quantity = self.subject.tally.quantity(name)
        if got.shape != expected.shape:
            shapes = f"got shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
            lines = [*lines, f"assert got.shape == {tuple(expected.shape)}"]
            self._fails(f"{message}\n  {shapes}", lines, f"{quantity} of shape {list(got.shape)}")
            return
        if expected.is_floating_point() and not got.is_floating_point():
            assertion = "assert got.is_floating_point(), got.dtype"
            told = f"{message}\n  got numbers of {got.dtype}, expected fractions"
            self._fails(told, [*lines, assertion], f"{quantity} of {got.dtype}")
            return
        rtol, atol = tolerance(got, expected, scale)
        counted = torch.ones_like(expected, dtype=torch.bool) if where is None else where
        self.subject.compared(int(counted.sum()))
        if close(got[counted], expected[counted], rtol, atol):
            return
        selection = "" if where is None else f"[{literal(where)}]"
        if derived is None or source is None:
            source = [f"expected = {literal(expected.to(got.dtype))}"]
        else:
            source = [*derived.call._program.before(), *source]
        lines = [
            *lines,
            *source,
            f"torch.testing.assert_close(got{selection}, expected{selection}, rtol={rtol:.1e}, atol={atol:.1e}, "
            "equal_nan=True)",
        ]
        shown = torch.where(counted, got, torch.nan) if where is not None and got.is_floating_point() else got
        told = f"{message}\n  got:      {short(shown)}\n  expected: {short(expected.to(got.dtype))}"
        self._fails(told, lines, quantity, deviation(got[counted], expected[counted]))


@dataclass(frozen=True)
class Derived:
    """Derivation of an expected value from an earlier call: `form` is Python with {} for that call's result."""

    call: Call
    form: str = "{}"


def _label(part: object) -> str:
    match part:
        case Tensor():
            return str(list(part.shape))
        case PolicyBatch():
            return str(list(part.logprobs.shape))
        case list():
            return f"[{', '.join(f'{item:g}' if isinstance(item, float) else str(item) for item in part)}]"
        case dict():
            return ", ".join(f"{name}={value!r}" for name, value in part.items())
    return str(part)


def _is_leaf(argument: Any) -> bool:
    return isinstance(argument, Tensor) and argument.requires_grad


def _fresh(argument: Any) -> Any:
    """Deep-copy a value; its tensors become leaves with their `requires_grad` kept."""
    return copy.deepcopy(argument)


def _tensors(argument: Any, given: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
    if isinstance(argument, Tensor):
        yield "", argument.detach(), given
    elif hasattr(argument, "__dataclass_fields__") and not isinstance(argument, Written):
        for name in argument.__dataclass_fields__:
            if isinstance(getattr(argument, name), Tensor):
                yield f".{name}", getattr(argument, name).detach(), getattr(given, name)
