"""One-line JSON, as results files and journals hold it."""

import json
from json import encoder

quoted = encoder.encode_basestring_ascii
"""Encodes a string as JSON."""

json_text = json.JSONEncoder(allow_nan=False).encode
"""Encodes a value as JSON. Raises ValueError for NaN and infinities, TypeError for a value without a JSON form."""


class JsonText(str):
    """JSON text that goes into a results file unchanged."""

    __slots__ = ()
