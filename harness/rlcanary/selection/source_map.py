"""Map Python files without running them: the places of their functions, and the project files that they import."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

MODULE = 0
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Import:
    """An import statement.

    Attributes:
        module: the name as written.
        level: number of leading dots.
        names: the names that `from … import` takes, or nothing.
    """

    module: str
    level: int
    names: tuple[str, ...]


@dataclass
class Block:
    """The body of a function or, at line 0, of the module.

    Attributes:
        first: the line at which the code begins, decorators included, as `co_firstlineno` has it.
        start: the line of the first statement of the body, which is where pytest-testmon's block begins.
        end: the last line.
    """

    name: str
    first: int
    start: int
    end: int
    imports: list[Import]


class SourceFile:
    """The blocks of one file. A file that cannot be parsed has only the module's block, and imports nothing."""

    def __init__(self, text: bytes) -> None:
        self.blocks = [Block("<module>", MODULE, 1, 2**31, [])]
        self.imports_by_name = any(name in text for name in (b"import_module", b"__import__", b"importorskip"))
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            return
        if tree.body:
            self.blocks[0].start = tree.body[0].lineno
        self.visit(tree, self.blocks[0], "")

    def visit(self, node: ast.AST, block: Block, prefix: str) -> None:
        """Visit statements only: expressions are most of a tree, and hold no functions except lambdas."""
        for child in statements_in(node):
            if isinstance(child, Function):
                first = min((decorator.lineno for decorator in child.decorator_list), default=child.lineno)
                inner = Block(prefix + child.name, first, child.body[0].lineno, child.end_lineno or child.lineno, [])
                self.blocks.append(inner)
                self.visit(child, inner, f"{prefix}{child.name}.")
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                self.visit(ast.Module(child.orelse, []), block, prefix)
                continue
            if isinstance(child, ast.Import | ast.ImportFrom):
                block.imports.extend(imports_of(child))
            elif self.imports_by_name and not has_statements(child):
                for expression in ast.walk(child):
                    block.imports.extend(imports_of(expression))
            self.visit(child, block, f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix)

    @cached_property
    def by_first_line(self) -> dict[int, Block]:
        return {block.first: block for block in reversed(self.blocks)}

    def block_at(self, first_line: int, name: str) -> Block:
        """Find the block of a code object: its own, or for a lambda, a comprehension or a class the one around it."""
        if name == "<module>":
            return self.blocks[0]
        own = self.by_first_line.get(first_line)
        if own is not None and own.name.rpartition(".")[2] == name.rpartition(".")[2]:
            return own
        around = [block for block in self.blocks if block.start <= first_line <= block.end]
        return max(around, key=lambda block: block.start, default=self.blocks[0])


def statements_in(node: ast.AST) -> Iterator[ast.stmt]:
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, name, ()) if not isinstance(node, ast.expr) else ():
            if isinstance(child, ast.stmt):
                yield child
            else:
                yield from statements_in(child)


def has_statements(node: ast.stmt) -> bool:
    return any(isinstance(getattr(node, name, None), list) for name in ("body", "handlers", "cases"))


def imports_of(node: ast.AST) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, 0, ())
    elif isinstance(node, ast.ImportFrom):
        yield Import(node.module or "", node.level, tuple(alias.name for alias in node.names))
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in ("import_module", "__import__", "importorskip") and isinstance(node.args[0].value, str):
            yield Import(node.args[0].value, 0, ())


class SourceMap:
    """The Python files of a project, parsed lazily.

    Args:
        root: the project.
        search: folders that imports are looked up in, as in `sys.path`; those outside the project are left out.
    """

    def __init__(self, root: Path, search: Iterable[str] = ()) -> None:
        self.root = root
        self.real_root = root.resolve()
        inside = [path for path in map(os.path.realpath, search) if Path(path).is_relative_to(self.real_root)]
        relative = [os.path.relpath(path, self.real_root) for path in inside]
        self.search = list(dict.fromkeys(["", *("" if path == "." else path for path in relative)]))
        self.present: dict[str, bool] = {}
        self.files: dict[str, SourceFile | None] = {}
        self.resolved: dict[tuple[str, Import], frozenset[str]] = {}

    def file(self, path: str) -> SourceFile | None:
        """Return the file at this path in the project; None if there is none."""
        if path not in self.files:
            try:
                self.files[path] = SourceFile((self.root / path).read_bytes())
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
        here = os.path.dirname(path)
        if statement.level:
            for _ in range(statement.level - 1):
                here = os.path.dirname(here)
            places = [here]
        else:
            places = list(dict.fromkeys([*self.search, here]))
        for place in places:
            if statement.level:
                yield from self.module_files(place)
            yield from self.modules_along(place, parts)
            folder = os.path.join(place, *parts)
            for name in statement.names:
                yield from self.module_files(os.path.join(folder, name))

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


def is_project_folder(folder: Path) -> bool:
    foreign = folder.name.startswith(".") or folder.name in ("__pycache__", "site-packages", "node_modules")
    return not foreign and not (folder / "pyvenv.cfg").exists()
