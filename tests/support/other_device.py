"""A device `other` in Python, for tests without a GPU, and adapters of code that trains there.

What is computed on it refuses tensors that are elsewhere, as CUDA does. Frameworks ask every device of the process for more
than this one has: import it in a process of its own.
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from rlcanary.adapters.grpo import GrpoAdapter
from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.contract.adapter import NotProvided

_setup_privateuseone_for_python_backend("other")
DEVICE = torch.device("other:0")


class Elsewhere(torch.Tensor):
    """A tensor on the device; its values are in `held`, on the CPU."""

    held: torch.Tensor
    __torch_function__: ClassVar[Any] = torch._C._disabled_torch_function_impl

    def __new__(cls, held):
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        made = torch.Tensor._make_wrapper_subclass(cls, held.size(), device=DEVICE, **layout)
        made.held = held
        return made

    def tolist(self):
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        return compute(operator, *args, **(kwargs or {}))


def compute(operator, *args, **kwargs):
    """Compute on the held values; raise as CUDA does where tensors are on two devices."""
    name = operator.overloadpacket.__name__
    given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    if name == "_to_copy" and kwargs.get("device") not in (None, DEVICE, torch.device("other")):
        return operator(_held(args[0]), **{**kwargs, "device": None})
    is_mixed = any(each.ndim and not isinstance(each, Elsewhere) for each in given) and any(
        isinstance(each, Elsewhere) for each in given
    )
    if is_mixed and name not in ("index", "copy_", "_copy_from"):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {name} got some on cpu, some on other:0"
        )
    known = {id(each.held): each for each in given if isinstance(each, Elsewhere)}
    output = operator(*tree_map(_held, args), **tree_map(_held, kwargs))

    def wrapped(each):
        # An operator in place returns the tensor that it was given.
        return known.get(id(each), Elsewhere(each)) if isinstance(each, torch.Tensor) else each

    return tree_map(wrapped, output)


def _held(value):
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value.held if isinstance(value, Elsewhere) else value


# Operators without a tensor of the device, such as empty(device="other").
library = torch.library.Library("_", "IMPL")
library.fallback(compute, "PrivateUse1")


class OnTheDevice(ReferenceAdapter):
    name = "on the device"

    def token_logprobs(self, logits, token_ids, temperature):
        return super().token_logprobs(logits.to(DEVICE), token_ids.to(DEVICE), temperature)

    def completion_logprobs(self, model, batch, temperature):
        return super().completion_logprobs(moved(model), batch.to(DEVICE), temperature)

    def advantages(self, rewards, group_ids):
        return super().advantages(rewards.to(DEVICE), group_ids.to(DEVICE))

    def policy_loss(self, batch):
        return super().policy_loss(batch.to(DEVICE))

    def new_state(self, model, ref_model, learning_rate):
        if next(model.parameters()).dtype == torch.bfloat16:
            raise NotProvided("there are no float32 masters")
        return super().new_state(moved(model), ref_model and moved(ref_model), learning_rate)

    def train_step(self, state, batch):
        return super().train_step(state, batch.to(DEVICE))


class Ascending(OnTheDevice):
    def policy_loss(self, batch):
        return super().policy_loss(replace(batch, advantages=-batch.advantages))

    def train_step(self, state, batch):
        batch = batch.to(DEVICE)
        batch.rewards = -batch.rewards
        return ReferenceAdapter.train_step(self, state, batch)


class GrpoOnTheDevice(GrpoAdapter):
    name = "grpo on the device"

    def new_state(self, model, ref_model, learning_rate):
        return super().new_state(moved(model), ref_model and moved(ref_model), learning_rate)

    def train_step(self, state, batch):
        return super().train_step(state, batch.to(DEVICE))


class NotMoved(OnTheDevice):
    def train_step(self, state, batch):
        return ReferenceAdapter.train_step(self, state, batch)


def moved(model):
    # A cache would make tensors from lists, which a device in Python cannot.
    model.config.use_cache = False
    return model.to(DEVICE)
