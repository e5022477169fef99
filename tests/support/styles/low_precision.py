"""Correct trainers and engines in low precision.

Trainers in bfloat16: with float32 master weights that only the optimizer knows, and without any. Engines in lower precision
than the trainer: in bfloat16, and with weights in eight bits, by hand.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from rlcanary import reference
from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.contract.adapter import NotProvided, TrainState
from rlcanary.contract.batch import CollatedBatch
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.engine import InProcessEngine
from rlcanary.contract.layers import copied
from rlcanary.contract.presets import GRPO

LARGEST = torch.finfo(torch.float8_e4m3fn).max


class BfloatParameters(ReferenceAdapter):
    """Parameters in bfloat16, which the optimizer moves as they are: updates below their resolution are lost."""

    name = "bfloat16"

    def __init__(self, conventions: Conventions | None = None) -> None:
        super().__init__(conventions or Conventions())

    def new_state(self, model: Any, ref_model: Any, learning_rate: float) -> Any:
        if model.dtype == torch.float16:
            raise NotProvided("bfloat16 only")
        reference_in_bfloat = None if ref_model is None else ref_model.to(torch.bfloat16)
        return super().new_state(model.to(torch.bfloat16), reference_in_bfloat, learning_rate)


class FloatMasters(BfloatParameters):
    """Parameters in bfloat16; the optimizer moves float32 copies, which are rounded into the model after each step."""

    name = "masters"

    def new_state(self, model: Any, ref_model: Any, learning_rate: float) -> Any:
        state = super().new_state(model, ref_model, learning_rate)
        masters = [torch.nn.Parameter(parameter.detach().float()) for parameter in state.model.parameters()]
        optimizer = torch.optim.AdamW(masters, lr=learning_rate, weight_decay=0.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        return TrainState(state.model, optimizer, scheduler, state.ref_model)

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        policy = reference.policy_batch(state.model, state.ref_model, batch, self.conventions)
        output = reference.policy_loss(policy, self.conventions)
        state.model.zero_grad()
        output.loss.backward()
        masters = state.optimizer.param_groups[0]["params"]
        for parameter, master in zip(state.model.parameters(), masters, strict=True):
            master.grad = None if parameter.grad is None else self.scaled(parameter.grad.float())
        limit = self.conventions.max_grad_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(masters, limit)
        learning_rate = state.optimizer.param_groups[0]["lr"]
        state.optimizer.step()
        state.scheduler.step()
        self.write_back(state, masters)
        return {
            **output.metrics,
            "lr": learning_rate,
            "grad_norm": float(norm),
            "reward": float(batch.rewards.double().mean()),
            "tokens": float(batch.attention_mask.sum()),
        }

    def scaled(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient

    def write_back(self, state: Any, masters: list[torch.Tensor]) -> None:
        for parameter, master in zip(state.model.parameters(), masters, strict=True):
            parameter.data.copy_(master.detach())


class GradientsTimes82(FloatMasters):
    def scaled(self, gradient: torch.Tensor) -> torch.Tensor:
        return 82 * gradient


class GradientsTimesMinusThree(FloatMasters):
    def scaled(self, gradient: torch.Tensor) -> torch.Tensor:
        return -3 * gradient


class GradientsHalvedBelowTheirBound(FloatMasters):
    def __init__(self, conventions: Conventions | None = None) -> None:
        super().__init__(conventions or Conventions(max_grad_norm=1.0))

    def scaled(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / 2


class MastersNeverWrittenBack(FloatMasters):
    def write_back(self, state: Any, masters: list[torch.Tensor]) -> None:
        """The model stays as it was."""


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
