"""Turn tracked values into plain JSON values, and list the numbers that were not finite."""

import dataclasses
import datetime
import decimal
import enum
import math
import numbers
import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

# A metric is a number or a handful of them. A larger array in every results file of every run would make the history
# slow and useless.
MAX_ARRAY_ELEMENTS = 1000
MAX_DEPTH = 50
MAX_BITS = 14_000  # Python reads and writes 4,300 digits


class EncodingError(TypeError):
    """A value that cannot be written as JSON; the message names the place within the value and the remedy."""


class NonFinite(NamedTuple):
    """A number written as null: its place within the value, and the number.

    The place is "" for the value itself, else a path such as `["loss"][3]`.
    """

    path: str
    value: str  # "nan", "inf" or "-inf"


class Encoded(NamedTuple):
    value: Any
    nonfinite: list[NonFinite]


def encode(value: object) -> Encoded:
    """Encodes a tracked value as plain JSON values.

    Accepted, also nested: None, bool, int, str; float, Decimal, Fraction and other real numbers (as the nearest float);
    tensors and numpy or jax arrays and scalars of at most MAX_ARRAY_ELEMENTS elements (as numbers or nested lists); Path
    (its text), date, time, datetime (ISO 8601), timedelta (seconds), Enum (its value), dataclasses and mappings (objects),
    lists and tuples. NaN and infinities become None and are listed in `nonfinite`, because JSON has no such numbers.

    Raises:
        EncodingError: for everything else.
    """
    nonfinite: list[NonFinite] = []
    return Encoded(_encode(value, "", 0, nonfinite), nonfinite)


def _encode(value: object, path: str, depth: int, nonfinite: list[NonFinite]) -> Any:
    if depth > MAX_DEPTH:
        raise EncodingError(f"{_place(path)} is nested more than {MAX_DEPTH} deep (does it contain itself?)")

    def inner(item: object, step: str) -> Any:
        return _encode(item, path + step, depth + 1, nonfinite)

    match value:
        case enum.Enum():
            return inner(value.value, "")
        case None | bool():
            return value
        case int():
            return _whole(value, path)
        case float() | decimal.Decimal() | numbers.Real() if not isinstance(value, numbers.Integral):  # those of numpy
            number = _real(value, path)
            if math.isfinite(number):
                return number
            nonfinite.append(NonFinite(path, repr(number)))
            return None
        case str():
            return str.__str__(value)
        case os.PathLike():
            return os.fspath(value) if isinstance(os.fspath(value), str) else os.fsdecode(value)
        case datetime.date() | datetime.time():  # a datetime is a date
            return value.isoformat()
        case datetime.timedelta():
            return value.total_seconds()
        case list() | tuple():
            return [inner(item, f"[{index}]") for index, item in enumerate(value)]
        case Mapping():
            encoded = {_object_key(key, value, path): inner(item, f"[{key!r}]") for key, item in value.items()}
            if len(encoded) < len(value):
                raise EncodingError(f"{_place(path)} has keys that are one key in JSON: {list(value)}")
            return encoded
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: inner(getattr(value, field.name), f".{field.name}") for field in dataclasses.fields(value)}
    if isinstance(value, numbers.Complex) and not isinstance(value, numbers.Real):
        raise EncodingError(f"{_place(path)} is a complex number, which has no JSON form. Track its parts, or its size")
    if isinstance(value, _array_types()):
        return inner(_array_to_lists(value, path), "")
    raise EncodingError(
        f"{_place(path)} is a {_type_name(value)}, which has no JSON form. Track a number, a string, a small "
        "tensor or array, or a list, dict or dataclass of these"
    )


def _object_key(key: object, mapping: Mapping[Any, object], path: str) -> str:
    if isinstance(key, enum.Enum):
        key = key.value
    if isinstance(key, str):
        return str.__str__(key)
    if isinstance(key, int) and not isinstance(key, bool):
        text = str(_whole(key, path))
        if text in mapping:
            raise EncodingError(
                f"{_place(path)} has both the key {key!r} and the key {text!r}, which are one key in JSON"
            )
        return text
    raise EncodingError(f"{_place(path)} has the key {key!r} ({_type_name(key)}); keys must be str or int")


def _whole(number: int, path: str) -> int:
    if number.bit_length() > MAX_BITS:
        raise EncodingError(f"{_place(path)} is a whole number of more than {MAX_BITS} bits, which JSON readers reject")
    return int(number)


def _real(number: Any, path: str) -> float:
    if isinstance(number, decimal.Decimal) and number.is_nan():  # a signalling one is no float
        return math.nan
    try:
        value = float(number)
    except OverflowError:
        value = math.inf
    if math.isinf(value) and value != number:
        raise EncodingError(
            f"{_place(path)} is a {_type_name(number)} beyond the range of a float, which is what JSON readers make of it"
        )
    return value


def _array_types() -> tuple[type, ...]:
    # A value can only be a tensor if its library is loaded, so nothing is ever imported for the question.
    names = {"numpy": ("ndarray", "generic"), "torch": ("Tensor",), "jax": ("Array",)}
    loaded = ((sys.modules.get(module), classes) for module, classes in names.items())
    found = (getattr(module, name, None) for module, classes in loaded for name in classes)
    return tuple(candidate for candidate in found if isinstance(candidate, type))


def _array_to_lists(array: Any, path: str) -> object:
    shape = tuple(array.shape)
    elements = math.prod(shape)
    if elements > MAX_ARRAY_ELEMENTS:
        raise EncodingError(
            f"{_place(path)} is a {_type_name(array)} of shape {shape}: {elements} elements, at most "
            f"{MAX_ARRAY_ELEMENTS} are kept. Track a summary of it (mean, max, norm)"
        )
    try:
        return array.tolist()
    except (
        RuntimeError,
        NotImplementedError,
        TypeError,
        ValueError,
    ) as error:  # meta, sparse and fake tensors hold no plain numbers
        raise EncodingError(f"{_place(path)} is a {_type_name(array)} without readable elements: {error}") from error


def _place(path: str) -> str:
    return f"the value at {path}" if path else "the value"


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
