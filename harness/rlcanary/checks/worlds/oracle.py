"""The reference loss in float64, with which losses under test are compared."""

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from rlcanary import reference
from rlcanary.contract.batch import LossOutput, PolicyBatch
from rlcanary.contract.conventions import Conventions


def double(batch: PolicyBatch) -> PolicyBatch:
    """Convert the batch to float64; its logprobs are a leaf that requires a gradient."""
    tensors = {field.name: getattr(batch, field.name) for field in fields(batch)}
    exact: dict[str, Any] = {
        name: value.detach().double()
        for name, value in tensors.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    exact["logprobs"].requires_grad_()
    return replace(batch, **exact)


def exact_output(batch: PolicyBatch, conventions: Conventions) -> LossOutput:
    """Compute loss and metrics of the reference in float64."""
    return reference.policy_loss(double(batch), conventions)


def exact_loss(batch: PolicyBatch, conventions: Conventions) -> tuple[Tensor, Tensor]:
    """Compute the reference loss in float64 and its gradient with respect to the logprobs, [B, T]."""
    output, gradient_BT = exact_update(batch, conventions)
    return output.loss.detach(), gradient_BT


def exact_update(batch: PolicyBatch, conventions: Conventions) -> tuple[LossOutput, Tensor]:
    """Compute loss and metrics of the reference in float64, and the loss's gradient with respect to the logprobs."""
    exact = double(batch)
    output = reference.policy_loss(exact, conventions)
    (gradient_BT,) = torch.autograd.grad(output.loss, exact.logprobs)
    return output, gradient_BT
