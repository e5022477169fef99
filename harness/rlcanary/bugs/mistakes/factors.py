"""Constant factors, as mistakes."""

from __future__ import annotations

from typing import Any

from rlcanary.bugs.mistakes.planting import Function, Patches
from rlcanary.contract.batch import LossOutput


def scalings(factor: float) -> dict[str, Patches]:
    """Return the mistakes of a constant factor."""
    told = f"{factor:g} times" if factor != -1 else "minus"

    def scaled(exact: Function) -> Function:
        def call(*given: Any) -> Any:
            output = exact(*given)
            return (
                LossOutput(output.loss * factor, output.metrics) if isinstance(output, LossOutput) else output * factor
            )

        return call

    def gradient(exact: Function) -> Function:
        def call(*given: Any) -> Any:
            output = exact(*given)
            moving = factor * (output.loss - output.loss.detach())
            return LossOutput(output.loss.detach() + moving, output.metrics)

        return call

    no_gradient = "the loss has no gradient" if factor == 0 else f"the gradient of the loss is {told} the declared one"
    return {
        f"the loss is {told} the declared one": {"losses.policy_loss": scaled},
        no_gradient: {"losses.policy_loss": gradient},
        f"the loss over micro-batches or ranks is {told} the declared one": {"losses.accumulated_loss": scaled},
        f"the advantages are {told} the declared ones": {"advantages.advantages": scaled},
        f"the KL is {told} the declared one": {"kl.kl": scaled},
        f"the entropy is {told} the true one": {"logprobs.entropy": scaled},
        f"the importance weights are {told} the declared ones": {"losses.importance_weights": scaled},
        f"the logprobs are {told} the true ones": {"logprobs.token_logprobs": scaled},
    }
