"""Run `jq -r EXPR FILES` through the jq binding; an unreadable file does not stop the others.

Numbers are spelled as jq 1.6 spells them, 1.0 as 1. Later versions keep the spelling of the file where the expression
leaves a number alone.
"""

import decimal
import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jq

from rlcanary.errors import UserError
from rlcanary.history.run_result import UnreadableFile, read_json

STRING_OR_NUMBER = re.compile(r'"(?:[^"\\]|\\.)*"|-?[0-9][0-9.eE+-]*|-?Infinity|NaN')


class QueryError(NamedTuple):
    """The expression does not fit a file."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def run_query(expression: str, files: Sequence[Path]) -> Iterator[str | QueryError | UnreadableFile]:
    """Yields the text that `jq -r` prints for each result, file by file in the order given.

    Raises:
        UserError: for an invalid expression.
    """
    try:
        program = jq.compile(expression)
    except ValueError as error:
        raise UserError(f"invalid jq expression: {error}") from error
    return _results(program, files)


def _results(program: Any, files: Sequence[Path]) -> Iterator[str | QueryError | UnreadableFile]:
    for path in files:
        read = read_json(path)
        if isinstance(read, str):
            yield UnreadableFile(path, read)
            continue
        try:
            for result in program.input_text(respelled(read.text)):
                yield result if isinstance(result, str) else formatted(result)
        except ValueError as error:
            yield QueryError(path, str(error))
        except RecursionError:
            yield QueryError(path, "nested too deep")


def respelled(text: str) -> str:
    """Respells the numbers of a JSON text as jq does, also in strings that an expression makes of them."""
    return STRING_OR_NUMBER.sub(
        lambda match: match[0] if match[0][0] == '"' else formatted_number(float(match[0])), text
    )


def formatted(value: Any, indent: str = "") -> str:
    """Formats JSON with jq's layout and spelling of numbers."""
    inner = indent + "  "
    match value:
        case bool() | None | str():
            return json.dumps(value, ensure_ascii=False)
        case int() | float():
            return formatted_number(float(value))
        case []:
            return "[]"
        case list():
            items = [f"{inner}{formatted(item, inner)}" for item in value]
            return "[\n" + ",\n".join(items) + f"\n{indent}]"
        case dict() if not value:
            return "{}"
        case dict():
            items = [
                f"{inner}{json.dumps(key, ensure_ascii=False)}: {formatted(item, inner)}" for key, item in value.items()
            ]
            return "{\n" + ",\n".join(items) + f"\n{indent}}}"
    raise TypeError(f"jq returned a {type(value).__name__}")


def formatted_number(number: float) -> str:
    """Formats a number with the shortest digits that round-trip, in jq's choice of plain or exponential notation.

    1e15 is 1000000000000000, 1e16 is 1e+16. NaN is null and an infinity the largest number, as in jq.
    """
    if math.isnan(number):
        return "null"
    if math.isinf(number):
        number = math.copysign(sys.float_info.max, number)
    text = repr(number)
    if "e" not in text:
        return text.removesuffix(".0")
    shortest = decimal.Decimal(text).normalize()
    sign, digits, exponent = shortest.as_tuple()
    assert isinstance(exponent, int)
    point = len(digits) + exponent  # the decimal point comes after this many digits
    if -4 < point <= len(digits) + 15:
        return f"{shortest:f}"
    mantissa = str(digits[0]) + ("." + "".join(map(str, digits[1:])) if len(digits) > 1 else "")
    return f"{'-' if sign else ''}{mantissa}e{point - 1:+03d}"
