"""Derive each test's dependencies from the records of a run's processes."""

from __future__ import annotations

import glob
import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from rlcanary.selection.injected.rlcanary_recorder.core import ANYTHING, MODULE_PREFIX, UNKNOWN, UPLOADED
from rlcanary.selection.source_map import SourceMap

IMPORT = "import"
# Siblings of a model's or tokenizer's configuration are read by native code, which no hook of Python sees.
MODEL_CONFIGURATIONS = ("config.json", "tokenizer_config.json", "generation_config.json")
MODEL_FILES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".vocab")


class Code(NamedTuple):
    """A code object's place: file, line and name, in Python's terms."""

    file: str
    first_line: int
    name: str


@dataclass
class Context:
    """The facts recorded about one context (see `rlcanary_recorder.core`)."""

    kind: str = ""
    text: str = ""
    code: dict[Code, set[str]] = field(default_factory=dict)  # and the processes in which it ran
    data: set[str] = field(default_factory=set)
    uses: set[str] = field(default_factory=set)
    sent: dict[str, tuple[str, ...]] = field(default_factory=dict)
    arrived: set[str] = field(default_factory=set)
    depends_on_everything: bool = False
    changed: int = 0  # how many lines had been read when it last changed


@dataclass
class Dependencies:
    """The dependencies of a test.

    Attributes:
        lines: file to the lines at which pytest-testmon's blocks of the code begin; 1 for a data file.
        through: (file, name of the function, or "" for data) to the ways in which it was reached.
        unrecorded: calls that left no record, for which the files that they import are counted.
        contexts: all contexts that were reached.
    """

    lines: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    through: dict[tuple[str, str], set[str]] = field(default_factory=lambda: defaultdict(set))
    unrecorded: set[str] = field(default_factory=set)
    contexts: set[str] = field(default_factory=set)


class Run:
    """All contexts of a run, and the present files of the project."""

    def __init__(self, sources: SourceMap) -> None:
        self.sources = sources
        self.contexts: defaultdict[str, Context] = defaultdict(Context)
        self.written: set[str] = set()
        self.problems: list[str] = []
        self.tests: dict[str, list[str]] = {}
        self.lines_read = 0
        self.all_files: set[str] | None = None

    def add(self, lines: Iterable[tuple[str, list[str]]]) -> None:
        """Add lines of journals, each with the process that wrote it."""
        for process, (kind, *fields) in lines:
            self.lines_read += 1
            match kind, fields:
                case "c", [context, file, line, name]:
                    self.of(context).code.setdefault(Code(file, int(line), name), set()).add(process)
                case "d", [context, file]:
                    self.of(context).data.add(file)
                case "w", [file]:
                    self.written.add(file)
                case "u", [context, used]:
                    self.of(context).uses.add(used)
                case "l", [context, text, label]:
                    self.of(context).kind, self.of(context).text = text, label
                    if text == "test":
                        self.tests.setdefault(label, []).append(context)
                case "s", [context, callee, *files]:
                    self.of(context).sent[callee] = tuple(files)
                case "r", [context, callee]:
                    self.of(context).arrived.add(callee)
                case "a", [context]:
                    self.of(context).depends_on_everything = True
                case "p", [text]:
                    if text not in self.problems:
                        self.problems.append(text)

    def of(self, context: str) -> Context:
        found = self.contexts[context]
        found.changed = self.lines_read
        return found

    def dependencies_of_test(self, test: str) -> Dependencies:
        """Return the dependencies of a test: every file, if it ran without leaving a record."""
        found = self.dependencies(self.tests.get(test, []))
        if test not in self.tests:
            found.unrecorded.add("the test itself")
            self.add_everything(found)
        return found

    def dependencies(self, roots: Iterable[str]) -> Dependencies:
        """Collect the dependencies reached from these contexts."""
        found = Dependencies()
        waiting = [(context, "") for context in [*roots, UNKNOWN]]
        reached = found.contexts
        while waiting:
            name, way = waiting.pop()
            if name in reached:
                continue
            reached.add(name)
            context = self.contexts.get(name, Context())
            way = self.way(name, context, way)
            waiting.extend((used, way) for used in context.uses)
            if name.startswith("m:"):
                waiting.extend((f"m:{file}", way) for file in self.add_import(found, name[2:], way))
            for code, processes in context.code.items():
                ways = {self.within(way, process) for process in processes}
                waiting.extend((f"m:{file}", way) for file in self.add_code(found, code, ways))
            for file in context.data:
                self.add_data(found, file, way)
            self.add_unrecorded(found, context)
            if context.depends_on_everything:
                self.add_everything(found)
        return found

    def way(self, name: str, context: Context, before: str) -> str:
        """Name a context for a person: the nearest process, fixture or call, imports counted to their importer."""
        if context.kind and not name.startswith("t:"):
            return f"{context.kind} {context.text}"
        if name.startswith("m:"):
            return before if before.startswith(IMPORT) else f"{IMPORT} by {before}" if before else IMPORT
        if name.startswith("f:"):
            return f"task {name[2:]}"
        return before

    def add_import(self, found: Dependencies, path: str, way: str) -> set[str]:
        """Add the body of a module, and the modules that it imports: one imported earlier leaves no other trace."""
        imported: set[str] = set()
        for file in self.places(path):
            source = self.sources.file(file)
            if source is None:
                continue
            module = source.blocks[0]
            found.lines[file].add(module.start)
            found.through[file, module.name].add(way)
            imported |= self.sources.imported_by(file, module)
            imported.update(self.sources.files_of_module(file))
        return imported

    def within(self, way: str, process: str) -> str:
        """Trace the way to a context, and the process in which its code ran; many import the same modules."""
        if way.startswith(IMPORT):
            return way
        ran = self.contexts.get(process, Context())
        place = f"{ran.kind} {ran.text}" if ran.kind else "the test process"
        return place if not way else way if place in (way, "the test process") else f"{way}, in {place}"

    def add_code(self, found: Dependencies, code: Code, ways: set[str]) -> set[str]:
        imported: set[str] = set()
        for file in self.places(code.file):
            source = self.sources.file(file)
            if source is None:
                continue
            block = source.block_at(code.first_line, code.name)
            found.lines[file].add(block.start)
            found.through[file, block.name] |= ways
            imported |= self.sources.imported_by(file, block) | {file}
        return imported

    def add_data(self, found: Dependencies, path: str, way: str) -> None:
        for file in self.places(path):
            absolute = self.sources.root / file
            if file in self.written or not absolute.is_file():
                continue
            siblings = [absolute]
            if absolute.name in MODEL_CONFIGURATIONS:
                siblings += [other for other in absolute.parent.iterdir() if other.name.endswith(MODEL_FILES)]
            for each in siblings:
                relative = each.relative_to(self.sources.root).as_posix()
                if relative not in self.written:
                    found.lines[relative].add(1)
                    found.through[relative, ""].add(way or "the test process")

    def add_unrecorded(self, found: Dependencies, context: Context) -> None:
        for callee, files in context.sent.items():
            if callee in context.arrived:
                continue
            places = {place for file in files for place in self.places(file)}
            if ANYTHING in files:
                self.add_everything(found)
            elif not places:
                continue  # a library's
            found.unrecorded.add(f"{callee} {' '.join(sorted(places))}".rstrip())
            self.add_whole(found, self.sources.closure(places), "import map")

    def add_everything(self, found: Dependencies) -> None:
        if self.all_files is None:
            self.all_files = self.sources.all_files()
        self.add_whole(found, self.all_files, "unknown, so everything")

    def add_whole(self, found: Dependencies, files: Iterable[str], way: str) -> None:
        for file in files:
            source = self.sources.file(file)
            for block in source.blocks if source is not None else ():
                found.lines[file].add(block.start)
                found.through[file, block.name].add(way)

    def changed_since(self, lines: int, found: Dependencies) -> bool:
        """Tell if anything that this test reaches was recorded after so many lines."""
        return any(self.contexts[name].changed > lines for name in found.contexts if name in self.contexts)

    def places(self, path: str) -> list[str]:
        """List possible places of a recorded path in the project.

        Ray unpacks a `working_dir` elsewhere, under the name of its hash.
        """
        if path.startswith(MODULE_PREFIX):
            return self.sources.files_called(path.removeprefix(MODULE_PREFIX))
        if not path.startswith(UPLOADED):
            return [path]
        inner = path.partition("/")[2].partition("/")[2]
        if (self.sources.root / inner).is_file():
            return [inner]
        return sorted(
            file.relative_to(self.sources.root).as_posix()
            for file in self.sources.root.glob(f"**/{glob.escape(inner)}")
            if file.is_file() and f"{os.sep}." not in str(file.relative_to(self.sources.root))
        )
