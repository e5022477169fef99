"""JSON on one line, as results files and journals hold it."""

import json
from collections.abc import Callable
from json import encoder

quoted = encoder.encode_basestring_ascii
"""The JSON of a string."""


class JsonText(str):
    """JSON text that goes into a results file as it is."""

    __slots__ = ()


def _encoder() -> Callable[[object], str]:
    """`json.JSONEncoder(allow_nan=False).encode`, which makes its encoder in C anew at each call; a short record takes as
    long to encode.
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
"""The JSON of a value. Raises ValueError for NaN and infinities, TypeError for what has no JSON form."""
