"""The kinds of layers of a model that decide how it caches and packs."""

from typing import Any


def layers_besides_attention(model: Any) -> set[str]:
    """Return the types of the layers that mix positions otherwise than by attention, as the model's config names them."""
    layers = getattr(getattr(model, "config", None), "layer_types", None) or ()
    return set(layers) - {"full_attention", "sliding_attention", "chunked_attention"}
