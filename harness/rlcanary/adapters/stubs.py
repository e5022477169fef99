"""Stubs of packages that a framework imports and the code under test does not run: GPU kernels and annotations.

A stub is used only where the package is not installed. Its functions fail when they are called, so that no number is theirs.
"""

from __future__ import annotations

import importlib.util
import sys
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

KERNELS: Mapping[str, tuple[str, ...]] = {
    "flash_attn": (),
    "flash_attn.bert_padding": ("index_first_axis", "pad_input", "rearrange", "unpad_input"),
}
"""The modules and functions of flash-attention that trainers import for rows without padding."""

ANNOTATIONS: Mapping[str, tuple[str, ...]] = {"jaxtyping": ("Bool", "Float", "Int", "Integer", "Num", "Shaped")}
"""Types of tensors, which are written in brackets and never made."""


class _Stub:
    """A name of a package that is not installed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"{self._name} is a stub: its package is not installed")

    def __getitem__(self, item: Any) -> Any:
        """Return the type that an annotation begins with."""
        return item[0] if isinstance(item, tuple) else item


@contextmanager
def stubbed(*modules: Mapping[str, tuple[str, ...]]) -> Iterator[None]:
    """Let imports of the block find stubs of these modules where their packages are not installed.

    The stubs are gone afterwards, so that nothing else takes the packages for installed.
    """
    missing = [
        (name, names)
        for each in modules
        for name, names in each.items()
        if importlib.util.find_spec(name.partition(".")[0]) is None
    ]
    for name, names in missing:
        stub = ModuleType(name, "A stub.")
        stub.__spec__ = ModuleSpec(name, None)
        vars(stub).update({each: _Stub(f"{name}.{each}") for each in names})
        sys.modules[name] = stub
    try:
        yield
    finally:
        for name, _ in missing:
            sys.modules.pop(name, None)


@contextmanager
def newer_typed_dicts() -> Iterator[None]:
    """Let imports of the block take the `TypedDict` of Python 3.12, on which pydantic insists, also on an older one."""
    import typing_extensions

    before = typing.TypedDict
    typing.TypedDict = typing_extensions.TypedDict
    try:
        yield
    finally:
        typing.TypedDict = before
