"""Python expressions for values, so that a counterexample can be pasted and run."""

import math
import textwrap
from dataclasses import Field, fields, is_dataclass
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlcanary.checks.case import Model


def literal(value: Any) -> str:
    """Write a value as Python: numbers, strings, containers, tensors, dataclasses, functions of a module and their partials.

    Raises:
        TypeError: values of this type cannot be written as Python.
    """
    match value:
        case Tensor():
            return _tensor(value)
        case float():
            return _number(value)
        case None | bool() | int() | str():
            return repr(value)
        case FunctionType():
            return value.__name__
        case Model():
            return value.code or f"{literal(value.make)}()"
        case partial():
            keywords = [f"{name}={literal(item)}" for name, item in value.keywords.items()]
            return f"partial({', '.join([*map(literal, [value.func, *value.args]), *keywords])})"
        case list():
            return _joined("[", list(map(literal, value)), "]")
        case tuple():
            return f"({', '.join(map(literal, value))}{',' if len(value) == 1 else ''})"
        case dict():
            return "{" + ", ".join(f"{literal(key)}: {literal(item)}" for key, item in value.items()) + "}"
    if is_dataclass(value) and not isinstance(value, type):
        given = [field for field in fields(value) if field.init and not _is_default(field, getattr(value, field.name))]
        parts = [f"{field.name}={literal(getattr(value, field.name))}" for field in given]
        return _joined(f"{type(value).__name__}(", parts, ")")
    raise TypeError(f"no literal for {type(value).__name__}")


def _is_default(field: Field[Any], value: Any) -> bool:
    return isinstance(value, bool | int | float | str | None) and value == field.default


def _joined(opening: str, parts: list[str], closing: str) -> str:
    """Join parts on one line, or one on each line if they are long and more than plain values."""
    line = f"{opening}{', '.join(parts)}{closing}"
    if "\n" not in line and (len(line) <= 100 or not any("(" in part or "=" in part for part in parts)):
        return line
    return "\n".join([opening, *(textwrap.indent(f"{part},", "    ") for part in parts), closing])


def apart(got: Tensor, expected: Tensor, where: Tensor | None = None) -> tuple[str, str]:
    """Format two tensors with as many digits as tell them apart."""
    for digits in (4, 8, 12):
        texts = short(got, where, digits), short(expected, where, digits)
        if texts[0] != texts[1]:
            return texts
    return short(got, where), short(expected, where)


def short(tensor: Tensor, where: Tensor | None = None, digits: int = 4) -> str:
    """Format a tensor for a message: some significant digits, shortened when large, `-` outside `where`."""

    def nested(value: Any, counts: Any) -> str:
        if isinstance(value, list):
            return f"[{', '.join(map(nested, value, counts))}]"
        return "-" if not counts else f"{value:.{digits}g}" if isinstance(value, float) else str(value)

    counted = torch.ones_like(tensor, dtype=torch.bool) if where is None else where
    return clipped(nested(tensor.detach().cpu().tolist(), counted.tolist()))


def clipped(text: str) -> str:
    """Cut a long text."""
    return text if len(text) <= 300 else f"{text[:297]}…"


def imports_for(values: Any) -> set[str]:
    """Return the import lines that the literal of a value, or of a container of values, needs."""
    match values:
        case Tensor():
            return {"import torch"}
        case FunctionType():
            return {f"from {values.__module__} import {values.__name__}"}
        case Model():
            return set() if values.code else imports_for(values.make)
        case partial():
            inner = imports_for([values.func, *values.args, *values.keywords.values()])
            return {"from functools import partial"} | inner
        case list() | tuple():
            return {line for item in values for line in imports_for(item)}
        case dict():
            return {line for pair in values.items() for item in pair for line in imports_for(item)}
    if is_dataclass(values) and not isinstance(values, type):
        inner = {line for field in fields(values) for line in imports_for(getattr(values, field.name))}
        return {f"from {type(values).__module__} import {type(values).__name__}"} | inner
    return set()


def _tensor(value: Tensor) -> str:
    with torch.no_grad():
        body = _nested(value.detach().cpu().tolist())
    options = ""
    default = {torch.float32, torch.int64, torch.bool}
    if value.dtype not in default or value.numel() == 0:
        options += f", dtype={value.dtype}"
    if value.requires_grad:
        options += ", requires_grad=True"
    return f"torch.tensor({body}{options})"


def _nested(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_nested, value))}]"
    return _number(value) if isinstance(value, float) else repr(value)


def _number(value: float) -> str:
    if math.isnan(value):
        return 'float("nan")'
    if math.isinf(value):
        return 'float("inf")' if value > 0 else 'float("-inf")'
    # The shortest number that is the same float32; repr shows the seventeen digits of the float64 that carries it.
    single = np.float32(value)
    return repr(float(str(single))) if float(single) == value else repr(value)
