"""Stubs of packages that a framework imports and the code under test does not run: GPU kernels and annotations.

A stub is used only where the package is not installed. Its functions fail when they are called, so that no number is theirs.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

KERNELS: Mapping[str, tuple[str, ...]] = {
    "flash_attn": (),
    "flash_attn.bert_padding": ("index_first_axis", "pad_input", "rearrange", "unpad_input"),
    "flash_attn.utils": (),
    "flash_attn.utils.distributed": ("all_gather",),
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

    The stubs are gone afterwards, so that nothing else takes the packages for installed. Nor does transformers, which asks
    for flash-attention while it is imported: that is done first.
    """
    missing = [
        (name, names)
        for each in modules
        for name, names in each.items()
        if importlib.util.find_spec(name.partition(".")[0]) is None
    ]
    if ("flash_attn", ()) in missing and importlib.util.find_spec("transformers") is not None:
        importlib.import_module("transformers.modeling_utils")
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


class _Anything(_Stub):
    """A name of a package that is not installed, of which every attribute is such a name too.

    Functions that it decorates and classes that derive from it can be defined; they are not usable either.
    """

    def __getattr__(self, name: str) -> _Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(f"{self._name}.{name}")

    def __call__(self, *given: Any, **options: Any) -> Any:
        if _importing:
            return _Anything(f"{self._name}()")
        return super().__call__(*given, **options)

    def __or__(self, other: Any) -> Any:
        return other

    __ror__ = __or__

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (type(self._name.rpartition(".")[2], (), {}),)


class _Module(ModuleType):
    """A module of a package that is not installed."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(f"{self.__name__}.{name}")


class _Absent(MetaPathFinder, Loader):
    """Finds every module of some packages, none of which is there."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = packages

    def holds(self, name: str) -> bool:
        return any(name == package or name.startswith(f"{package}.") for package in self.packages)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if self.holds(fullname) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name, "A stub.")

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module has whatever it is asked for."""


_importing: list[_Absent] = []


@contextmanager
def absent(*packages: str) -> Iterator[None]:
    """Let imports of the block find any module and any name of these packages, those that are not installed.

    For servers, loggers and distributed runtimes, of which a framework imports much and the code under test calls nothing.
    Within the block a stub may be called, as a decorator is; afterwards that fails, and the modules are gone. A part of an
    installed package (`megatron.training`) may be named.
    """
    finder = _Absent([package for package in packages if not _is_there(package)])
    sys.meta_path.append(finder)
    _importing.append(finder)
    try:
        yield
    finally:
        _importing.remove(finder)
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if finder.holds(name)]:
            del sys.modules[name]


@contextmanager
def stub_of(module: str, needs: str) -> Iterator[None]:
    """Let imports of the block find a stub of one module of an installed package, where what the module needs is not."""
    is_stubbed = not _is_there(needs.partition(".")[0]) and module not in sys.modules
    if is_stubbed:
        sys.modules[module] = _Module(module, "A stub.")
    try:
        yield
    finally:
        if is_stubbed:
            del sys.modules[module]


def _is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # its parent is not there
        return False
