"""The pytest plugins of rlcanary, and their one entry point: for each, pytest reads a distribution's metadata at its start.

pytest would rewrite the asserts of all modules of a distribution that has plugins, which takes several times as long as to
import them, at every start. No test asserts anything in them, so they are found before pytest looks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

PLUGINS = ("cleanup", "conformance", "gates", "known-issues", "selection", "timeouts", "tracker")


class AsWritten:
    """Finds the modules of rlcanary and of its plugins for `import`, without pytest's rewriting."""

    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in ("rlcanary", "pytest_rlcanary"):
            return PathFinder.find_spec(fullname, path, target)
        return None


sys.meta_path.insert(0, AsWritten)


def __dir__() -> list[str]:
    return ["pytest_addoption"]


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """Register the plugins that `-p no:rlcanary-NAME` does not switch off. This is the first hook that pytest calls."""
    for each in PLUGINS:
        name = f"rlcanary-{each}"
        if pluginmanager.is_blocked(name):
            continue
        plugin = import_module(f"pytest_rlcanary.{each.replace('-', '_')}")
        if not pluginmanager.is_registered(plugin):  # as by `-p pytest_rlcanary.tracker`
            pluginmanager.register(plugin, name)
