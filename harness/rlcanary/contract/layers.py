"""The layers of a model: the kinds that decide how it caches and packs, and copies of all of them."""

import copy
from collections import OrderedDict
from typing import Any


def layers_besides_attention(model: Any) -> set[str]:
    """Return the types of the layers that mix positions otherwise than by attention, as the model's config names them."""
    layers = getattr(getattr(model, "config", None), "layer_types", None) or ()
    return set(layers) - {"full_attention", "sliding_attention", "chunked_attention"}


def copied(models: Any) -> Any:
    """Copy a model, or a tuple of models and None, as `copy.deepcopy` does, in half the time.

    A module of torch has a dozen dictionaries of hooks, nearly all empty, on which `copy.deepcopy` spends most of its time.
    """
    given = models if isinstance(models, tuple) else (models,)
    fresh = {
        id(each): type(each)()
        for model in given
        if model is not None
        for module in model.modules()
        for each in vars(module).values()
        if type(each) in (dict, OrderedDict) and not each
    }
    return copy.deepcopy(models, fresh)
