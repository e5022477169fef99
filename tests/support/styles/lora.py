"""A correct trainer of low-rank adapters: the base is frozen, B starts at zero, a sync merges, sends and unmerges."""

import math
from typing import Any

import torch
from torch import Tensor

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.contract.adapter import NotProvided, TrainState
from rlcanary.contract.batch import CollatedBatch
from rlcanary.contract.conventions import Conventions

RANK, ALPHA = 4, 8


class LoraLinear(torch.nn.Module):
    """A frozen linear layer plus alpha / rank times B A; what is merged into the base is not added again."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = torch.nn.Parameter(torch.empty(RANK, base.in_features, dtype=base.weight.dtype))
        torch.nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.lora_B = torch.nn.Parameter(torch.zeros(base.out_features, RANK, dtype=base.weight.dtype))
        self.is_merged = False

    @property
    def delta(self) -> Tensor:
        return ALPHA / RANK * self.lora_B @ self.lora_A

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        return y if self.is_merged else y + ALPHA / RANK * (x @ self.lora_A.T) @ self.lora_B.T

    def merge(self, sign: int) -> None:
        with torch.no_grad():
            self.base.weight += sign * self.delta
        self.is_merged = sign > 0


def layers(model: Any) -> list[LoraLinear]:
    return [module for module in model.modules() if isinstance(module, LoraLinear)]


class Lora(ReferenceAdapter):
    """Adapters on the projections of attention, AdamW on them alone."""

    name = "lora"

    def __init__(self, conventions: Conventions | None = None) -> None:
        super().__init__(conventions or Conventions())

    def new_state(self, model: Any, ref_model: Any, learning_rate: float) -> Any:
        if not hasattr(model, "model") or not hasattr(model.model.layers[0], "self_attn"):
            raise NotProvided("adapters on the attention of Llama only")
        if not isinstance(model.model.layers[0].self_attn.q_proj, torch.nn.Linear):
            raise NotProvided("the model has adapters already")
        if model.dtype != torch.float32:
            raise NotProvided("the adapters have no float32 masters")
        model.requires_grad_(False)
        for layer in model.model.layers:
            for name in ("q_proj", "v_proj", "o_proj"):
                setattr(layer.self_attn, name, LoraLinear(getattr(layer.self_attn, name)))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=0.0)
        return TrainState(model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0), ref_model)

    def merged_weights(self, model: Any) -> list[tuple[str, Tensor]]:
        return [
            (name.replace(".base.", "."), weight) for name, weight in model.named_parameters() if "lora_" not in name
        ]

    def sync_weights(self, state: Any, engine: Any) -> None:
        for layer in layers(state.model):
            layer.merge(1)
        try:
            engine.load_weights(self.merged_weights(state.model))
        finally:
            for layer in layers(state.model):
                layer.merge(-1)
        engine.reset_prefix_cache()
        engine.version += 1

    def evaluate(self, state: Any) -> dict[str, float]:
        sampling = {"temperature": self.conventions.evaluation_temperature, "max_new_tokens": 8}
        completions = super().new_engine(state.model).generate([item.prompt_ids for item in state.eval_items], sampling)
        rewards = self.score(list(state.eval_items), [sampled.text for (sampled,) in completions])
        return {"reward": float(rewards.double().mean())}


class AdaptersAlone(Lora):
    """The engine keeps the checkpoint's base: a sync sends the layers that have adapters, merged."""

    def __init__(self, conventions: Conventions | None = None) -> None:
        super().__init__(conventions or Conventions(sync_frozen=False))

    def merged_weights(self, model: Any) -> list[tuple[str, Tensor]]:
        return [
            (f"{name}.weight", layer.base.weight)
            for name, layer in model.named_modules()
            if isinstance(layer, LoraLinear)
        ]


class OneKindOfAdapterNeverSent(AdaptersAlone):
    def merged_weights(self, model: Any) -> list[tuple[str, Tensor]]:
        return [(name, weight) for name, weight in super().merged_weights(model) if "o_proj" not in name]


class GradientsTimes(Lora):
    """Every gradient is multiplied on its way to the optimizer, after it was clipped."""

    factor = 1.0

    def new_state(self, model: Any, ref_model: Any, learning_rate: float) -> Any:
        state = super().new_state(model, ref_model, learning_rate)
        for parameter in state.model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient: self.factor * gradient)
        return state


class GradientsTimesMinusThree(GradientsTimes):
    factor = -3.0


class GradientsHalvedBelowTheirBound(GradientsTimes):
    """The trainer that a declared max_grad_norm hides where every gradient is longer than it."""

    factor = 0.5

    def __init__(self, conventions: Conventions | None = None) -> None:
        super().__init__(conventions or Conventions(max_grad_norm=1.0))

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        metrics = super().train_step(state, batch)
        del metrics["grad_norm"]
        return metrics


class AdapterNeverSent(Lora):
    def sync_weights(self, state: Any, engine: Any) -> None:
        engine.load_weights(self.merged_weights(state.model))
        engine.reset_prefix_cache()
        engine.version += 1


class MergeNeverUndone(Lora):
    def sync_weights(self, state: Any, engine: Any) -> None:
        for layer in layers(state.model):
            layer.merge(1)
        engine.load_weights(self.merged_weights(state.model))
        engine.reset_prefix_cache()
        engine.version += 1


class NoiseAfterTheFirstUpdate(Lora):
    """The frozen base is noise once an update is done, as after a reload into a model that was made anew."""

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        metrics = super().train_step(state, batch)
        random = torch.Generator().manual_seed(0)
        for parameter in state.model.parameters():
            if not parameter.requires_grad:
                parameter.data = torch.randn(parameter.shape, generator=random) * 0.3
        return metrics
