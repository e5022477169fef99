"""Programs with the source of everything of rlcanary's that they use, so that they run without it."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter

from rlcanary.checks.programs.definitions import Code, NotAlone, Reader, Ref, definition
from rlcanary.checks.programs.program import merged
from rlcanary.contract.adapter import Adapter

USED = "# What the check uses of rlcanary and the adapter."


def standalone(program: str, adapter: Adapter, spec: str) -> str:
    """Write a finding's program with the definitions that it imports from rlcanary and from the adapter's module.

    Where that cannot be, it still imports rlcanary, and its first line says why.

    Args:
        program: the program.
        adapter: the adapter that it loads.
        spec: the adapter's name for `load_adapter`.
    """
    try:
        return _Alone(program, adapter, spec).text()
    except NotAlone as reason:
        return f"# Needs rlcanary: {reason}.\n{program}"


class _Alone:
    """A program that runs without rlcanary."""

    def __init__(self, program: str, adapter: Adapter, spec: str) -> None:
        made = type(adapter)
        if any(value is adapter for value in vars(sys.modules[made.__module__]).values()):
            raise NotAlone(f"{made.__module__} makes the adapter")
        classes = [each for each in made.__mro__ if issubclass(each, Adapter) or each in Adapter.__mro__[:-1]]
        self._adapters = {Ref(each.__module__, each.__qualname__): each for each in classes}
        self._reader = Reader(frozenset({"rlcanary", *(each.__module__ for each in classes)}))
        loads, makes = f"load_adapter({spec!r})", f"{made.__name__}()"
        self._program = f"from {made.__module__} import {made.__name__}\n{program.replace(loads, makes)}"
        tree = ast.parse(self._program)
        imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        self._statements = tree.body[len(imports) :]
        meanings = {name: found for node in imports for name, found in self._reader.imported(node, "").items()}
        self._top = self._reader.code(ast.Module(self._statements, []), meanings.get)
        self._found: dict[Ref, Code] = {}
        self._methods: set[str] = set()
        # A method may call methods of classes that were read before it.
        before = None
        while self._methods != before:
            before, self._found = self._methods, {}
            self._add(self._top, [])
            self._methods = {name for code in self._codes() for name in code.methods}

    def text(self) -> str:
        """Write the program."""
        names = self._names()
        body, call = (node.lineno - 1 for node in (self._statements[0], self._statements[-1]))
        lines = self._program.splitlines()
        top = "\n".join(lines[body:call]).rstrip()
        for (module, attribute), ref in self._top.members.items():
            top = re.sub(rf"\b{module}\.{attribute}\b", names[ref], top)
        used = dict.fromkeys(_written(ref, code, names) for ref, code in self._found.items())
        text = "\n\n\n".join([merged(self._imports()), top, USED, *used, "\n".join(lines[call:])]).lstrip()
        needs = {package for node in ast.walk(ast.parse(text)) for package in _packages(node)}
        return f"# Needs {', '.join(sorted(needs - sys.stdlib_module_names)) or 'nothing but Python'}.\n{text}\n"

    def _add(self, code: Code, path: list[Ref]) -> None:
        """Add the definitions that this code uses, each behind those that it needs itself."""
        for ref in [*code.names.values(), *code.members.values()]:
            if isinstance(ref, Ref) and ref not in self._found and ref not in path:
                methods = vars(self._adapters[ref]).keys() if ref in self._adapters else set()
                unused = {name for name in methods - self._methods if not name.startswith("__")}
                found = definition(self._reader, ref, frozenset(unused))
                self._add(found, [*path, ref])
                self._found[ref] = found

    def _codes(self) -> list[Code]:
        return [self._top, *self._found.values()]

    def _imports(self) -> set[str]:
        return {found for code in self._codes() for found in code.names.values() if isinstance(found, str)}

    def _names(self) -> dict[Ref, str]:
        """Name definitions as they are, or with their module in front where it stood or the name is taken."""
        taken = [line.split()[-1] for line in self._imports()]
        taken += [node.name for node in self._statements if isinstance(node, ast.FunctionDef)]
        through = {ref for code in self._codes() for ref in code.members.values()}
        names = {ref: name for name, ref in self._top.names.items() if isinstance(ref, Ref)}
        for ref in self._found:
            if ref not in names:
                is_plain = ref not in through and ref.name not in [*taken, *names.values()]
                names[ref] = ref.name if is_plain else f"{ref.module.rpartition('.')[2]}_{ref.name}"
        twice = [name for name, count in Counter([*taken, *names.values()]).items() if count > 1]
        if twice:
            raise NotAlone(f"two definitions are called {twice[0]}")
        return names


def _written(ref: Ref, code: Code, names: dict[Ref, str]) -> str:
    (node,) = ast.parse(code.text).body
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        node.name = names[ref]
    return ast.unparse(_Renamer(ref, code, names).visit(node))


class _Renamer(ast.NodeTransformer):
    """Gives a definition, and those that it uses, their names in the program."""

    def __init__(self, ref: Ref, code: Code, names: dict[Ref, str]) -> None:
        self.names = {name: names[found] for name, found in code.names.items() if isinstance(found, Ref)}
        self.names[ref.name] = names[ref]
        self.members = {member: names[found] for member, found in code.members.items()}

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        if isinstance(node.value, ast.Name) and (node.value.id, node.attr) in self.members:
            return ast.Name(self.members[node.value.id, node.attr])
        self.visit(node.value)
        return node

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self.names.get(node.id, node.id))


def _packages(node: ast.AST) -> list[str]:
    match node:
        case ast.Import(names=names):
            return [alias.name.partition(".")[0] for alias in names]
        case ast.ImportFrom(module=str() as module):
            return [module.partition(".")[0]]
    return []
