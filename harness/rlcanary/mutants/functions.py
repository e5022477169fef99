"""Mutants of installed functions: found in modules, compiled, and planted while an adapter's capability runs."""

from __future__ import annotations
import __future__

import ast
import importlib
import inspect
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from rlcanary.contract.adapter import Adapter
from rlcanary.errors import UserError
from rlcanary.mutants.mutant import Place, Run, wrapped
from rlcanary.mutants.operators import Function, mutations
from rlcanary.mutants.reach import is_within, places_of

KEPT_AROUND = 60
"""Characters of a long line that a diff keeps on either side of the mistake."""


@dataclass(frozen=True)
class FunctionMutant:
    """A function with one mistake.

    Attributes:
        function: the installed function.
        code: the mutated function, compiled.
        places: those of the function's instructions one of which has to run for the mistake to change anything.
        diff: the mistake as lines that start with - and +.
        number: counts the mutants of this function with the same diff, from 1.
    """

    function: FunctionType
    code: CodeType
    places: frozenset[Place]
    diff: str
    number: int

    @property
    def where(self) -> str:
        """The function, as `module:name`."""
        return f"{self.function.__module__}:{self.function.__qualname__}"

    @property
    def id(self) -> str:
        """The function, the mistake and its number: stable while the mutated line stays as it is."""
        return f"{self.where}\n{self.diff}" + (f"\n({self.number})" if self.number > 1 else "")

    def planted_in(self, adapter: Adapter) -> Adapter:
        """Return the adapter with the mutant in place while one of its capabilities runs, and only then.

        The checks compute what they expect with the functions as they are, so that a mutant of the oracle meets the oracle.
        """
        return wrapped(adapter, lambda _: self.planted())

    def reached_by(self, run: Run) -> frozenset[str]:
        """Return the capabilities through which a check runs what the mistake changes."""
        return frozenset(name for name, ran in run.ran.items() if not self.places.isdisjoint(ran))

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Put the mutant in place of its function for the block, wherever the function was imported to."""
        before = self.function.__code__
        self.function.__code__ = self.code
        try:
            yield
        finally:
            self.function.__code__ = before


def functions_reached(runs: Iterable[Run], packages: Iterable[str]) -> Iterator[FunctionType]:
    """Yield the functions of imported modules of these packages of which a check runs something, by module and source."""
    ran = {place for run in runs for found in run.ran.values() for place in found}
    for name, module in sorted(sys.modules.items()):
        if is_within(name, packages):
            yield from (function for function in functions_of(module) if not ran.isdisjoint(_places(function)))


def functions_of(module: ModuleType) -> Iterator[FunctionType]:
    """Yield the functions and methods that a module defines, decorated ones without their decorators."""
    for value in list(vars(module).values()):
        owners = list(vars(value).values()) if isinstance(value, type) else [value]
        for owner in owners:
            found = owner.fget if isinstance(owner, property) else getattr(owner, "__func__", owner)
            found = inspect.unwrap(found) if callable(found) else found
            if (
                isinstance(found, FunctionType)
                and found.__module__ == module.__name__
                and Path(found.__code__.co_filename).exists()
            ):
                yield found


def function_at(place: str) -> FunctionType:
    """Return a function or method, without its decorators, that is given as `module:name`.

    Raises:
        UserError: there is none.
    """
    module, _, name = place.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = inspect.getattr_static(found, part)
    except (ModuleNotFoundError, AttributeError) as error:
        raise UserError(f"there is no {place}: {error}") from error
    found = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
    found = inspect.unwrap(found)
    if not isinstance(found, FunctionType):
        raise UserError(f"{place} is no function")
    return found


def with_text(function: FunctionType, changes: Iterable[tuple[str, str]]) -> CodeType:
    """Compile a function whose source has another text in the place of each that it has once.

    Raises:
        UserError: its source has the text never or several times, or the function names another variable of the
            functions around it then.
    """
    source = inspect.getsource(function)
    where = f"{function.__module__}:{function.__qualname__}"
    for before, after in changes:
        if (count := source.count(before)) != 1:
            raise UserError(f"the source of {where} has {before!r} {count} times instead of once")
        source = source.replace(before, after)
    tree = _parsed(textwrap.dedent(source), function)
    if tree is None:
        raise UserError(f"the source of {where} is no function")
    code = _compiled(tree, function)
    if code.co_freevars != function.__code__.co_freevars:
        raise UserError(f"with the change {where} names {code.co_freevars}, not {function.__code__.co_freevars}")
    return code


def mutants_of(function: FunctionType) -> Iterator[FunctionMutant]:
    """Yield the mutants of a function that Python compiles, in the order of its source."""
    tree = _tree(function)
    if tree is None:
        return
    original, seen = function.__code__, Counter[str]()
    all_places, margin = _places(function), _margin(function)
    for mutation in mutations(tree):
        try:
            code = _compiled(tree, function)
        except SyntaxError:
            continue
        if _content(code) != _content(original) and code.co_freevars == original.co_freevars:
            diff = _diff(mutation.before, mutation.after)
            seen[diff] += 1
            places = frozenset().union(*(_at(node, margin, all_places) for node in mutation.felt))
            yield FunctionMutant(function, code, places, diff, seen[diff])


def _content(code: CodeType) -> tuple[object, ...]:
    """Return the instructions of a function and what they name."""
    return code.co_code, code.co_consts, code.co_names, code.co_varnames


def _places(function: FunctionType) -> set[Place]:
    """Return the places of a function's instructions, without those that only start it."""
    return {
        place
        for code in (function.__code__, *_codes(function.__code__))
        for place in places_of(code)
        if place is not None and place[1] > function.__code__.co_firstlineno
    }


def _at(node: ast.AST, margin: int, places: Iterable[Place]) -> frozenset[Place]:
    """Return the places of the instructions of a piece of source, those of the smallest piece around it where it has none.

    Args:
        node: the piece, whose columns are counted behind the margin.
        margin: by how much the function's source is indented.
        places: those of the function's instructions.
    """
    start, end = (node.lineno, node.col_offset + margin), (node.end_lineno, node.end_col_offset + margin)  # type: ignore[attr-defined]
    inside = frozenset(place for place in places if start <= place[1:3] and place[3:] <= end)
    if inside:
        return inside
    around = [place for place in places if place[1:3] <= start and end <= place[3:]]
    # Pieces that hold another one hold each other, so that the smallest starts last, and ends first.
    return frozenset(sorted(around, key=lambda place: (place[1:3], -place[3], -place[4]))[-1:])


def _margin(function: FunctionType) -> int:
    source = inspect.getsource(function)
    return len(source) - len(source.lstrip())


def _tree(function: FunctionType) -> Function | None:
    """Parse a function; None for a lambda or a generated one."""
    try:
        return _parsed(textwrap.dedent(inspect.getsource(function)), function)
    except (OSError, SyntaxError):
        return None


def _parsed(source: str, function: FunctionType) -> Function | None:
    tree = ast.parse(source).body[0]
    # With the lines of the file, `inspect` finds the source of the compiled function too.
    ast.increment_lineno(tree, function.__code__.co_firstlineno - 1)
    if not isinstance(tree, Function) or tree.name != function.__name__:
        return None
    tree.decorator_list = []
    return tree


def _compiled(tree: Function, function: FunctionType) -> CodeType:
    owner = function.__qualname__.split(".")[-2:-1]
    body: ast.stmt = tree
    if owner and owner[0].isidentifier():
        # A class body makes the cell of `super()`, and private names take the class's.
        body = ast.ClassDef(name=owner[0], bases=[], keywords=[], body=[tree], decorator_list=[])
    module = ast.Module(body=[ast.fix_missing_locations(body)], type_ignores=[])
    flags = function.__code__.co_flags & __future__.annotations.compiler_flag
    outer = compile(module, function.__code__.co_filename, "exec", flags=flags, dont_inherit=True)
    return next(code for code in _codes(outer) if code.co_name == tree.name)


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def _diff(before: str, after: str) -> str:
    start = max(_common(before, after) - KEPT_AROUND, 0)
    end = max(_common(before[::-1], after[::-1]) - KEPT_AROUND, 0)
    return f"- {_cut(before, start, end)}\n+ {_cut(after, start, end)}"


def _common(one: str, other: str) -> int:
    """Count the characters that two texts start with in common."""
    return sum(1 for _ in takewhile(bool, map(str.__eq__, one, other)))


def _cut(line: str, start: int, end: int) -> str:
    """Leave out so many characters at the start and the end, where that shortens the line by more than a sign."""
    start, end = (start if start > 3 else 0), (end if end > 3 else 0)
    return ("…" if start else "") + line[start : len(line) - end] + ("…" if end else "")
