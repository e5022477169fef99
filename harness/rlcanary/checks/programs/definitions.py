"""The definitions at the top of modules, and the meanings of the names that they use."""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from symtable import SymbolTable, symtable


class NotAlone(Exception):
    """A program cannot do without rlcanary. The message is the reason."""


@dataclass(frozen=True)
class Ref:
    """A definition at the top of a module."""

    module: str
    name: str


@dataclass(frozen=True)
class Module:
    """A module whose definitions are copied."""

    name: str


Meaning = Ref | Module | str
"""What a name stands for; a text is an import line of another package."""


@dataclass
class Code:
    """A statement and what it uses.

    Attributes:
        text: the statement.
        names: the meanings of the global names in it.
        members: the definitions that it reaches through a module, by the names of the module and the attribute.
        methods: the names of the attributes that it calls, or takes from itself or the adapter.
    """

    text: str
    names: dict[str, Meaning]
    members: dict[tuple[str, str], Ref]
    methods: set[str]


@dataclass(frozen=True)
class Reader:
    """Finds the meanings of names.

    Attributes:
        own: modules and packages whose definitions are copied rather than imported.
    """

    own: frozenset[str]

    def code(self, node: ast.AST, meaning: Callable[[str], Meaning | None]) -> Code:
        """Find what a statement uses.

        Args:
            node: the statement.
            meaning: gives the meanings of global names, None for those that are built in.

        Raises:
            NotAlone: it uses a copied module other than by naming its definitions.
        """
        text = ast.unparse(node)
        names = {name: found for name in _globals(symtable(text, "", "exec")) if (found := meaning(name))}
        modules = {name: found.name for name, found in names.items() if isinstance(found, Module)}
        code, through = Code(text, names, {}, set()), set()
        for each in ast.walk(node):
            match each:
                case ast.Attribute(value=ast.Name(id=name) as value, attr=attribute) if name in modules:
                    found = self.member(modules[name], attribute)
                    if not isinstance(found, Ref):
                        raise NotAlone(f"{modules[name]}.{attribute} is defined elsewhere")
                    code.members[name, attribute] = found
                    through.add(value)
                case ast.Name(id=name) if name in modules and each not in through:
                    raise NotAlone(f"the module {modules[name]} is used as a value")
                case ast.Call(func=ast.Attribute(value=value, attr=name)) if getattr(value, "id", None) not in modules:
                    code.methods.add(name)
                case ast.Attribute(value=ast.Name(id="adapter" | "self" | "cls"), attr=name):
                    code.methods.add(name)
        return code

    def imported(self, node: ast.Import | ast.ImportFrom, module: str) -> dict[str, Meaning]:
        """Return the meanings of the names that an import statement of a module binds."""
        found: dict[str, Meaning] = {}
        for alias in node.names:
            renamed = f" as {alias.asname}" if alias.asname else ""
            if isinstance(node, ast.Import):
                bound = alias.name if alias.asname else alias.name.partition(".")[0]
                line = f"import {alias.name}{renamed}"
                found[alias.asname or bound] = Module(bound) if self._is_own(alias.name) else line
            else:
                source = _source(node, module)
                line = f"from {source} import {alias.name}{renamed}"
                is_own = self._is_own(source) or self._is_own(f"{source}.{alias.name}")
                found[alias.asname or alias.name] = self.member(source, alias.name) if is_own else line
        return found

    def member(self, module: str, name: str) -> Meaning:
        """Return the meaning of a name in a copied module or package.

        Raises:
            NotAlone: no statement of the module defines it.
        """
        node = _statements(module).get(name)
        if isinstance(node, ast.Import | ast.ImportFrom):
            return self.imported(node, module)[name]
        if node is not None:
            return Ref(module, name)
        if hasattr(importlib.import_module(module), "__path__") and importlib.util.find_spec(f"{module}.{name}"):
            return Module(f"{module}.{name}")
        raise NotAlone(f"no statement of {module} defines {name}")

    def _is_own(self, module: str) -> bool:
        return module in self.own or module.partition(".")[0] in self.own


class _Stripper(ast.NodeTransformer):
    """Takes from a definition what a program does without."""

    def __init__(self, reader: Reader, module: str, left_out: frozenset[str]) -> None:
        self.reader, self.module, self.left_out = reader, module, left_out
        self.imported: dict[str, Meaning] = {}
        self.fields: set[ast.stmt] = set()

    def generic_visit(self, node: ast.AST) -> ast.AST:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() if ast.get_docstring(node, clean=False):
                del node.body[0]
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                node.returns = None
            case ast.arg():
                node.annotation = None
        super().generic_visit(node)
        if getattr(node, "body", None) == []:
            node.body = [ast.Pass()]  # type: ignore[attr-defined]
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.body = [each for each in node.body if getattr(each, "name", None) not in self.left_out]
        # Classes inside it have methods of their own.
        self.left_out = frozenset()
        self.fields.update(node.body)
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        if node in self.fields and "ClassVar" not in ast.unparse(node.annotation):
            # The fields of a dataclass need an annotation.
            node.annotation = ast.Name("object")
            return self.generic_visit(node)
        return self.generic_visit(ast.Assign([node.target], node.value, lineno=0)) if node.value else None

    def visit_Import(self, node: ast.Import) -> ast.AST | None:
        return self._import(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        return self._import(node)

    def _import(self, node: ast.Import | ast.ImportFrom) -> ast.AST | None:
        found = self.reader.imported(node, self.module)
        lines = [line for line in found.values() if isinstance(line, str)]
        if not lines:
            self.imported |= found
            return None
        if len(lines) < len(found):
            raise NotAlone(f"{self.module} imports rlcanary and other packages in one statement")
        if isinstance(node, ast.ImportFrom):
            node.module, node.level = _source(node, self.module), 0
        return node


@cache
def definition(reader: Reader, ref: Ref, left_out: frozenset[str]) -> Code:
    """Read a definition without docstrings, annotations, imports of copied modules and these methods of a class.

    Raises:
        NotAlone: it cannot be copied.
    """
    stripper = _Stripper(reader, ref.module, left_out)

    def meaning(name: str) -> Meaning | None:
        if name in stripper.imported:
            return stripper.imported[name]
        is_built_in = hasattr(builtins, name) and name not in _statements(ref.module)
        return None if is_built_in else reader.member(ref.module, name)

    node = stripper.visit(ast.parse(ast.unparse(_statements(ref.module)[ref.name])).body[0])
    return reader.code(node, meaning)


@cache
def _statements(module: str) -> dict[str, ast.stmt]:
    """The statements of a module that bind its names."""
    try:
        tree = ast.parse(inspect.getsource(importlib.import_module(module)))
    except (OSError, TypeError) as error:
        raise NotAlone(f"{module} has no source") from error
    found: dict[str, ast.stmt] = {}
    for node in tree.body:
        # What is imported there for annotations tells where a lazy package has its names from.
        is_lazy = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for each in getattr(node, "body", []) if is_lazy else [node]:
            table = symtable(ast.unparse(each), "", "exec")
            names = [
                symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()
            ]
            found |= dict.fromkeys(names, each)
    return found


def _globals(table: SymbolTable) -> Iterator[str]:
    """The global names that code reads, from inside its functions and classes too."""
    yield from (symbol.get_name() for symbol in table.get_symbols() if symbol.is_global() and symbol.is_referenced())
    for inner in table.get_children():
        yield from _globals(inner)


def _source(node: ast.ImportFrom, module: str) -> str:
    """The absolute name of the module that an import statement of a module names."""
    if not node.level:
        return node.module or ""
    package = module if hasattr(importlib.import_module(module), "__path__") else module.rpartition(".")[0]
    return importlib.util.resolve_name("." * node.level + (node.module or ""), package)
