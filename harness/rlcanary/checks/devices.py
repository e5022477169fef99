"""Code under test that computes on another device: its results are compared on the CPU."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from rlcanary.contract.batch import CollatedBatch, LossOutput


class OnCpu:
    """An adapter whose functions return tensors on the CPU, wherever its code computes them. Gradients flow through."""

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter

    def configured(self, **changes: Any) -> OnCpu:
        """Return the same codebase under other conventions."""
        return OnCpu(self._adapter.configured(**changes))

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._adapter, name)
        return (lambda *given, **named: on_cpu(attribute(*given, **named))) if callable(attribute) else attribute


def on_cpu(value: Any) -> Any:
    """Move a tensor, or those of a record or sequence, to the CPU; return anything else as it is."""
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, LossOutput | CollatedBatch) and is_elsewhere(value):
        return replace(value, **{field.name: on_cpu(getattr(value, field.name)) for field in fields(value)})
    if type(value) in (list, tuple) and is_elsewhere(value):
        return type(value)(map(on_cpu, value))
    return value


def is_elsewhere(value: Any) -> bool:
    """Tell whether a tensor, or one of a record or sequence, is not on the CPU."""
    if isinstance(value, Tensor):
        return value.device.type != "cpu"
    if isinstance(value, LossOutput | CollatedBatch):
        return any(is_elsewhere(getattr(value, field.name)) for field in fields(value))
    return type(value) in (list, tuple) and any(map(is_elsewhere, value))


def cuda_generators() -> list[int]:
    """Return the GPUs whose random generators this process may have used; none before CUDA is initialised."""
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
