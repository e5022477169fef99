"""Read sections of a plan from YAML mappings into dataclasses, checking every key and type.

A mistake is named by its full key.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from rlcanary.errors import UserError

Section = TypeVar("Section")


def read_section(section: type[Section], given: Any, key: str) -> Section:
    """Read a dataclass from a mapping of its fields.

    Args:
        section: may hold other dataclasses; its own `ValueError` or `UserError` is named by `key`.
        given: the mapping in the file.
        key: its place in the file, such as "roles.sampler"; "" is the whole file.

    Raises:
        UserError: an unknown or missing key, a value of another type, or one that the section refuses.
    """
    if not isinstance(given, Mapping):
        raise UserError(f"{key or 'the plan'} is {_described(given)}, it has to be a mapping of keys to values")
    names = [field.name for field in fields(section)]  # type: ignore[arg-type]
    for name in given:
        if name not in names:
            close = get_close_matches(str(name), names, n=1)
            meant = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(names)}"
            raise UserError(f"{_joined(key, name)} is not a key of a plan: {meant}")
    hints = get_type_hints(section)
    values = {}
    for field in fields(section):  # type: ignore[arg-type]
        where = _joined(key, field.name)
        if field.name in given:
            values[field.name] = _value(hints[field.name], given[field.name], where)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise UserError(f"{where} is missing")
    try:
        return section(**values)
    except (ValueError, UserError) as error:
        raise UserError(f"{key}: {error}" if key else str(error)) from error


def _value(kind: Any, given: Any, key: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return given
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(given, kind):
        return given
    if is_dataclass(kind):
        assert isinstance(kind, type)
        return read_section(kind, given, key)
    if origin in (Union, types.UnionType):
        if given is None and type(None) in arguments:
            return None
        (kind,) = [argument for argument in arguments if argument is not type(None)]
        return _value(kind, given, key)
    if origin is Literal:
        if given not in arguments:
            raise UserError(f"{key} is {_described(given)}, it has to be one of {', '.join(map(str, arguments))}")
        return given
    if origin is tuple:
        if not isinstance(given, list):
            raise UserError(f"{key} is {_described(given)}, it has to be a list")
        is_open = arguments[-1] is Ellipsis
        if not is_open and len(given) != len(arguments):
            raise UserError(f"{key} has {len(given)} entries, it has to have {len(arguments)}")
        kinds = [arguments[0]] * len(given) if is_open else arguments
        return tuple(
            _value(one, entry, f"{key}[{index}]") for index, (one, entry) in enumerate(zip(kinds, given, strict=True))
        )
    if origin in (dict, Mapping) or kind in (dict, Mapping):
        if not isinstance(given, dict):
            raise UserError(f"{key} is {_described(given)}, it has to be a mapping of keys to values")
        return given
    return _scalar(kind, given, key)


def _scalar(kind: Any, given: Any, key: str) -> Any:
    if kind is float and isinstance(given, int) and not isinstance(given, bool):
        return float(given)
    # YAML reads 1e-3 as a text: its floats need a dot.
    if kind is float and isinstance(given, str):
        try:
            return float(given)
        except ValueError:
            pass
    if kind is Path and isinstance(given, str):
        return Path(given)
    if isinstance(given, bool) != (kind is bool) or not isinstance(given, kind):
        wanted = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", Path: "a path"}
        raise UserError(f"{key} is {_described(given)}, it has to be {wanted.get(kind, kind.__name__)}")
    return given


def _joined(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)


def _described(given: Any) -> str:
    return "empty" if given is None else repr(given)
