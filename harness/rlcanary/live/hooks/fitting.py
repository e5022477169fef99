"""A framework of another version than a hook was written for: a warning, once, and the run goes on without the audit."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

from rlcanary.live.audit import log
from rlcanary.live.findings import warn_only

T = TypeVar("T")
_told: set[str] = set()


class Unfit(Exception):
    """The framework lacks something that a hook needs."""


def installed(framework: str, written_for: str, module: str) -> None:
    """Import a module with a hook and call its `install`; a framework that it does not fit is a warning.

    Args:
        framework: the name of the package.
        written_for: the version that the hook was written for.
        module: the name of the module.
    """
    try:
        import_module(module).install()
    except (ImportError, AttributeError, KeyError, Unfit) as error:
        not_audited(framework, written_for, error)


def not_audited(framework: str, written_for: str, why: object) -> None:
    """Warn that a run is not audited, once for each framework."""
    if framework in _told:
        return
    _told.add(framework)
    told = (
        f"this run of {framework} {_version(framework)} is not audited, the hook is written for {framework} "
        f"{written_for}: {why}"
    )
    log.warning("rlcanary: %s", told)
    warn_only(told)


def attempted(framework: str, written_for: str, function: Callable[[], T]) -> T | None:
    """Call a function of a hook. Its failure is a warning, once, and never one of the run."""
    try:
        return function()
    except Exception as error:  # noqa: BLE001 - the framework is foreign code, and no run ends for its audit
        log.debug("a hook failed", exc_info=True)
        not_audited(framework, written_for, f"{type(error).__name__}: {error}")
        return None


def require(function: Callable[..., Any], *parameters: str) -> None:
    """Check that a function begins with these parameters.

    Raises:
        Unfit: it does not.
    """
    have = list(inspect.signature(function).parameters)
    if have[: len(parameters)] != list(parameters):
        raise Unfit(f"{function.__qualname__} takes ({', '.join(have)}) and not ({', '.join(parameters)}, …)")


def _version(framework: str) -> str:
    try:
        return version(framework)
    except PackageNotFoundError:
        return "of an unknown version"
