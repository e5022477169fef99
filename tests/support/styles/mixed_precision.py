"""Correct trainers in bfloat16: with float32 master weights that only the optimizer knows, and without any."""

from typing import Any

import torch

from rlcanary import reference
from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.contract.adapter import NotProvided, TrainState
from rlcanary.contract.batch import CollatedBatch
from rlcanary.contract.conventions import Conventions


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
