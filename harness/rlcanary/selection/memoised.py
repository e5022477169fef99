"""Find what a test reads that an earlier test filled: caches, singletons, what an actor makes when first asked.

A function that keeps what it finds does its work for the first caller only. Every test that runs such a function, or code
which names one with a caching decorator, depends on all that was done in it for any test of the run: the calls that were
recorded from those lines, and the code of the same contexts which they name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator
from typing import NamedTuple, Protocol

from rlcanary.selection.source_file import Block
from rlcanary.selection.source_map import SourceMap

Place = tuple[str, str]  # file and name of a block


class Code(NamedTuple):
    """A code object's place: file, line and name, in Python's terms."""

    file: str
    first_line: int
    name: str


class Project(Protocol):
    """What is asked about recorded paths and code."""

    sources: SourceMap

    def places(self, path: str) -> list[str]: ...

    def blocks_of(self, code: Code) -> list[tuple[str, Block]]: ...


class Fact(NamedTuple):
    """What a line of the project did: called code, or opened, asked about or used something."""

    kind: str
    what: object


class Memoised:
    """An index over the records of a run, extended as the run goes on."""

    def __init__(self, run: Project) -> None:
        self.run = run
        self.facts: defaultdict[Place, set[tuple[int, Fact]]] = defaultdict(set)
        self.named: defaultdict[str, set[Code]] = defaultdict(set)
        self.contexts: defaultdict[Place, set[str]] = defaultdict(set)
        self.caches: defaultdict[str, set[Code]] = defaultdict(set)

    def add_code(self, context: str, code: Code) -> None:
        for file, block in self.run.blocks_of(code):
            self.contexts[file, block.name].add(context)
            owner, _, name = block.name.rpartition(".")
            self.named[name].add(code)
            if name.startswith("__") and owner:
                self.named[owner.rpartition(".")[2]].add(code)
            if block.caches:
                self.caches[name].add(code)

    def add_fact(self, caller: str, at: str, fact: Fact) -> None:
        for file in self.run.places(caller):
            source = self.run.sources.file(file)
            if source is not None:
                line = int(at)
                self.facts[file, source.block_around(line).name].add((line, fact))

    def filled(self, blocks: Iterable[tuple[str, Block]], names: set[str], files: Container[str]) -> Iterator[Fact]:
        """Yield what was done where these blocks fill what others read, and in the caches of these names in these files."""
        for file, block in blocks:
            for each in block.fills:
                yield from self.between(file, block, each.first, each.last)
                yield from self.named_in(file, block, each.names)
        for name in names & self.caches.keys():
            for code in self.caches[name]:
                if any(file in files for file in self.run.places(code.file)):
                    yield Fact("c", code)

    def done_by(self, file: str, block: Block) -> Iterator[Fact]:
        yield from self.between(file, block, 0, 2**31)
        yield from self.named_in(file, block, block.names)

    def between(self, file: str, block: Block, first: int, last: int) -> Iterator[Fact]:
        yield from (fact for line, fact in self.facts.get((file, block.name), ()) if first <= line <= last)

    def named_in(self, file: str, block: Block, names: Iterable[str]) -> Iterator[Fact]:
        here = self.contexts.get((file, block.name), set())
        for name in names:
            for code in self.named.get(name, ()):
                if any(not here.isdisjoint(self.contexts[other, b.name]) for other, b in self.run.blocks_of(code)):
                    yield Fact("c", code)
