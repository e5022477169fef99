"""The inputs of one run of a check's body."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rlcanary.contract.batch import PolicyBatch


class Case:
    """One case of a check: a label, the inputs of the body by name, and changed conventions.

    Attributes:
        label: identifies the case among those of its check, stable across runs: the cases `within` which it belongs, and
            its own parts.
        inputs: the body's arguments besides the adapter. Each has to have a literal (`rlcanary.checks.literal`).
        changes: conventions that the case changes from the adapter's own.
    """

    def __init__(
        self, *label: object, within: object = "", changes: dict[str, Any] | None = None, **inputs: Any
    ) -> None:
        self.label = "; ".join(filter(None, [_label(within), ", ".join(filter(None, map(_label, label)))]))
        self.inputs = inputs
        self.changes = changes or {}


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
