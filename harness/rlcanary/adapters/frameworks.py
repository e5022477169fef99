"""Importing the framework that an adapter drives, or saying in one line why that one cannot be used."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

from packaging.version import Version

from rlcanary.errors import UserError


@contextmanager
def usable(package: str, install: str, written_for: str, at_least: str | None = None) -> Iterator[None]:
    """Run imports of a framework and the first look at its configuration.

    Args:
        package: as it is imported.
        install: what to do where it is not installed.
        written_for: the framework and the releases that the adapter knows.
        at_least: the oldest release that the adapter can drive; None where the framework is used from its repository.

    Raises:
        UserError: the package is not installed, is older than `at_least`, or whatever runs inside fails.
    """
    if not _is_found(package):
        raise UserError(f"{package} is not installed: {install}")
    version = _version(package)
    cannot = f"this adapter was written for {written_for} and cannot use {package}{version and f' {version}'}"
    if at_least is not None and version and Version(version).release < Version(at_least).release:
        raise UserError(f"{cannot}: it is older than {at_least}")
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{cannot}: {_cause(error, package)}") from error


def _is_found(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # a finder that hides packages may raise
        return False


def _version(package: str) -> str:
    """The installed version, empty for a checkout that was never installed."""
    try:
        return metadata.version(package.replace("_", "-"))
    except metadata.PackageNotFoundError:
        return ""


def _cause(error: Exception, package: str) -> str:
    """The reason in one line."""
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        is_its_own = error.name.partition(".")[0] == package
        return f"it has no module {error.name}" if is_its_own else f"{error.name} is not installed"
    return " ".join(f"{type(error).__name__}: {error}".split())
