"""The inputs of one run of a check's body."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rlcanary.contract.batch import PolicyBatch


@dataclass(frozen=True)
class Model:
    """A model as an input of a case, made anew for each run and written as the call that makes it.

    Attributes:
        name: its name in `rlcanary.checks.worlds.models`, or "own"; empty for the one that every check runs on.
        make: makes it.
        code: the call in Python; empty where `make` is a function of a module.
    """

    name: str
    make: Callable[[], Any]
    code: str = ""


class Case:
    """One case of a check: a label, the inputs of the body by name, and changed conventions.

    Attributes:
        label: identifies the case among those of its check, stable across runs: the cases `within` which it belongs, and
            its own parts.
        inputs: the body's arguments besides the adapter. Each has to have a literal (`rlcanary.checks.literal`).
        changes: conventions that the case changes from the adapter's own.
        world: the name of its model where that is not the Llama.
    """

    def __init__(
        self, *label: object, within: object = "", changes: dict[str, Any] | None = None, **inputs: Any
    ) -> None:
        self.label = "; ".join(filter(None, [_label(within), ", ".join(filter(None, map(_label, label)))]))
        self.inputs = inputs
        self.changes = changes or {}
        self.world = ""

    def on(self, model: Model) -> Case:
        """Return the same case on a model."""
        told = f"model {model.name}" if model.name else ""
        case = Case(told, within=self.label, changes=self.changes, **self.inputs, model=model)
        case.world = model.name
        return case


def _label(part: object) -> str:
    """Write text, numbers and options as they are, a record or tensor by its shape."""
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
