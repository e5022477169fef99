"""States and their models: seeded, perturbed, rounded and scored."""

import copy
import math
import random
import warnings
import zlib
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from rlcanary import reference
from rlcanary.checks.devices import cuda_generators
from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.batch import CollatedBatch, Completion, Group
from rlcanary.contract.layers import copied
from rlcanary.reference.step import forward_mode


def seeded(make: Callable[..., Any], *arguments: Any, seed: int = 0) -> Any:
    """Call a function under a fixed seed, and restore the random generators."""
    before = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        with torch.random.fork_rng(devices=cuda_generators()):
            torch.manual_seed(seed)
            return make(*arguments)
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def nudged(model: Any, scale: float = 0.05, only: Collection[str] | None = None, seed: int = 0) -> Any:
    """Add noise to every parameter of the model, or to those of these names, in proportion to the parameter's size."""
    generator = torch.Generator().manual_seed(seed)
    sizes = sizes_of(model)
    with torch.no_grad():
        for name, parameter in named(model).items():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            if only is None or name in only:
                parameter.add_(noise * sizes[name] * scale)
    return model


def sizes_of(model: Any) -> dict[str, float]:
    """Return the size of each parameter's entries; for an all-zero one, such as a bias or adapter, that of the others."""
    parameters = {name: parameter.detach().float() for name, parameter in named(model).items()}
    squares = sum(float(parameter.square().sum()) for parameter in parameters.values())
    typical = math.sqrt(squares / sum(parameter.numel() for parameter in parameters.values()))
    own = {name: float(parameter.square().mean().sqrt()) for name, parameter in parameters.items()}
    return {name: size if size > 1e-3 * typical else typical for name, size in own.items()}


def toned(model: Any, factor: float) -> Any:
    """Return the model with its last norm and output layer scaled, which scales all gradients.

    Raises:
        NotProvided: the model has no such layers.
    """
    if factor == 1:
        return model
    weights = [module.weight for module in model.modules() if isinstance(getattr(module, "weight", None), Tensor)]
    norms = [weight for weight in weights if weight.ndim == 1]
    if not norms or not hasattr(model, "get_output_embeddings"):
        raise NotProvided("the model has no last norm and output layer to scale its gradients with")
    with torch.no_grad():
        norms[-1].mul_(factor)
        model.get_output_embeddings().weight.mul_(factor)
    return model


def coin(model: Any, bias: float, others: int) -> Any:
    """Return the tiny model, made to continue with 8 8 8 …, or with one of so many other ids and then 9 9 9 ….

    As the first token 8 is `bias` nats likelier than each of the others. Against many others, its share tells more of the
    temperature than against one.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Layers that add nothing leave the embedding as it is, and the norm stretches it to the root of the width.
            parameter.fill_(1.0 if name == "model.norm.weight" else 0.0)
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        axes = torch.eye(embedding.shape[1])
        embedding[:], embedding[8], embedding[9 : 9 + others] = axes[0], axes[1], axes[2]
        head[:, :3] = -40.0
        head[8, 0], head[8, 1] = bias / math.sqrt(embedding.shape[1]), 40.0
        head[9 : 9 + others, 0], head[9, 2] = 0.0, 40.0
    return model


def shaken(state: Any, allowed: float = 0.0, only: Collection[str] | None = None) -> Any:
    """Add noise to all weights of the state, enough to change the logprobs of completions visibly.

    That is by four times the rounding, or by twice the given number of nats. No weight outgrows its size, since the
    rounding of an engine in lower precision grows with it. The noise depends on the weights: the same noise again and again
    would move them ever less. Copies that the optimizer moves, such as float32 masters, get the same noise. `only` names
    the parameters that get any.

    Raises:
        NotProvided: noise does not change what the model computes.
    """
    batch, _ = reference.make_batch([Group([5, 6, 7], [Completion([8, 9])], [0.0])], 0)
    copies, _ = held(state)
    before_BT, sizes = own_logprobs(state.model, batch), sizes_of(state.model)
    visible = max(4 * nats(state.model), 2 * allowed)
    for doubling in range(7):
        parameters = named(state.model)
        seed = zlib.crc32(b"".join(each.detach().float().cpu().numpy().tobytes() for each in parameters.values()))
        nudged(state.model, 0.05 * 2**doubling, only, seed)
        with torch.no_grad():
            for name in parameters.keys() if only is None else only:
                parameter = parameters[name]
                parameter.mul_((sizes[name] / parameter.float().square().mean().sqrt()).clamp(max=1.0))
            for name, tensor in copies.items():
                if tensor is not parameters[name]:
                    tensor.copy_(parameters[name])
        if float((own_logprobs(state.model, batch) - before_BT).abs().nan_to_num().max()) > visible:
            return state
    raise NotProvided("noise on the parameters of state.model does not change its logprobs")


def started(state: Any) -> Any:
    """Return the state after an update with gradients of one, which are kept."""
    moved = [tensor for group in state.optimizer.param_groups for tensor in group["params"]]
    for parameter in (*state.model.parameters(), *moved):
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    state.optimizer.step()
    if state.scheduler is not None:
        state.scheduler.step()
    return state


def decaying(state: Any) -> Any:
    """Set the state's own scheduler to 1 / (k + 1) of the learning rate in update k = 0, 1, 2, ….

    Raises:
        NotProvided: there is none, or not one of torch's that follow a formula.
    """
    scheduler = state.scheduler
    if scheduler is None:
        raise NotProvided("the learning rate is constant")
    if not isinstance(scheduler, LRScheduler) or type(scheduler).step is not LRScheduler.step:
        raise NotProvided(f"{type(scheduler).__name__} follows no formula")
    scheduler.__class__ = type("Decaying", (_Decaying, type(scheduler)), {})
    for group, rate in zip(state.optimizer.param_groups, scheduler.base_lrs, strict=True):
        group["lr"] = rate
    return state


class _Decaying:
    base_lrs: list[float]
    last_epoch: int

    def get_lr(self) -> list[float]:
        return [rate / (self.last_epoch + 1) for rate in self.base_lrs]


def scheduled_rates(state: Any, updates: int) -> list[list[float]]:
    """Return the learning rates, by update and group, of a scheduler that is stepped once after each update."""
    optimizer, scheduler = copy.deepcopy((state.optimizer, state.scheduler))
    rates = []
    with warnings.catch_warnings():
        # Torch warns of a scheduler that is stepped before its optimizer.
        warnings.simplefilter("ignore")
        for _ in range(updates):
            rates.append([float(group["lr"]) for group in optimizer.param_groups])
            if scheduler is not None:
                scheduler.step()
    return rates


def held(state: Any) -> tuple[dict[str, Tensor], int]:
    """Return the tensors that a state's optimizer moves, by parameter, and the number of them that belong to none.

    A copy, such as a float32 master of a bfloat16 parameter, is matched by its values: rounded, they equal the
    parameter's. Equal parameters are matched in order.
    """
    tensors = [tensor for group in state.optimizer.param_groups for tensor in group["params"]]
    parameters = named(state.model)
    names = {id(parameter): name for name, parameter in parameters.items()}
    found = {names[id(tensor)]: tensor for tensor in tensors if id(tensor) in names}
    copies = [tensor for tensor in tensors if id(tensor) not in names]
    for name, parameter in parameters.items():
        if name in found or not parameter.requires_grad:
            continue
        for place, tensor in enumerate(copies):
            if tensor.shape == parameter.shape and torch.equal(tensor.detach().to(parameter), parameter):
                found[name] = copies.pop(place)
                break
    return found, len(copies)


def named(model: Any) -> dict[str, Tensor]:
    """Return the parameters by name, without the prefixes of wrappers."""
    return {
        name.replace("_orig_mod.", "").removeprefix("module."): parameter
        for name, parameter in model.named_parameters()
    }


def weights_of(state: Any) -> dict[str, Tensor]:
    """Return the weights of a state by name, those that its optimizer moves included."""
    return {**named(state.model), **{f"moved {name}": tensor for name, tensor in held(state)[0].items()}}


def own_logprobs(model: Any, batch: CollatedBatch, temperature: float = 1.0) -> Tensor:
    """[B, T] logprobs of a batch's completions on the CPU, by a model in its own precision, without dropout and gradient."""
    with torch.no_grad(), forward_mode(model, training=False):
        return reference.completion_logprobs(model, batch.to(device_of(model)), temperature).cpu()


def device_of(model: Any) -> torch.device:
    """The device of a model's first parameter."""
    device: torch.device = next(model.parameters()).device
    return device


def precision(model: Any) -> torch.dtype:
    """The coarsest dtype of a model's parameters."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def is_coarse(model: Any) -> bool:
    """Tell whether a model has parameters in half precision."""
    return torch.finfo(precision(model)).eps > torch.finfo(torch.float32).eps


def in_precision_of(state: Any, ref_model: Any) -> Any:
    """Round a reference model as the state rounds its own; None stays None."""
    dtype = precision(state.model if state.ref_model is None else state.ref_model)
    return None if ref_model is None else ref_model.to(dtype)


def nats(model: Any) -> float:
    """Return the allowed difference in nats of logprobs computed from the same weights by other kernels.

    In float32 the smallest mistake measured on real engines is a hundred times as large.
    """
    return max(1e-4, 25 * torch.finfo(precision(model)).eps)


def unwrapped(model: Any) -> Any:
    """Unwrap a model from torch.compile and data parallelism; None stays None."""
    while isinstance(model, torch.nn.DataParallel | torch.nn.parallel.DistributedDataParallel) or hasattr(
        model, "_orig_mod"
    ):
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module
    return model


def policy_gap(state: Any, model: Any, batch: CollatedBatch) -> float:
    """Return the largest difference in nats between a state's model and another one in the same precision."""
    rounded = copied(model).to(precision(state.model))
    difference_BT = own_logprobs(state.model, batch).double() - own_logprobs(rounded, batch).double()
    gap = float(difference_BT[batch.completion_mask].abs().max())
    return math.inf if math.isnan(gap) else gap


def lead(model: Any, batch: CollatedBatch) -> float:
    """Return the log-ratio in nats of a batch's first completion to its second, in float64."""
    logprobs_BT = own_logprobs(copied(unwrapped(model)).double(), batch)
    logprobs_B = logprobs_BT.nansum(dim=1)
    return float(logprobs_B[0] - logprobs_B[1])
