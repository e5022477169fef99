"""What of a file is a constant, and where a function fills what later calls read."""

import textwrap

import pytest

from rlcanary.selection.source_file import SourceFile

MODULE = """
import os
RATE = 3
SIZE: int = 4
COMPUTED = RATE * 2
TWICE = 1
TWICE = 2
pytestmark = []

class Plain:
    longest = 10
    def method(self):
        return RATE

class Derived(Plain):
    shortest = 1

def scaled(x, by=2):
    return x * by

@os.register
def decorated(x, by=2):
    return x
"""


def source(text: str) -> SourceFile:
    return SourceFile(textwrap.dedent(text).lstrip().encode())


def changed(old: str, new: str) -> set[str]:
    """The blocks whose code is another one after the edit."""
    assert old in MODULE
    before, after = source(MODULE), source(MODULE.replace(old, new, 1))
    codes = {block.code for block in [*after.blocks, *after.constants]}
    return {block.name for block in [*before.blocks, *before.constants] if block.code not in codes}


@pytest.mark.parametrize(
    ("old", "new", "blocks"),
    [
        ("RATE = 3", "RATE = 5", {"RATE"}),
        ("SIZE: int = 4", "SIZE: int = 5", {"SIZE"}),
        ("SIZE: int = 4", "SIZE: float = 4", {"<module>"}),
        ("RATE * 2", "RATE * 3", {"COMPUTED"}),
        ("TWICE = 2", "TWICE = 3", {"<module>"}),
        ("pytestmark = []", "pytestmark = [1]", {"<module>"}),
        ("RATE = 3", "RATE = f()", {"RATE", "COMPUTED", "<module>"}),
        ("longest = 10", "longest = 11", {"Plain.longest"}),
        ("shortest = 1", "shortest = 2", {"<module>"}),
        ("scaled(x, by=2)", "scaled(x, by=3)", {"scaled"}),
        ("scaled(x, by=2)", "scaled(x, other, by=2)", {"scaled"}),
        ("scaled(x, by=2)", "scaled(x: int, by=2)", {"scaled", "<module>"}),
        ("decorated(x, by=2)", "decorated(x, by=3)", {"<module>"}),
        ("return RATE", "return RATE + 1", {"Plain.method"}),
        ("return x * by", "return x * by  # a comment", set()),
        ("import os", "import os, sys", {"<module>"}),
        ("def scaled", "def added():\n    pass\n\ndef scaled", {"<module>"}),
    ],
)
def test_an_edit_changes_the_block_that_it_is_in(old: str, new: str, blocks: set[str]) -> None:
    assert changed(old, new) == blocks


@pytest.mark.parametrize(
    "body",
    [
        "global kept\nif kept is None:\n    kept = load()",
        "if self.kept is None:\n    self.kept = load()",
        "try:\n    return kept[x]\nexcept KeyError:\n    kept[x] = load()",
        "if x in kept:\n    return kept[x]\nvalue = kept[x] = load()\nreturn value",
        "global kept\nkept = kept or load()",
        "return kept.setdefault(x, x or load())",
        "with lock:\n    if not hasattr(self, 'kept'):\n        self.kept = load()",
        "if (value := kept.get(x)) is None:\n    kept[x] = value = load()",
    ],
)
def test_code_that_fills_what_later_calls_read_is_found(body: str) -> None:
    function = source("def function(self, x):\n" + textwrap.indent(body, "    ")).blocks[1]
    assert any("load" in fill.names for fill in function.fills)


@pytest.mark.parametrize(
    "body", ["value = load()\nreturn value", "if x:\n    y = load()\nreturn y", "out = {}\nif x:\n    out[x] = load()"]
)
def test_code_that_keeps_nothing_fills_nothing(body: str) -> None:
    assert source("def function(self, x):\n" + textwrap.indent(body, "    ")).blocks[1].fills == []
