"""Derive each test's dependencies from the records of a run's processes."""

from __future__ import annotations

import glob
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from rlcanary.selection import questions
from rlcanary.selection.injected.rlcanary_recorder.core import ANYTHING, MODULE_PREFIX, UNKNOWN, UPLOADED
from rlcanary.selection.injected.rlcanary_recorder.files import (
    EXISTS,
    FILE,
    FOLDER,
    UNKNOWN_CONTENT,
    content,
    signature,
)
from rlcanary.selection.injected.rlcanary_recorder.variables import ENVIRONMENT
from rlcanary.selection.memoised import Code, Fact, Memoised
from rlcanary.selection.source_file import Block
from rlcanary.selection.source_map import Reading, SourceMap

IMPORT = "import"
READ = "its value"
FILLED = "what an earlier test filled"
# Siblings of a model's or tokenizer's configuration are read by native code, which no hook of Python sees.
MODEL_CONFIGURATIONS = ("config.json", "tokenizer_config.json", "generation_config.json")
MODEL_FILES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".vocab")


class Question(NamedTuple):
    """Something that code asked about the project's folders or the environment, and the answer it got."""

    kind: str
    about: str
    answer: str


@dataclass
class Context:
    """The facts recorded about one context (see `rlcanary_recorder.writing`)."""

    kind: str = ""
    text: str = ""
    code: dict[Code, set[str]] = field(default_factory=dict)  # and the processes in which it ran
    data: set[str] = field(default_factory=set)
    asked: set[Question] = field(default_factory=set)
    uses: set[str] = field(default_factory=set)
    sent: dict[str, tuple[str, ...]] = field(default_factory=dict)
    arrived: set[str] = field(default_factory=set)
    handed: set[str] = field(default_factory=set)
    depends_on_everything: bool = False
    changed: int = 0  # how many lines had been read when it last changed


@dataclass
class Dependencies:
    """The dependencies of a test.

    Attributes:
        lines: file to the lines at which pytest-testmon's blocks of the code begin; 1 for a data file.
        through: (file, name of the function, or "" for data) to the ways in which it was reached.
        answers: to the questions that code asked; see `questions`.
        changed: files that changed after they were read, so that no fingerprint of them is known.
        blocks: the code that was reached, by file and name.
        unrecorded: calls that left no record, for which the files that they import are counted.
        contexts: all contexts that were reached.
        handed: the files of modules that code outside of the project got hold of.
    """

    lines: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    through: dict[tuple[str, str], set[str]] = field(default_factory=lambda: defaultdict(set))
    answers: dict[str, str] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    blocks: dict[tuple[str, str], Block] = field(default_factory=dict)
    unrecorded: set[str] = field(default_factory=set)
    contexts: set[str] = field(default_factory=set)
    handed: set[str] = field(default_factory=set)


class Run:
    """All contexts of a run, and the present files of the project."""

    def __init__(self, sources: SourceMap, environment: Mapping[str, str] | None = None) -> None:
        self.sources, self.root = sources, str(sources.root)
        self.environment = dict(os.environ if environment is None else environment)
        self.contexts: defaultdict[str, Context] = defaultdict(Context)
        self.written: defaultdict[str, set[str]] = defaultdict(set)
        self.versions: defaultdict[str, set[str]] = defaultdict(set)
        self.memoised = Memoised(self)
        self.known_blocks: dict[Code, list[tuple[str, Block]]] = {}
        self.problems: list[str] = []
        self.tests: dict[str, list[str]] = {}
        self.lines_read = 0
        self.all_files: set[str] | None = None

    def add(self, lines: Iterable[tuple[str, list[str]]]) -> None:
        """Add lines of journals, each with the process that wrote it."""
        for process, (kind, *fields) in lines:
            self.lines_read += 1
            match kind, fields:
                case "c", [context, file, line, name, *caller]:
                    code = Code(file, int(line), name)
                    self.of(context).code.setdefault(code, set()).add(process)
                    self.memoised.add_code(context, code, any(caller[:1]))
                    self.add_fact(context, caller, "c", code)
                case "d", [context, file, *more]:
                    self.of(context).data.add(file)
                    self.versions[file].update(more[:1])
                    self.add_fact(context, more[1:], "d", file)
                case "q", [context, asked, file, answer, *caller]:
                    question = Question(asked, file, answer)
                    self.of(context).asked.add(question)
                    self.add_fact(context, caller, "q", question)
                case "v", [file, version]:
                    self.versions[file].add(version)
                case "w", [file, *before]:
                    self.written[file].update(before or [UNKNOWN_CONTENT])
                case "u", [context, used, *caller]:
                    self.of(context).uses.add(used)
                    self.add_fact(context, caller, "u", used)
                case "l", [context, text, label]:
                    self.of(context).kind, self.of(context).text = text, label
                    if text == "test":
                        self.tests.setdefault(label, []).append(context)
                case "s", [context, callee, *files]:
                    self.of(context).sent[callee] = tuple(files)
                case "r", [context, callee]:
                    self.of(context).arrived.add(callee)
                case "h", [context, file]:
                    self.of(context).handed.add(file)
                case "a", [context]:
                    self.of(context).depends_on_everything = True
                case "p", [text]:
                    if text not in self.problems:
                        self.problems.append(text)

    def add_fact(self, context: str, caller: list[str], kind: str, what: object) -> None:
        match caller:
            case [file, line] if file and line != "0":
                self.memoised.add_fact(context, file, line, Fact(kind, what))

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
        done: set[tuple[str, str]] = set()
        seen: set[Fact] = set()
        while waiting:
            self.follow(found, waiting)
            waiting = self.add_filled(found, done, seen)
        self.add_constants(found)
        self.add_questions_of_imports(found)
        self.drop_answered(found)
        found.changed.update(file for file in found.lines if self.is_changed(file))
        return found

    def follow(self, found: Dependencies, waiting: list[tuple[str, str]]) -> None:
        """Add what these contexts recorded, and the contexts that they use."""
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
            for question in context.asked:
                self.add_question(found, question)
            found.handed.update(place for file in context.handed for place in self.places(file))
            self.add_unrecorded(found, context)
            if context.depends_on_everything:
                self.add_everything(found)

    def add_filled(self, found: Dependencies, done: set[tuple[str, str]], seen: set[Fact]) -> list[tuple[str, str]]:
        """Add what earlier tests did for this one; return the contexts in which it was done."""
        used: set[str] = set()
        names = {name for block in found.blocks.values() for name in block.names}
        new = [(place[0], block) for place, block in found.blocks.items() if place not in done]
        done.update(found.blocks)
        facts = set(self.memoised.filled(new, names, found.lines)) - seen
        seen |= facts
        for fact in facts:
            match fact.what:
                case Code() as code:
                    used.update(f"m:{file}" for file in self.add_code(found, code, {FILLED}))
                case Question() as question:
                    self.add_question(found, question)
                case str() as text if fact.kind == "d":
                    self.add_data(found, text, FILLED)
                case str() as context:
                    used.add(context)
        return [(context, FILLED) for context in used - found.contexts]

    def add_constants(self, found: Dependencies) -> None:
        """Add the constants that the code which was reached reads."""
        reading = Reading(self.sources, found.blocks, self.memoised.modules_in, found.handed)
        for file, constant in reading.of(list(found.lines)):
            found.lines[file].add(constant.start)
            found.through[file, constant.name].add(READ)

    def add_questions_of_imports(self, found: Dependencies) -> None:
        """Ask which modules of the project could take the place of those that are imported."""
        for (file, _), block in found.blocks.items():
            candidates = self.sources.candidates(file, block)
            if candidates:
                found.answers[questions.of_candidates(candidates)] = ""

    def drop_answered(self, found: Dependencies) -> None:
        """Leave out the questions whether files and folders exist that other dependencies answer."""
        there = {parent for file in found.lines for parent in parents_of(file)}
        for question, answer in list(found.answers.items()):
            about, _, kind = question.rpartition(questions.MARK)
            if kind == EXISTS and ((answer == FILE and about in found.lines) or (answer == FOLDER and about in there)):
                del found.answers[question]

    def blocks_of(self, code: Code) -> list[tuple[str, Block]]:
        """List the blocks of the project that a code object can be, with their files."""
        if code not in self.known_blocks:
            sources = [(file, self.sources.file(file)) for file in self.places(code.file)]
            self.known_blocks[code] = [
                (file, block)
                for file, source in sources
                if source is not None
                for block in source.blocks_at(code.first_line, code.name)
            ]
        return self.known_blocks[code]

    def is_written(self, file: str) -> bool:
        """Tell if the run changed a file: it opened it for writing, and the content is another than before."""
        before = self.written.get(file)
        if before is None:
            return False
        known = before - {UNKNOWN_CONTENT}
        return not known or known != {content(f"{self.root}/{file}")}

    def is_changed(self, file: str) -> bool:
        """Tell if a file was changed by something else than the run, after the run had read it."""
        if file in self.written and not self.is_written(file):
            return False  # the run wrote what was there
        versions = self.versions.get(file, set()) | {self.sources.signatures.get(file, "")} - {""}
        try:
            return bool(versions - {"", signature(os.stat(f"{self.root}/{file}"))})
        except OSError:
            return True

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
            found.blocks[file, module.name] = module
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
        for file, block in self.blocks_of(code):
            found.lines[file].add(block.start)
            found.blocks[file, block.name] = block
            found.through[file, block.name] |= ways
            imported |= self.sources.imported_by(file, block) | {file}
        return imported

    def add_data(self, found: Dependencies, path: str, way: str) -> None:
        for file in self.places(path):
            absolute = self.sources.root / file
            if self.is_written(file) or not absolute.is_file():
                continue
            siblings = [absolute]
            if absolute.name in MODEL_CONFIGURATIONS:
                siblings += [other for other in absolute.parent.iterdir() if other.name.endswith(MODEL_FILES)]
            for each in siblings:
                relative = each.relative_to(self.sources.root).as_posix()
                if not self.is_written(relative):
                    self.add_content(found, relative, way)

    def add_content(self, found: Dependencies, file: str, way: str) -> None:
        """Add a data file, which is one block; one of code that is read as data counts with its comments."""
        if file.endswith(".py"):
            found.answers[questions.named(questions.CONTENT, file)] = ""
        found.lines[file].add(1)
        found.through[file, ""].add(way or "the test process")

    def add_question(self, found: Dependencies, question: Question) -> None:
        """Add a question, with the answer of now, unless something else than the run changed it since it was asked."""
        for file in self.places(question.about):
            if question.kind == ENVIRONMENT:
                if question.answer == questions.of_variable(self.environment, file):
                    found.answers[questions.named(question.kind, file)] = ""
            elif not (question.kind == EXISTS and self.is_written(file)):
                found.answers[questions.named(question.kind, file)] = question.answer

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
            for block in [*source.blocks, *source.constants] if source is not None else ():
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


def parents_of(file: str) -> Iterator[str]:
    while "/" in file:
        file = file.rpartition("/")[0]
        yield file
