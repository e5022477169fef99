"""Map the Python files of a project: which files their import statements name, and which constants code reads."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from rlcanary.selection.injected.rlcanary_recorder.files import signature
from rlcanary.selection.source_file import ALL, VERSION, Block, Import, SourceFile, parsed


class SourceMap:
    """The Python files of a project, parsed lazily.

    Args:
        root: the project.
        search: folders that imports are looked up in, as in `sys.path`; those outside the project are left out.
    """

    def __init__(self, root: Path, search: Iterable[str] = ()) -> None:
        self.root = root
        self.real_root = root.resolve()
        # Import hooks put texts into sys.path that are no folders.
        folders = [path for path in search if not path or os.path.isabs(path) or os.path.isdir(path)]
        inside = [path for path in map(os.path.realpath, folders) if Path(path).is_relative_to(self.real_root)]
        relative = [os.path.relpath(path, self.real_root) for path in inside]
        self.search = list(dict.fromkeys(["", *("" if path == "." else path for path in relative)]))
        self.present: dict[str, bool] = {}
        self.files: dict[str, SourceFile | None] = {}
        self.signatures: dict[str, str] = {}
        self.resolved: dict[tuple[str, Import], frozenset[str]] = {}
        self.looked_up: dict[tuple[str, str], frozenset[str]] = {}
        self.modules: dict[str, dict[str, set[str]]] = {}

    def file(self, path: str) -> SourceFile | None:
        """Return the file at this path in the project; None if there is none."""
        if path not in self.files:
            try:
                self.signatures[path] = signature(os.stat(self.root / path))
                self.files[path] = parsed((self.root / path).read_bytes())
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                self.files[path] = None
        return self.files[path]

    def imported_by(self, path: str, block: Block) -> frozenset[str]:
        """List the project files that the statements of a block import, including packages on the way."""
        found: set[str] = set()
        for statement in block.imports:
            if (path, statement) not in self.resolved:
                self.resolved[path, statement] = frozenset(self.resolve(path, statement))
            found |= self.resolved[path, statement]
        return frozenset(found - {path})

    def resolve(self, path: str, statement: Import) -> Iterator[str]:
        parts = statement.module.split(".") if statement.module else []
        for place in self.places(path, statement):
            if statement.level:
                yield from self.module_files(place)
            yield from self.modules_along(place, parts)
            folder = os.path.join(place, *parts)
            for name in statement.names:
                yield from self.module_files(os.path.join(folder, name))

    def modules_in(self, path: str) -> dict[str, set[str]]:
        """Return the names that stand for modules of the project in a file, with the files that these can be."""
        if path not in self.modules:
            found = self.modules[path] = defaultdict(set)
            source = self.file(path)
            for block in source.blocks if source is not None else ():
                for statement in block.imports:
                    for name, module in self.modules_bound(path, statement):
                        found[name].update(self.module_files(module))
        return self.modules[path]

    def modules_bound(self, path: str, statement: Import) -> Iterator[tuple[str, str]]:
        """Yield the names that a statement may bind to modules, and the places of these."""
        parts = statement.module.split(".") if statement.module else []
        for place in self.places(path, statement):
            for number, part in enumerate(() if statement.names else parts):
                yield part, os.path.join(place, *parts[: number + 1])
            for name in statement.names:
                yield name, os.path.join(place, *parts, name)

    def candidates(self, path: str, block: Block) -> frozenset[str]:
        """List the paths in the project, without an ending, at which the imports of a block are looked up."""
        key = path, block.name
        if key not in self.looked_up:
            self.looked_up[key] = frozenset(self.find_candidates(path, block))
        return self.looked_up[key]

    def find_candidates(self, path: str, block: Block) -> Iterator[str]:
        for statement in block.imports:
            parts = statement.module.split(".") if statement.module else []
            if parts and parts[0] in sys.builtin_module_names:
                continue
            for place in self.places(path, statement):
                for number, part in enumerate(parts):
                    folder = os.path.join(place, *parts[:number])
                    if number and not self.is_folder(folder):
                        break
                    yield os.path.join(folder, part)
                inner = os.path.join(place, *parts)
                if self.is_folder(inner):
                    yield from (os.path.join(inner, name) for name in statement.names if name != "*")

    def places(self, path: str, statement: Import) -> list[str]:
        """List the folders in which a file's import looks for a module."""
        here = os.path.dirname(path)
        if not statement.level:
            return list(dict.fromkeys([*self.search, here]))
        for _ in range(statement.level - 1):
            here = os.path.dirname(here)
        return [here]

    def is_folder(self, path: str) -> bool:
        key = f"{path}/"
        if key not in self.present:
            self.present[key] = os.path.isdir(os.path.join(self.real_root, path))
        return self.present[key]

    def files_called(self, module: str) -> list[str]:
        """List the project files that a module of this name can be."""
        parts = module.split(".")
        return sorted({file for place in self.search for file in self.module_files(os.path.join(place, *parts))})

    def modules_along(self, folder: str, parts: list[str]) -> Iterator[str]:
        for part in parts:
            folder = os.path.join(folder, part)
            yield from self.module_files(folder)

    def module_files(self, module: str) -> Iterator[str]:
        """List the files that a module at this path, relative to the root and without its ending, can be."""
        for candidate in (os.path.join(module, "__init__.py"), f"{module}.py"):
            if self.is_file(candidate):
                yield candidate

    def is_file(self, path: str) -> bool:
        if path not in self.present:
            self.present[path] = os.path.isfile(os.path.join(self.real_root, path))
        return self.present[path]

    def files_of_module(self, path: str) -> list[str]:
        """List a module's file and the `__init__.py` of the packages around it, which are imported first."""
        found, folder = [path], os.path.dirname(path)
        while folder and self.is_file(package := os.path.join(folder, "__init__.py")):
            found.append(package)
            folder = os.path.dirname(folder)
        return found

    def closure(self, paths: Iterable[str]) -> set[str]:
        """Follow imports anywhere in these files, transitively: the static import map."""
        reached: set[str] = set()
        waiting = [file for path in paths for file in self.files_of_module(path)]
        while waiting:
            path = waiting.pop()
            if path in reached:
                continue
            source = self.file(path)
            if source is None:
                continue
            reached.add(path)
            for block in source.blocks:
                for imported in self.imported_by(path, block):
                    waiting.extend(self.files_of_module(imported))
        return reached

    def all_files(self) -> set[str]:
        """List every Python file of the project, without hidden folders and installed packages."""
        found: set[str] = set()
        for folder, folders, files in os.walk(self.root):
            here = Path(folder)
            folders[:] = [name for name in folders if is_project_folder(here / name)]
            found.update((here / name).relative_to(self.root).as_posix() for name in files if name.endswith(".py"))
        return found


class Reading:
    """The names that the blocks of some code read.

    Args:
        sources: the project.
        blocks: the code, by file and name.
        modules_in: returns the files of the modules that a function was seen to import.
        handed: files of modules that code outside of the project got hold of.
    """

    def __init__(
        self,
        sources: SourceMap,
        blocks: Mapping[tuple[str, str], Block],
        modules_in: Callable[[tuple[str, str]], set[str]],
        handed: Iterable[str] = (),
    ) -> None:
        self.sources, self.modules_in = sources, modules_in
        self.names: set[str] = set()
        self.handed: set[str] = set()  # classes that others were given
        self.own: defaultdict[str, set[str]] = defaultdict(set)  # names by file
        self.whole: set[str] = set()  # files of which any name may be read
        self.beginnings: set[str] = set()
        self.anything = self.attributes = False
        for place, block in blocks.items():
            self.add(place, block)
        for file in handed:
            self.add_whole(file)
        if "importorskip" in self.names:
            self.names.add(VERSION)

    def add(self, place: tuple[str, str], block: Block) -> None:
        self.names |= block.elsewhere
        self.handed |= block.handed
        self.own[place[0]] |= block.names
        self.beginnings |= block.beginnings
        self.anything = self.anything or block.dynamic
        self.attributes = self.attributes or block.reads_attributes
        if any("*" in statement.names for statement in block.imports):
            self.names.add(ALL)
        if block.reads_own:
            self.add_whole(place[0])
        handed = block.handed | (block.names if "modules" in block.names else set())  # sys.modules
        modules_here = self.sources.modules_in(place[0])
        for module in {file for name in handed & modules_here.keys() for file in modules_here[name]}:
            self.add_whole(module)
        if block.reads_modules or block.modules & block.handed:
            modules = self.modules_in(place)
            self.anything = self.anything or not modules
            for module in modules:
                self.add_whole(module)

    def add_whole(self, file: str) -> None:
        """Any name of this file may be read, those that it imports from others among them."""
        source = self.sources.file(file)
        if file not in self.whole and source is not None:
            self.whole.add(file)
            self.names |= source.imported_names
            self.anything = self.anything or "*" in source.imported_names

    def of(self, files: Iterable[str]) -> Iterator[tuple[str, Block]]:
        """Yield the constants in these files that may be read."""
        begins = tuple(self.beginnings)
        files = list(files)
        handed = self._with_bases(files)
        for file in files:
            source = self.sources.file(file)
            own = set(self.own[file])
            every = self.anything or file in self.whole
            for constant in reversed(source.constants) if source is not None else ():  # each reads earlier ones only
                name = constant.last_name
                by_class = "." in constant.name and (self.attributes or constant.name.partition(".")[0] in handed)
                if every or by_class or name in self.names or name in own or name.startswith(begins):
                    own |= constant.names
                    yield file, constant

    def _with_bases(self, files: Iterable[str]) -> set[str]:
        """Return the classes that others were given, and what they inherit from."""
        bases: defaultdict[str, set[str]] = defaultdict(set)
        for source in map(self.sources.file, files):
            for name, own in source.bases.items() if source is not None else ():
                bases[name] |= own
        handed, new = set(self.handed), set(self.handed)
        while new := {base for name in new if name in bases for base in bases[name]} - handed:
            handed |= new
        return handed


def is_project_folder(folder: Path) -> bool:
    foreign = folder.name.startswith(".") or folder.name in ("__pycache__", "site-packages", "node_modules")
    return not foreign and not (folder / "pyvenv.cfg").exists()
