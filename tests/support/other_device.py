"""A device `other` in Python, for tests without a GPU: what is computed there refuses tensors that are not."""

from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

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
