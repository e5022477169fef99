"""Check the options of what a plan names: datasets, tools and verifiers, whose arguments are their own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from rlcanary.errors import UserError


def require_types(make: Callable[..., Any], options: Any) -> None:
    """Check that a function, or a class, takes these options and that they have the types of its arguments.

    Raises:
        UserError: naming the first that is wrong.
    """
    if not isinstance(options, Mapping):
        raise UserError(f"options are a mapping, not {options!r}")
    known = [name for name in inspect.signature(make).parameters if name != "self"]
    types = get_type_hints(make.__init__ if inspect.isclass(make) else make)
    for name, value in options.items():
        if name not in known:
            raise UserError(f"no option {name}; there are {', '.join(known) or 'none'}")
        try:
            TypeAdapter(types[name]).validate_python(value, strict=True)
        except ValidationError as error:
            raise UserError(f"{name} is {value!r}: {error.errors()[0]['msg']}") from error
