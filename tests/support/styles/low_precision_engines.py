"""Engines in lower precision than the trainer: in bfloat16, and with weights in eight bits, by hand."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.engine import InProcessEngine
from rlcanary.contract.layers import copied
from rlcanary.contract.presets import GRPO

LARGEST = torch.finfo(torch.float8_e4m3fn).max


class BfloatEngine(ReferenceAdapter):
    """The trainer is in float32 and the engine computes in bfloat16."""

    def __init__(self, conventions: Conventions | None = None) -> None:
        super().__init__(conventions or GRPO.replace(engine_tolerance=0.5))

    def new_engine(self, model: Any) -> Any:
        return InProcessEngine(copied(model).bfloat16())


class LastMatrixNeverSent(BfloatEngine):
    def sync_weights(self, state: Any, engine: Any) -> None:
        *weights, _ = [(name, weight) for name, weight in state.model.named_parameters() if weight.ndim == 2]
        engine.load_weights(
            [*weights, *((name, each) for name, each in state.model.named_parameters() if each.ndim < 2)]
        )
        engine.reset_prefix_cache()
        engine.version += 1


class EightBitWeights(InProcessEngine):
    """Keeps each matrix in eight bits with a scale for each row, and computes with it in the model's precision."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return super().load_weights((name, self.rounded(name, weight.detach())) for name, weight in weights)

    def rounded(self, name: str, weight: Tensor) -> Tensor:
        if weight.ndim < 2:
            return weight
        scale = self.scale(name, weight)
        return (weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale

    def scale(self, name: str, weight: Tensor) -> Tensor:
        return weight.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / LARGEST


class EightBitEngine(ReferenceAdapter):
    def new_engine(self, model: Any) -> Any:
        return EightBitWeights(model)


class OneScaleForAll(EightBitWeights):
    def scale(self, name: str, weight: Tensor) -> Tensor:
        return torch.tensor(2.0**-5)


class OneScaleForAllMatrices(EightBitEngine):
    def new_engine(self, model: Any) -> Any:
        return OneScaleForAll(model)
