"""Find where a function fills what later calls read: caches, singletons, attributes that are made when first asked for."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

Function = ast.FunctionDef | ast.AsyncFunctionDef
NEW = ast.Dict | ast.List | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp | ast.Call
IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
LONGEST_NAME_IN_TEXT = 200


@dataclass
class Fill:
    """Lines of a function that run once for many callers, because they keep what they find."""

    first: int
    last: int
    names: frozenset[str]


def names_in(node: ast.AST) -> Iterable[str]:
    """Return the names that a node itself reads, the identifiers in a text among them."""
    if isinstance(node, ast.AugAssign):
        node = node.target
    elif isinstance(getattr(node, "ctx", None), ast.Store):
        return ()
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute):
        return (node.attr,)
    if isinstance(node, ast.keyword) and node.arg:
        return (node.arg,)
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) <= LONGEST_NAME_IN_TEXT:
        return IDENTIFIER.findall(node.value)
    return ()


def fills_in(function: Function) -> Iterator[Fill]:
    """Find the lines under a condition that store something beyond the function's own variables."""
    kept = {name for node in ast.walk(function) if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
    made = {
        target.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.value, NEW)
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    def stores(node: ast.AST) -> bool:
        return any(is_kept(each, kept, made - kept) for each in ast.walk(node))

    def search(statements: list[ast.stmt], conditional: bool) -> Iterator[Fill]:
        for number, statement in enumerate(statements):
            rest = statements[number:]
            if conditional and any(stores(each) for each in rest):
                yield fill(rest)
                return
            if isinstance(statement, Function | ast.ClassDef):
                continue
            bodies = [
                body
                for holder in (statement, *getattr(statement, "handlers", ()), *getattr(statement, "cases", ()))
                for body in (getattr(holder, "body", []), getattr(holder, "orelse", []))
                if body
            ]
            branches = isinstance(statement, ast.If | ast.While | ast.Try | ast.Match)
            if not bodies and stores(statement) and is_choice(statement):
                yield fill([statement])
            for body in bodies:
                yield from search(body, branches)
            if isinstance(statement, ast.If | ast.Try | ast.Match) and leaves(statement):
                conditional = True

    yield from search(function.body, False)


def fill(statements: list[ast.stmt]) -> Fill:
    names = {name for statement in statements for node in ast.walk(statement) for name in names_in(node)}
    return Fill(statements[0].lineno, statements[-1].end_lineno or statements[-1].lineno, frozenset(names))


def is_kept(node: ast.AST, kept: set[str], made: set[str]) -> bool:
    """Tell if a node stores in a global, an attribute or an item of something that outlives the call."""
    if isinstance(node, ast.Call):
        called = getattr(node.func, "attr", None) or getattr(node.func, "id", "")
        return called in ("setattr", "setdefault", "set")
    if isinstance(node, ast.Name):
        return isinstance(node.ctx, ast.Store) and node.id in kept
    if not isinstance(node, ast.Attribute | ast.Subscript) or not isinstance(node.ctx, ast.Store):
        return False
    base: ast.expr = node
    while isinstance(base, ast.Attribute | ast.Subscript | ast.Call):
        base = base.func if isinstance(base, ast.Call) else base.value
    return not (isinstance(base, ast.Name) and base.id in made and isinstance(node, ast.Subscript))


def is_choice(statement: ast.stmt) -> bool:
    return any(isinstance(node, ast.BoolOp | ast.IfExp) for node in ast.walk(statement)) or any(
        getattr(node, "attr", "") == "setdefault" for node in ast.walk(statement)
    )


def leaves(statement: ast.stmt) -> bool:
    return any(isinstance(node, ast.Return | ast.Raise | ast.Continue) for node in ast.walk(statement))
