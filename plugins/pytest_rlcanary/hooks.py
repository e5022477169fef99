"""Show pytest only the hooks of a plugin: at its start it looks at each name of every plugin, several times."""

from __future__ import annotations

from collections.abc import Iterable


def hooks_in(names: Iterable[str]) -> list[str]:
    """Return the names that a plugin's `__dir__` has to list."""
    return [name for name in names if name.startswith("pytest_")]


class Hooks:
    """Base of the objects that are registered as plugins."""

    def __dir__(self) -> list[str]:
        return hooks_in(dir(type(self)))
