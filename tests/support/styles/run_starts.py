"""The start of a run by hand: decay by name, torch's own schedulers, adapters in hooks, samplers of torch.utils.data.

The reference of a policy with adapters is the policy itself, whose adapters are off while it scores.
"""

import copy
from itertools import islice

import torch
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, DistributedSampler

from rlcanary.contract.adapter import NotProvided, TrainState
from rlcanary.contract.records.building import RunPlan


def add_low_rank(layer, inputs, output):
    return output + (inputs[0] @ layer.down @ layer.up) * layer.scale * layer.is_on


class WithoutAdapters(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **inputs):
        adapted = [layer for layer in self.model.modules() if hasattr(layer, "is_on")]
        for layer in adapted:
            layer.is_on = False
        try:
            return self.model(**inputs)
        finally:
            for layer in adapted:
                layer.is_on = True


class RunStarts:
    def build(self, settings, model):
        model = model.float()
        reference = None
        if self.conventions.kl_coef:
            reference = WithoutAdapters(model) if settings.lora else copy.deepcopy(model).requires_grad_(False)
        for name, weight in model.named_parameters():
            weight.requires_grad = not settings.lora and all(name.find(part) < 0 for part in settings.frozen)
        if settings.lora:
            self._adapt(model, settings.lora)
        if settings.gradient_checkpointing:
            if not hasattr(model, "gradient_checkpointing_enable"):
                raise NotProvided("no checkpoints in such a model")
            model.gradient_checkpointing_enable({"use_reentrant": True})
            # Without it layers behind a frozen embedding get no gradient.
            model.enable_input_require_grads()
        groups = {0.0: [], settings.weight_decay: []}
        for name, weight in model.named_parameters():
            light = "norm" in name or "ln_" in name or name.endswith("bias")
            # Those that are not trained have no gradient, which the optimizer passes over.
            groups[0.0 if light else settings.weight_decay].append(weight)
        optimizer = torch.optim.AdamW(
            [{"params": weights, "weight_decay": decay} for decay, weights in groups.items() if weights],
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.eps,
        )
        return TrainState(model, optimizer, self._schedule(settings, optimizer), reference)

    def _adapt(self, model, lora):
        found = [
            module
            for name, module in model.named_modules()
            if name.split(".")[-1] in lora.targets and isinstance(module, torch.nn.Linear)
        ]
        if not found:
            raise NotProvided("no such layer")
        for layer in found:
            layer.down = torch.nn.Parameter(torch.randn(layer.in_features, lora.rank) / lora.rank)
            layer.up = torch.nn.Parameter(torch.zeros(lora.rank, layer.out_features))
            layer.scale, layer.is_on = lora.alpha / lora.rank, True
            layer.register_forward_hook(add_low_rank)

    def _schedule(self, settings, optimizer):
        """The warm-up starts at 1 / n and is over with the n-th update; a straight line arrives in the last one."""
        n, left = settings.warmup_updates, settings.total_updates - settings.warmup_updates
        if settings.rate_shape == "constant":
            behind = ConstantLR(optimizer, 1.0)
        elif settings.rate_shape == "linear":
            behind = LinearLR(optimizer, 1.0, settings.final_share, left - 1)
        else:
            behind = CosineAnnealingLR(optimizer, left, settings.final_share * settings.learning_rate)
        if n < 2:
            return behind
        return SequentialLR(optimizer, [LinearLR(optimizer, 1 / n, 1.0, n - 1), behind], [n])

    def run_plan(self, settings):
        own = settings.prompts_per_batch // settings.ranks
        if own * settings.ranks != settings.prompts_per_batch:
            raise NotProvided("every rank has as many prompts")
        by_rank = []
        for rank in range(settings.ranks):
            items = range(settings.n_items)
            sampler = DistributedSampler(items, settings.ranks, rank, drop_last=settings.drop_last)
            loader = DataLoader(items, own, sampler=sampler, drop_last=settings.drop_last)

            def batches(sampler=sampler, loader=loader):
                for epoch in range(settings.epochs):
                    sampler.set_epoch(epoch)
                    yield from loader

            by_rank.append([batch.tolist() for batch in islice(batches(), settings.max_batches)])
        updates = len(by_rank[0])
        return RunPlan(by_rank, updates, updates)
