"""Low-rank adapters on a policy's linear layers (LoRA, arXiv 2106.09685), and the weights that engines get for them.

Shapes: I inputs, O outputs, R rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlcanary.errors import UserError
from rlcanary.grpo.plan.models import LoraSettings


class LoraLinear(torch.nn.Linear):
    """A linear layer plus alpha / rank × B A, where B starts at zero. Its weight and its bias keep their names."""

    def __init__(self, layer: torch.nn.Linear, settings: LoraSettings, random: torch.Generator) -> None:
        super().__init__(layer.in_features, layer.out_features, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.scale = settings.alpha / settings.rank
        bound = layer.in_features**-0.5
        lora_A_RI = torch.empty(settings.rank, layer.in_features).uniform_(-bound, bound, generator=random)
        self.lora_A = torch.nn.Parameter(lora_A_RI.to(layer.weight))
        self.lora_B = torch.nn.Parameter(layer.weight.new_zeros(layer.out_features, settings.rank))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.scale * (x @ self.lora_A.T) @ self.lora_B.T

    def merged(self) -> Tensor:
        """Compute the [O, I] weight of a plain layer that does the same, in float32 for half precision."""
        return (self.weight + self.scale * (self.lora_B.float() @ self.lora_A.float())).detach()


def add_adapters(model: Any, settings: LoraSettings, seed: int) -> None:
    """Freeze a model and put adapters on its target layers.

    Raises:
        UserError: as `target_layers`.
    """
    random = torch.Generator().manual_seed(seed)
    model.requires_grad_(False)
    for name, layer in target_layers(model, settings).items():
        parent, _, own_name = name.rpartition(".")
        setattr(model.get_submodule(parent), own_name, LoraLinear(layer, settings, random))


def target_layers(model: Any, settings: LoraSettings) -> dict[str, torch.nn.Linear]:
    """Find the layers that get adapters, by their names in the model.

    Raises:
        UserError: a target is no linear layer of the model, or shares its weight with the embedding.
    """
    linear = {name: each for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)}
    head = model.get_output_embeddings()
    kinds = {name.rpartition(".")[2] for name, layer in linear.items() if layer is not head}
    wanted = kinds if settings.targets is None else set(settings.targets)
    found = {name: layer for name, layer in linear.items() if name.rpartition(".")[2] in wanted}
    missing = sorted(wanted - {name.rpartition(".")[2] for name in found})
    if missing or not found:
        told = f"named {missing[0]!r}, there are {', '.join(sorted(kinds)) or 'none'}" if missing else "for adapters"
        raise UserError(f"lora.targets: the model has no linear layer {told}")
    if head in found.values() and head.weight is model.get_input_embeddings().weight:
        raise UserError("lora.targets: the output layer shares its weight with the embedding: leave it out")
    return found


def merged_weights(model: Any) -> dict[str, Tensor]:
    """Return a model's parameters by name, with its adapters merged into copies. The model itself stays as it is."""
    weights = dict(model.named_parameters())
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLinear):
            del weights[f"{name}.lora_A"], weights[f"{name}.lora_B"]
            weights[f"{name}.weight"] = layer.merged()
    return weights
