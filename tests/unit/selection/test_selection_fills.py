"""Which lines of a function are taken to fill what later calls read."""

import ast

import pytest

from rlcanary.selection.fills import fills_in


def filled(text: str) -> list[str]:
    """The lines that fill something, of a function with this body."""
    lines = ["def f(self, key, items):", *(f"    {line}" for line in text.split("\n"))]
    (function,) = ast.parse("\n".join(lines)).body
    return [lines[number - 1].strip() for fill in fills_in(function) for number in range(fill.first, fill.last + 1)]


@pytest.mark.parametrize(
    "text",
    [
        "if self.x is None:\n    self.x = load()",
        "if not hasattr(self, 'x'):\n    self.x = load()",
        "if not hasattr(self, 'x'):\n    setattr(self, 'x', load())",
        "if 'x' not in cache:\n    cache['x'] = load()",
        "if not cache:\n    cache['x'] = load()",
        "found = cache.get(key)\nif found is None:\n    found = cache[key] = load()",
        "if (found := cache.get(key)) is None:\n    cache[key] = load()",
        "try:\n    return cache[key]\nexcept KeyError:\n    cache[key] = load()",
        "if key in cache:\n    return cache[key]\ncache[key] = load()",
        "if not is_loaded():\n    self.x = load()",
        "if 'x' not in self.ready:\n    self.ready.add('x'); self.x = load()",
        "while self.x is None:\n    self.x = load()",
        "if self.x is None:\n    load()",
        "if not hasattr(self, 'x'):\n    load()",
        "if getattr(self, 'x', None) is None:\n    load()",
        "self.x = self.x or load()",
        "return cache.setdefault(key, load())",
        "cache = get_cache()\nif key not in cache:\n    cache[key] = load()",
        "found: object = cache.get(key)\nif found is None:\n    cache[key] = load()",
        "try:\n    found = cache.get(key)\nexcept TypeError:\n    found = None\nif found is None:\n    cache[key] = load()",
        "if self.x:\n    rows = get_cache()\nelse:\n    rows = {}\nif key not in rows:\n    rows[key] = load()",
        "rows = {}\nfor rows in caches:\n    if key not in rows:\n        rows[key] = load()",
        "if items is None:\n    items = {}\nif key not in items:\n    items[key] = load()",
        "if key not in cache:\n    keep(key, load())",
        "found, ok = cache.look(key)\nif not ok:\n    cache.keep(key, load())",
        "found, ok = cache.look(key)\nif ok < 1:\n    cache[key] = load()",
        "with cache.locked(key) as found:\n    if found < 1:\n        cache[key] = load()",
    ],
)
def test_what_is_made_when_first_asked_for_is_filled(text: str) -> None:
    assert [line for line in filled(text) if "load()" in line]


@pytest.mark.parametrize(
    "text",
    [
        "found = pattern.match(self.text, self.cursor)\nif found:\n    self.cursor = load()",
        "while self.cursor < self.end:\n    self.cursor = load()",
        "for item in items:\n    if 'text' in item:\n        item['children'] = load()",
        "if key:\n    self.x = load()",
        "rows = dict(items)\nif key not in rows:\n    rows[key] = load()",
        "rows = Rows(items)\nif key not in rows:\n    rows[key] = load()",
        "rows: dict = {}\nif key not in rows:\n    rows[key] = load()",
        "rows = {}\nif self.y:\n    rows = dict(items)\nif key not in rows:\n    rows[key] = load()",
        "if items:\n    load()",
        "seen = set()\nif key not in seen:\n    load()",
        "if not isinstance(items, list):\n    load()",
    ],
)
def test_what_a_condition_does_not_ask_for_is_not_filled(text: str) -> None:
    assert filled(text) == []
