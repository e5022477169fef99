"""Tell which expressions of a module are constants: literals, and what a few functions without effects make of literals.

Whether such a function fails is found by calling it, so that an edit after which a module cannot be imported is never one of
a constant. What may be changed later, such as a list, is no part of another constant.
"""

from __future__ import annotations

import ast
import operator
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

FUNCTIONS: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (bool, bytes, dict, float, frozenset, int, list, set, str, tuple)
}
TEXT_METHODS = frozenset({"encode", "join", "lower", "replace", "split", "splitlines", "strip", "title", "upper"})
FLAGS = frozenset({*"AIMSXU", "ASCII", "IGNORECASE", "MULTILINE", "DOTALL", "VERBOSE", "UNICODE"})
OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.BitOr: operator.or_,
    ast.BitAnd: operator.and_,
}
GREATEST, LONGEST = 2.0**64, 100_000  # of what is computed with
LASTING = (str, bytes, int, float, bool, tuple, frozenset, type(None))


class NotConstant(Exception):
    """An expression may fail, have an effect or read what changes."""


@dataclass
class Names:
    """What the names in an expression stand for.

    Attributes:
        values: the constants bound so far that cannot be changed, with their values.
        bound: the names that the scope and those around it bind, with how often.
        has_re: `re` is Python's module.
    """

    values: dict[str, Any] = field(default_factory=dict)
    bound: Counter[str] = field(default_factory=Counter)
    has_re: bool = False

    def inside(self, bound: Counter[str]) -> Names:
        """Return the names that a class sees which binds these itself."""
        values = {name: value for name, value in self.values.items() if name not in bound}
        return Names(values, self.bound + bound, self.has_re and "re" not in bound)

    def value(self, node: ast.expr) -> Any:
        """Evaluate an expression. Raises NotConstant."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # a run may be told to fail for them
                return self.found(node)
        except (ArithmeticError, ValueError, TypeError, LookupError, re.error, MemoryError, RecursionError) as error:
            raise NotConstant from error
        except Warning as warning:
            raise NotConstant from warning

    def found(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name() if node.id in self.values:
                return self.values[node.id]
            case ast.List() | ast.Tuple() | ast.Set():
                items = [self.found(each) for each in node.elts]
                return {ast.List: list, ast.Tuple: tuple, ast.Set: set}[type(node)](items)
            case ast.Dict():
                keys = [self.found(each) if each is not None else NotConstant for each in node.keys]
                if NotConstant in keys:
                    raise NotConstant
                return dict(zip(keys, map(self.found, node.values), strict=True))
            case ast.UnaryOp(op=ast.USub() | ast.UAdd()):
                return -self.number(node.operand) if isinstance(node.op, ast.USub) else self.number(node.operand)
            case ast.BinOp() if type(node.op) in OPERATORS:
                return self.computed(node)
            case ast.Call():
                return self.called(node)
        raise NotConstant

    def number(self, node: ast.expr) -> Any:
        value = self.found(node)
        if not isinstance(value, int | float | complex):
            raise NotConstant
        return value

    def computed(self, node: ast.BinOp) -> Any:
        left, right = self.found(node.left), self.found(node.right)
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if numbers and max(abs(left), abs(right)) <= GREATEST:
            if isinstance(node.op, ast.Pow | ast.LShift) and not 0 <= right <= 64:
                raise NotConstant
            return OPERATORS[type(node.op)](left, right)
        joined = (
            type(left) is type(right) and isinstance(left, str | bytes | tuple | list) and isinstance(node.op, ast.Add)
        )
        if joined and len(left) + len(right) <= LONGEST:
            return left + right
        if isinstance(node.op, ast.BitOr) and isinstance(left, re.RegexFlag) and isinstance(right, re.RegexFlag):
            return left | right
        raise NotConstant

    def called(self, node: ast.Call) -> Any:
        function = self.function(node.func)
        if any(isinstance(each, ast.Starred) for each in node.args):
            raise NotConstant
        options: dict[str, Any] = {}
        for each in node.keywords:
            if each.arg is None:
                raise NotConstant
            options[each.arg] = self.argument(each.value)
        return function(*map(self.argument, node.args), **options)

    def argument(self, node: ast.expr) -> Any:
        return self.flags(node) if self.has_re and is_flags(node) else self.found(node)

    def flags(self, node: ast.expr) -> Any:
        if isinstance(node, ast.BinOp):
            return self.flags(node.left) | self.flags(node.right)
        return getattr(re, node.attr) if isinstance(node, ast.Attribute) else None

    def function(self, node: ast.expr) -> Callable[..., Any]:
        if isinstance(node, ast.Name) and node.id in FUNCTIONS and not self.bound[node.id] and not self.bound["*"]:
            return FUNCTIONS[node.id]
        if isinstance(node, ast.Attribute):
            if node.attr == "compile" and isinstance(node.value, ast.Name) and node.value.id == "re" and self.has_re:
                return re.compile
            if node.attr in TEXT_METHODS and isinstance(owner := self.found(node.value), str):
                method: Callable[..., Any] = getattr(owner, node.attr)
                return method
        raise NotConstant


def is_flags(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return is_flags(node.left) and is_flags(node.right)
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "re"
        and node.attr in FLAGS
    )


def names_of(tree: ast.Module, bound: Counter[str]) -> Names:
    """Return what the names in a module stand for before its first statement."""
    imported = any(
        isinstance(each, ast.Import) and any(alias.name == "re" and not alias.asname for alias in each.names)
        for each in tree.body
    )
    return Names({}, bound, imported and bound["re"] == 1)


def constant(statement: ast.stmt, known: Names) -> tuple[list[str], ast.expr | None]:
    """Return the names that a statement binds to a constant, and the constant; None if it does something else."""
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    value = getattr(statement, "value", None)
    names = [target.id for target in targets if isinstance(target, ast.Name)]
    if not targets or len(names) != len(targets) or value is None:
        return [], None
    try:
        found = known.value(value)
    except NotConstant:
        return [], None
    lasts = is_lasting(found)
    known.values.update({name: found for name in names if lasts and known.bound[name] == 1})
    return names, value


def is_lasting(value: object) -> bool:
    """Tell if nothing can change a value."""
    parts: Mapping[type, Any] = {tuple: value, frozenset: value}
    return isinstance(value, LASTING) and all(map(is_lasting, parts.get(type(value), ())))


def is_literal(node: ast.expr) -> bool:
    """Tell if evaluating this cannot fail, has no effect and reads nothing."""
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True
