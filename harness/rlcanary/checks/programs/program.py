"""The program that shows a finding again: the body of the check with the inputs of the case filled in."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

from rlcanary.checks.case import Case
from rlcanary.checks.literal import imports_for, literal


def program(body: Callable[..., object], case: Case, spec: str, is_elsewhere: bool = False) -> str:
    """Write a program that runs a check's body on one case.

    It holds the source of the body and of the functions of its own module that it uses, and imports the other names.

    Args:
        body: the check's function.
        case: the inputs and the changed conventions.
        spec: the adapter's name for `load_adapter`.
        is_elsewhere: whether the adapter returns tensors on another device, which the program moves to the CPU.
    """
    assert isinstance(body, FunctionType)
    functions = list(_own_functions(body))
    names = dict(pair for function in functions for pair in _globals(function))
    own = {function.__name__ for function in functions}
    imports = {_import(name, value, body) for name, value in names.items() if name not in own}
    imports |= {"from rlcanary.adapters import load_adapter", *imports_for(case.inputs)}
    changes = ", ".join(f"{name}={literal(value)}" for name, value in case.changes.items())
    adapter = f"load_adapter({spec!r})"
    if is_elsewhere:
        adapter = f"OnCpu({adapter})"
        imports |= {"from rlcanary.checks.devices import OnCpu"}
    adapter += f".configured({changes})" if changes else ""
    inputs = [f"{name}={literal(value)}" for name, value in case.inputs.items()]
    arguments = textwrap.indent(",\n".join([adapter, *inputs]), "    ")
    parts = [
        merged(imports),
        *(_source(function) for function in reversed(functions)),
        f"{body.__name__}(\n{arguments},\n)" if inputs else f"{body.__name__}({adapter})",
    ]
    return "\n\n\n".join(parts)


def merged(imports: set[str]) -> str:
    """Sort import lines, modules first, with one line for all names from a module."""
    names: dict[str, list[str]] = {}
    for line in sorted(imports):
        if line.startswith("from "):
            module, _, name = line.removeprefix("from ").partition(" import ")
            names.setdefault(module, []).append(name)
    modules = sorted(line for line in imports if line.startswith("import "))
    return "\n".join([*modules, *(f"from {module} import {', '.join(found)}" for module, found in names.items())])


def _own_functions(body: FunctionType) -> Iterator[FunctionType]:
    """The body, then the functions of its module that it uses, directly or through each other."""
    found, waiting = [body], [body]
    yield body
    while waiting:
        for _, value in _globals(waiting.pop()):
            if isinstance(value, FunctionType) and value.__module__ == body.__module__ and value not in found:
                found.append(value)
                waiting.append(value)
                yield value


def _globals(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The names of its module that the function's code uses, with their values."""
    for name in _names(function):
        if name in function.__globals__:
            yield name, function.__globals__[name]


@cache
def _names(function: FunctionType) -> list[str]:
    """The names that the function's code uses, except for its local ones."""
    used = [node.id for node in ast.walk(ast.parse(_source(function))) if isinstance(node, ast.Name)]
    return [name for name in used if name not in function.__code__.co_varnames]


def _import(name: str, value: Any, body: FunctionType) -> str:
    if isinstance(value, ModuleType):
        package, _, last = value.__name__.rpartition(".")
        if package and last == name:
            return f"from {package} import {name}"
        return f"import {value.__name__}" if name == value.__name__ else f"import {value.__name__} as {name}"
    is_defined = getattr(value, "__qualname__", None) == name and isinstance(getattr(value, "__module__", None), str)
    return f"from {value.__module__ if is_defined else body.__module__} import {name}"


@cache
def _source(function: FunctionType) -> str:
    """The source of a function without decorators, annotations and docstring."""
    text = textwrap.dedent(inspect.getsource(function))
    (tree,) = ast.parse(text).body
    assert isinstance(tree, ast.FunctionDef)
    statements = tree.body[1:] if ast.get_docstring(tree, clean=False) is not None else tree.body
    for argument in (*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs, tree.args.vararg, tree.args.kwarg):
        if argument:
            argument.annotation = None
    lines = text.splitlines()[_first_line(tree.body, statements) :]
    return "\n".join([f"def {tree.name}({ast.unparse(tree.args)}):", *lines])


def _first_line(body: list[ast.stmt], statements: list[ast.stmt]) -> int:
    """The line after the docstring, so that comments in front of the first statement stay."""
    end = body[0].end_lineno if len(statements) < len(body) else statements[0].lineno - 1
    assert end is not None
    return end
