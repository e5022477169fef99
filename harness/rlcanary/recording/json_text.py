"""One-line JSON, as results files and journals hold it."""

import json
from collections.abc import Callable
from json import encoder

quoted = encoder.encode_basestring_ascii
"""Encodes a string as JSON."""


class JsonText(str):
    """JSON text that goes into a results file unchanged."""

    __slots__ = ()


def _encoder() -> Callable[[object], str]:
    """Builds `json.JSONEncoder(allow_nan=False).encode` once.

    The standard one makes its C encoder anew at each call, which takes as long as encoding a short record.
    """
    slow = json.JSONEncoder(allow_nan=False)
    make = getattr(encoder, "c_make_encoder", None)
    if make is None:
        return slow.encode
    colon, comma = slow.key_separator, slow.item_separator
    # No markers of circular references, no indent, no sorted or skipped keys, no NaN.
    chunks = make(None, slow.default, quoted, None, colon, comma, False, False, False)
    return lambda value: "".join(chunks(value, 0))


json_text = _encoder()
"""Encodes a value as JSON. Raises ValueError for NaN and infinities, TypeError for a value without a JSON form."""
