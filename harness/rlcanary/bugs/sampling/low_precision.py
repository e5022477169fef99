"""Bugs of engines in lower precision than the trainer."""

from typing import Any

import torch

from rlcanary.bugs.museum import Bug
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.presets import GRPO


class ScalesOfOne(Bug):
    id = "slime.fp8-scale-of-one"
    source = "slime bba3e00e0"
    effect = "weights are rounded to eight bits at a scale of 1: small ones lose most bits or become zero in the engine"

    def __init__(self, conventions: Conventions | None = None) -> None:
        super().__init__(conventions or GRPO.replace(engine_tolerance=1.0))

    def sync_weights(self, state: Any, engine: Any) -> None:
        for name, weight in state.model.named_parameters():
            sent = weight.detach().to(torch.float8_e4m3fn).to(weight.dtype) if weight.ndim == 2 else weight
            engine.load_weights([(name, sent)])
        engine.reset_prefix_cache()
        engine.version += 1
