"""The state that a run starts from: frozen parts, adapters, AdamW, its learning-rate schedule and the reference model."""

import math
from typing import Any

import torch
from torch import Tensor

from rlcanary.contract.conventions import Conventions
from rlcanary.contract.declining import NotProvided
from rlcanary.contract.layers import copied
from rlcanary.contract.records.building import LoraSettings, RunSettings
from rlcanary.contract.state import TrainState


class LoraLinear(torch.nn.Module):
    """A linear layer plus alpha / rank times B A (LoRA, arXiv 2106.09685), where B starts at zero."""

    def __init__(self, base: torch.nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base, self.scale = base, alpha / rank
        self.lora_A = torch.nn.Parameter(torch.empty(rank, base.in_features))
        self.lora_B = torch.nn.Parameter(torch.zeros(base.out_features, rank))
        torch.nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        return y + self.scale * (x @ self.lora_A.T) @ self.lora_B.T


def build(settings: RunSettings, model: Any, conventions: Conventions) -> TrainState:
    """Build the state of a new run.

    Args:
        settings: all of them are used.
        model: the loaded model, which is trained itself, in float32 whatever its dtype: at a learning rate of 1e-6 most
            updates are below the resolution of bfloat16.
        conventions: `kl_coef` says whether there is a reference model, `decayed` which parameters decay.

    Raises:
        NotProvided: the model has no such layers, or cannot checkpoint.
    """
    model.float()
    ref_model = copied(model).eval().requires_grad_(False) if conventions.kl_coef else None
    for name, parameter in model.named_parameters():
        if any(part in name for part in settings.frozen):
            parameter.requires_grad_(False)
    if settings.lora is not None:
        add_adapters(model, settings.lora)
    if settings.gradient_checkpointing:
        if not getattr(model, "supports_gradient_checkpointing", False):
            raise NotProvided("the model cannot checkpoint its gradients")
        # The reentrant kind gives no gradient to a layer whose inputs need none, as behind a frozen embedding.
        model.config.use_cache = False
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [each for each in trained if is_decayed(each, conventions)]
    others = [each for each in trained if not is_decayed(each, conventions)]
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.eps)
    last = settings.total_updates
    shares = [rate_share(settings, update) for update in range(last + 1)]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: shares[min(update, last)])
    return TrainState(model, optimizer, scheduler, ref_model)


def add_adapters(model: Any, lora: LoraSettings) -> None:
    """Freeze a model and put adapters on its target layers.

    Raises:
        NotProvided: no linear layer has such a name.
    """
    model.requires_grad_(False)
    targets = [
        (parent, name, layer)
        for parent in list(model.modules())
        for name, layer in parent.named_children()
        if name in lora.targets and isinstance(layer, torch.nn.Linear)
    ]
    if not targets:
        raise NotProvided(f"the model has no linear layer named {' or '.join(lora.targets)}")
    for parent, name, layer in targets:
        setattr(parent, name, LoraLinear(layer, lora.rank, lora.alpha))


def is_decayed(parameter: Tensor, conventions: Conventions) -> bool:
    """Tell whether weight decay is meant for a parameter."""
    return conventions.decayed == "all" or parameter.ndim >= 2


def rate_share(settings: RunSettings, update: int) -> float:
    """Compute the learning rate of an update, counted from 0, as a share of the peak.

    The warm-up rises in equal steps, of which the first is above zero, so that no update is lost. Behind it the rate falls
    from 1 to `final_share`, at which it would arrive in the update after the last one and stays.
    """
    if update < settings.warmup_updates:
        return (update + 1) / (settings.warmup_updates + 1)
    if settings.rate_shape == "constant":
        return 1.0
    progress = min(1.0, (update - settings.warmup_updates) / max(1, settings.total_updates - settings.warmup_updates))
    left = 1 - progress if settings.rate_shape == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return settings.final_share + (1 - settings.final_share) * left
