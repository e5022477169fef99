"""Import the framework that an adapter drives, with a one-line error if it cannot be used, and silence its messages."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import patch

from packaging.version import Version

from rlcanary.contract.adapter import Adapter, NotProvided
from rlcanary.errors import UserError
from rlcanary.system.git import GitError, git

_metadata = cache(metadata.metadata)


@contextmanager
def usable(package: str, install: str, written_for: str, at_least: str | None = None) -> Iterator[None]:
    """Guard imports of a framework and the first read of its configuration.

    Args:
        package: the package's import name.
        install: the command or hint for installing it.
        written_for: the framework and releases for which the adapter was written.
        at_least: the oldest supported release; None if the framework is used from its repository.

    Raises:
        UserError: the package is not installed, is older than `at_least`, or the code in the block fails.
    """
    if not is_found(package):
        raise UserError(f"{package} is not installed: {install}")
    version = release(package)
    cannot = f"this adapter was written for {written_for} and cannot use {package}{version and f' {version}'}"
    is_old = at_least is not None and version[:1].isdigit() and Version(version).release < Version(at_least).release
    if is_old:
        raise UserError(f"{cannot}: it is older than {at_least}")
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{cannot}: {_cause(error, package)}") from error


def part(place: str) -> Any:
    """Return an object of a framework, given as `module:name`.

    Raises:
        NotProvided: the installed release has no such object.
    """
    module, _, name = place.partition(":")
    package = module.partition(".")[0]
    try:
        return getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and str(error.name).partition(".")[0] != package:
            raise NotProvided(f"{name} of this release cannot be imported: {_cause(error, package)}") from error
        raise NotProvided(f"this release of {package} has no {name} in {module}") from error
    except RuntimeError as error:  # of a module that is imported when it is first read
        raise NotProvided(f"{name} of this release cannot be imported: {' '.join(str(error).split())}") from error


def has_part(place: str) -> bool:
    """Tell whether the installed release of a framework has an object, given as `module:name`."""
    try:
        part(place)
    except NotProvided:
        return False
    return True


def takes(function: Any, name: str) -> bool:
    """Tell whether a function of a framework has a parameter, which older releases lack."""
    return name in inspect.signature(function).parameters


@contextmanager
def hidden(package: str) -> Iterator[None]:
    """Let imports of the block take a package for not installed, as a framework does that is older than the package."""
    find_spec = importlib.util.find_spec

    def found(name: str, parent: str | None = None) -> ModuleSpec | None:
        return None if name.partition(".")[0] == package else find_spec(name, parent)

    with patch.object(importlib.util, "find_spec", found):
        yield


def forget(package: str) -> None:
    """Drop the modules of a package, which failed to be imported, so that it can be imported again."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]


@contextmanager
def quiet() -> Iterator[None]:
    """Silence a framework's warnings, log messages and progress bars, which would clutter the report.

    Inside, the metadata of a package are read once: accelerate reads those of peft several times in each step.
    """
    handle, read = logging.Logger.callHandlers, metadata.metadata
    is_loud = read is not _metadata

    def handle_errors(logger: logging.Logger, record: logging.LogRecord) -> None:
        if record.levelno > logging.WARNING:
            handle(logger, record)

    bars = sys.modules.get("transformers.utils.logging")
    had_bars = bars is not None and bars.is_progress_bar_enabled()
    if bars and had_bars:
        bars.disable_progress_bar()
    if is_loud:  # `logging.disable` would clear the caches of all loggers, which takes a millisecond
        logging.Logger.callHandlers = handle_errors  # type: ignore[assignment, method-assign]
        metadata.metadata = _metadata
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if bars and had_bars:
            bars.enable_progress_bar()
        if is_loud:
            logging.Logger.callHandlers = handle  # type: ignore[method-assign]
            metadata.metadata = read


def is_found(package: str) -> bool:
    """Tell whether Python finds a package or one of its modules; only what is above it is imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ModuleNotFoundError, ValueError):  # a finder that hides packages may raise, and a stub may have no spec
        return False


def release(package: str) -> str:
    """Return the version of the package that Python finds, or `commit abc1234` of a checkout; empty if neither is known."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        return ""
    # A package without a module of its own, which lies in several folders, is that of the first.
    places = (
        [Path(spec.origin).parent] if spec.origin else [Path(each) for each in spec.submodule_search_locations or ()]
    )
    if not places:
        return ""
    folder = places[0].resolve()
    # On the path several versions may lie, of which the first is imported.
    for found in metadata.distributions(name=package.replace("_", "-")):
        if Path(str(found.locate_file(package))).resolve() == folder:
            return found.version
    try:
        return f"commit {git(folder, 'rev-parse', '--short', 'HEAD').strip()}"
    except GitError:
        return ""


def versions_of(adapter: Adapter) -> dict[str, str]:
    """Return the version or commit of the framework that a bundled adapter drives, and of torch; nothing for others."""
    own = [
        each.__module__.split(".") for each in type(adapter).__mro__ if each.__module__.startswith(f"{__package__}.")
    ]
    package = own[0][2] if own else ""
    if package in ("", "reference", "grpo"):
        return {}
    return {name: release(name) or "of an unknown version" for name in (package, "torch")}


def _cause(error: Exception, package: str) -> str:
    """Summarise an error's cause in one line."""
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        top = error.name.partition(".")[0]
        if top == package:
            return f"it has no module {error.name}"
        if top != error.name and is_found(top):
            return f"the installed {f'{top} {release(top)}'.strip()} has no module {error.name}"
        return f"{error.name} is not installed"
    return " ".join(f"{type(error).__name__}: {error}".split())
