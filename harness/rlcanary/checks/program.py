"""A call as a program: the Python that a user pastes to see a finding again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rlcanary.checks.literal import imports_for, literal


@dataclass(frozen=True)
class Program:
    """The Python that makes a call, and that takes its value or its gradient.

    Attributes:
        spec: finds the adapter (`load_adapter`).
        changes: the conventions that were changed from the adapter's own.
        capability: the method that is called.
        arguments: its inputs.
        leaves: which inputs are tensors that require a gradient; the method receives clones of them.
        is_loss: whether the output is a `LossOutput`.
    """

    spec: str
    changes: dict[str, Any]
    capability: str
    arguments: tuple[Any, ...]
    leaves: tuple[bool, ...]
    is_loss: bool

    def whole(self, lines: list[str]) -> str:
        """Make the adapter and `arguments`, and go on with these lines."""
        changes = ", ".join(f"{name}={value!r}" for name, value in self.changes.items())
        configured = f".configured({changes})" if changes else ""
        return "\n".join(
            [
                "import torch",
                "from rlcanary.adapters import load_adapter",
                *sorted(imports_for(list(self.arguments)) - {"import torch"}),
                "",
                f"adapter = load_adapter({self.spec!r}){configured}",
                *self._inputs("arguments"),
                *lines,
            ]
        )

    def before(self) -> list[str]:
        """Make the inputs under the name `before`, in the program of a later call."""
        return self._inputs("before")

    def value(self, result: str = "got", arguments: str = "arguments", form: str = "{}") -> list[str]:
        """Assign the output, as a tensor without gradient, to the name `result`; `form` is Python with {} around it."""
        value = f"torch.as_tensor({self._called(arguments)}{self._taken}).detach()"
        return [f"{result} = {form.format(value)}"]

    def gradient(
        self,
        name: str | None,
        weights: Tensor | None,
        result: str = "got",
        arguments: str = "arguments",
        form: str = "{}",
        may_be_missing: bool = False,
    ) -> list[str]:
        """Assign the gradient with respect to the first input, or to its field `name`, to the name `result`.

        Args:
            name: a field of the first input, which is a record.
            weights: of the output's shape; the gradient of their weighted sum is taken.
            result: the name that is assigned.
            arguments: the name of the list of inputs.
            form: Python with {} where the gradient goes.
            may_be_missing: whether the output may not depend on the input.
        """
        leaf = f"{arguments}[0]" if name is None else f"{arguments}[0].{name}"
        weighted = "" if weights is None else f" * {literal(weights)}"
        # Adding nothing of the leaf makes the gradient zero, rather than an error, where the output does not depend on it.
        anchored = f" + 0 * {leaf}.sum()" if may_be_missing else ""
        return [
            f"output = {self._called(arguments)}{self._taken}{weighted}",
            f"{result} = {form.format(f'torch.autograd.grad(output.sum(){anchored}, {leaf})[0]')}",
        ]

    @property
    def _taken(self) -> str:
        return ".loss" if self.is_loss else ""

    def _inputs(self, name: str) -> list[str]:
        return [f"{name} = [", *(_indented(literal(argument)) for argument in self.arguments), "]"]

    def _called(self, arguments: str) -> str:
        """The call in Python over a list of inputs of this name."""
        if not any(self.leaves):
            return f"adapter.{self.capability}(*{arguments})"
        each = [f"{arguments}[{place}]{'.clone()' * is_leaf}" for place, is_leaf in enumerate(self.leaves)]
        return f"adapter.{self.capability}({', '.join(each)})"


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines()) + ","
