"""Half precision: models in it, and the error that it allows."""

from typing import Any

import torch

from rlcanary.checks.worlds.training.tiny_trainer import tiny_policy


def bfloat16() -> Any:
    """The Llama in bfloat16, whose trainer needs float32 masters outside the model."""
    return tiny_policy().to(torch.bfloat16)


def float16() -> Any:
    """The Llama in float16, whose numbers end at 65504."""
    return tiny_policy().to(torch.float16)
