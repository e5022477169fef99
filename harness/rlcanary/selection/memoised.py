"""Find what a test reads that an earlier test filled: caches, singletons, what an actor makes when first asked.

A function that keeps what it finds does its work for the first caller only. Every test that runs such a function, or code
which names one with a caching decorator, depends on all that was done in it for any test of the run: the calls that were
recorded from those lines, and the code of the same contexts which they name.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator
from typing import NamedTuple, Protocol

from rlcanary.selection.fills import Fill
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


class Done:
    """What was done in some lines, as far as it is known; with the size of the contexts that were looked at."""

    def __init__(self) -> None:
        self.facts: set[Fact] = set()
        self.sizes: dict[str, int] = {}


class Memoised:
    """An index over the records of a run, extended as the run goes on."""

    def __init__(self, run: Project) -> None:
        self.run = run
        self.facts: defaultdict[tuple[str, Place], set[tuple[int, Fact]]] = defaultdict(set)
        self.named: defaultdict[tuple[str, str], set[Code]] = defaultdict(set)
        self.known: set[tuple[str, Code]] = set()
        self.partly: set[tuple[str, Code]] = set()  # code with callers in a context that are not known
        self.contexts: defaultdict[Place, set[str]] = defaultdict(set)
        self.sizes: Counter[str] = Counter()
        self.caches: defaultdict[str, set[Code]] = defaultdict(set)
        self.done: defaultdict[tuple[Place, int, int], Done] = defaultdict(Done)

    def add_code(self, context: str, code: Code, called: bool) -> None:
        """Add code that ran in a context; `called` tells if this record says by which code of the project."""
        self.sizes[context] += 1
        if not called:
            self.partly.add((context, code))
        if (context, code) in self.known:
            return
        self.known.add((context, code))
        for file, block in self.run.blocks_of(code):
            self.contexts[file, block.name].add(context)
            owner, _, name = block.name.rpartition(".")
            self.named[context, name].add(code)
            if name.startswith("__") and owner:
                self.named[context, owner.rpartition(".")[2]].add(code)
            if block.caches:
                self.caches[name].add(code)

    def add_fact(self, context: str, caller: str, at: str, fact: Fact) -> None:
        self.sizes[context] += 1
        for file in self.run.places(caller):
            source = self.run.sources.file(file)
            if source is not None:
                line = int(at)
                place = file, source.block_around(line).name
                self.contexts[place].add(context)
                self.facts[context, place].add((line, fact))

    def filled(self, blocks: Iterable[tuple[str, Block]], names: set[str], files: Container[str]) -> Iterator[Fact]:
        """Yield what was done where these blocks fill what others read, and in the caches of these names in these files."""
        for file, block in blocks:
            for fill in block.fills:
                yield from self.done_in((file, block.name), fill)
        for name in names & self.caches.keys():
            for code in self.caches[name]:
                if any(file in files for file in self.run.places(code.file)):
                    yield Fact("c", code)
                    for file, block in self.run.blocks_of(code):
                        yield from self.done_in((file, block.name), block.whole)

    def modules_in(self, place: Place) -> set[str]:
        """Return the files of the modules that this function was seen to import."""
        facts = (fact for context in self.contexts.get(place, ()) for _, fact in self.facts.get((context, place), ()))
        used = (str(fact.what) for fact in facts if fact.kind == "u")
        return {file for each in used if each.startswith("m:") for file in self.run.places(each[2:])}

    def done_in(self, place: Place, lines: Fill) -> set[Fact]:
        """Return what any test did in these lines of a function, and in all that was called from there."""
        done = self.done[place, lines.first, lines.last]
        for context in self.contexts.get(place, ()):
            if done.sizes.get(context) != self.sizes[context]:
                done.sizes[context] = self.sizes[context]
                done.facts |= self.done_for(context, place, lines)
        return done.facts

    def done_for(self, context: str, place: Place, lines: Fill) -> set[Fact]:
        found: set[Fact] = set()
        waiting = list(self.begun(context, place, lines))
        while waiting:
            fact = waiting.pop()
            if fact not in found:
                found.add(fact)
                if isinstance(fact.what, Code):
                    for file, block in self.run.blocks_of(fact.what):
                        waiting.extend(self.begun(context, (file, block.name), block.whole))
        return found

    def begun(self, context: str, place: Place, lines: Fill) -> Iterator[Fact]:
        """Yield what was recorded of these lines themselves, and the code that they name and whose callers do not show."""
        for line, fact in self.facts.get((context, place), ()):
            if lines.first <= line <= lines.last:
                yield fact
        for name in lines.names:
            for code in self.named.get((context, name), ()):
                if name in lines.passed or (context, code) in self.partly or self.waits(code):
                    yield Fact("c", code)

    def waits(self, code: Code) -> bool:
        return any(block.waits for _, block in self.run.blocks_of(code))
