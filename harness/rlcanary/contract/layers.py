"""The layers of a model: the kinds that decide how it caches and packs, and copies of all of them."""

import copy
from collections import OrderedDict
from typing import Any


def layers_besides_attention(model: Any) -> set[str]:
    """Return the types of the layers that mix positions otherwise than by attention, as the model's config names them."""
    layers = getattr(getattr(model, "config", None), "layer_types", None) or ()
    return set(layers) - {"full_attention", "sliding_attention", "chunked_attention"}


def copied(models: Any) -> Any:
    """Copy a model, or a tuple of models and None, as `copy.deepcopy` does, in a quarter of the time.

    A module of torch has two dozen attributes, mostly flags and empty dictionaries of hooks, on which `copy.deepcopy`
    spends nearly all of its time.
    """
    memo: dict[int, Any] = {}
    return tuple(_copied(each, memo) for each in models) if isinstance(models, tuple) else _copied(models, memo)


_WAYS_OF_COPYING = ("__deepcopy__", "__getstate__", "__setstate__", "__reduce__", "__reduce_ex__")
_IMMUTABLE = frozenset({bool, int, float, str, type(None)})


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    kind = type(value)
    if kind in _IMMUTABLE:
        return value
    if kind in (dict, OrderedDict, set) and not value:
        return kind()
    from torch.nn import Module

    if id(value) in memo or not isinstance(value, Module):
        return copy.deepcopy(value, memo)
    if any(getattr(kind, name, None) is not getattr(Module, name, None) for name in _WAYS_OF_COPYING):
        return copy.deepcopy(value, memo)
    memo[id(value)] = module = object.__new__(kind)
    for name, attribute in vars(value).items():
        if name == "_modules":
            vars(module)[name] = {child: _copied(each, memo) for child, each in attribute.items()}
        else:
            vars(module)[name] = _copied(attribute, memo)
    return module
