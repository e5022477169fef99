"""Read the plan of a run from YAML; refuse it before anything starts, naming the wrong key."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from rlcanary.errors import UserError
from rlcanary.grpo.plan.plan import Plan


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Reads 1e-3 as a number, as YAML 1.2 does; for YAML 1.1 it is a text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+\.?\d*[eE][-+]?\d+$"), list("-+0123456789")
)


def read_plan(path: Path, overrides: Sequence[str] = ()) -> Plan:
    """Read the plan in a YAML file.

    Args:
        path: path of the file.
        overrides: assignments such as "roles.sampler.engine=vllm", each with a value in YAML.

    Raises:
        UserError: the file cannot be read, is not YAML, or holds settings that a plan refuses; nothing has started then.
    """
    try:
        given = yaml.load(path.read_text(encoding="utf-8"), _Loader)
        for override in overrides:
            _override(given, override)
    except OSError as error:
        raise UserError(f"cannot read the plan {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read the plan {path}: {error}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {error}") from error
    try:
        return plan_of(given)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _override(given: Any, override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise UserError(f"{override!r} is not key=value, such as roles.sampler.engine=vllm")
    *parents, last = key.split(".")
    for parent in parents:
        given = given.setdefault(parent, {}) if isinstance(given, dict) else None
    if not isinstance(given, dict):
        raise UserError(f"{key} cannot be set: its parent is not a mapping")
    given[last] = yaml.load(value, _Loader)


def plan_of(given: Any) -> Plan:
    """Read the plan from nested mappings. Conventions and sampling have keys of their own, see there.

    Raises:
        UserError: naming the key that is wrong.
    """
    if isinstance(given, dict):
        given = {"conventions": {}, **given}
    try:
        # In JSON a list is a tuple and a text is a path, while a strict number is neither a text nor a truth value.
        return TypeAdapter(Plan).validate_json(json.dumps(given, default=str))
    except ValidationError as error:
        raise UserError(_first_mistake(error)) from error
    except (TypeError, ValueError) as error:
        raise UserError(f"the plan has a key that is no text, or an anchor inside itself: {error}") from error


def _first_mistake(error: ValidationError) -> str:
    """Describe the first mistake in a line; an unknown key comes before the one that is missing in its place."""
    mistakes = error.errors()
    unknown = [mistake for mistake in mistakes if mistake["type"] == "unexpected_keyword_argument"]
    mistake = (unknown or mistakes)[0]
    *section, name = place = mistake["loc"] or ("",)
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")
    if unknown:
        names = _keys(section)
        close = get_close_matches(str(name), names, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(names)}"
        return f"{key} is not a key of a plan: {hint}"
    if mistake["type"] == "missing":
        return f"{key} is missing"
    if mistake["type"] == "value_error":
        return f"{key}: {mistake['ctx']['error']}".removeprefix(": ")
    given = "empty" if mistake["input"] is None else repr(mistake["input"])
    expected = re.sub("^(Input|Tuple) should", "it has to", mistake["msg"]).replace("an object", "a mapping")
    return f"{key or 'the plan'} is {given}, {expected}"


def _keys(path: Sequence[int | str]) -> list[str]:
    section: Any = Plan
    for name in path:
        kind = get_type_hints(section)[str(name)]
        section = next(each for each in (kind, *get_args(kind)) if is_dataclass(each))
    return [each.name for each in fields(section)]
