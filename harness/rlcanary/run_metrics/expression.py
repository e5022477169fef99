"""Evaluate checks on a run's metrics, such as `max(data["train/loss"]) < 2` or `0.4 <= data["reward"]["100"] < 1`.

The grammar is Python's, and this is all of it: comparisons (`<`, `<=`, `>`, `>=`, `==`, `!=`, also chained) and steps in
metrics (`"10" in data[...]`, `not in`) joined by `and`, `or`, `not`; in them numbers, strings, `+`, `-`, `*`, `/`,
`data[...]` with any keys, `abs`, `len`, and the functions of `windows`. Nothing is executed. Every value in a check is
looked up, those behind an `or` too: a missing one fails the check.
"""

import ast
import difflib
import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlcanary.errors import UserError
from rlcanary.run_metrics.windows import FUNCTIONS, CheckError, described, is_finite

MOST_CHARACTERS = 5000
MOST_STEPS_SHOWN = 10
COMPARISONS: dict[type[ast.cmpop], tuple[str, Callable[[Any, Any], bool]]] = {
    ast.Lt: ("<", operator.lt),
    ast.LtE: ("<=", operator.le),
    ast.Gt: (">", operator.gt),
    ast.GtE: (">=", operator.ge),
    ast.Eq: ("==", operator.eq),
    ast.NotEq: ("!=", operator.ne),
}
ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
BUILTINS: dict[str, Callable[[Any], Any]] = {"abs": abs, "len": len}
SIGNS: dict[type[ast.unaryop], Callable[[Any], float]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


@dataclass(frozen=True)
class Verdict:
    """The result of a check.

    Attributes:
        values: the compared sides that are not constants, as far as they could be found.
        message: the reason why it failed.
    """

    check: str
    passed: bool
    values: list[Any]
    message: str


class Check:
    """A check that has been parsed and is within the grammar."""

    def __init__(self, text: str) -> None:
        """Parses a check without looking anything up. Raises UserError for text outside the grammar."""
        self.text = text
        try:
            if len(text) > MOST_CHARACTERS:
                raise _NotAllowed(f"it is longer than {MOST_CHARACTERS} characters")
            self._root = ast.parse(text.strip(), mode="eval").body
            _require_condition(self._root)
            if not _looks_at_data(self._root):
                raise _NotAllowed("it does not look at `data`")
        except _NotAllowed as error:
            raise UserError(f"not a check: {text:.200}: {error}") from None
        except SyntaxError as error:
            raise UserError(f"not a check: {text:.200}: {error.msg}") from None
        except (ValueError, RecursionError, MemoryError) as error:
            raise UserError(f"not a check: {text:.200}: it cannot be read ({type(error).__name__})") from None

    def on(self, data: object) -> Verdict:
        """Evaluates the check on a run's metrics."""
        evaluation = _Evaluation(data)
        try:
            reasons = evaluation.condition(self._root)
        except CheckError as error:
            return Verdict(self.text, False, evaluation.values, str(error))
        return Verdict(self.text, not reasons, evaluation.values, "; ".join(reasons))


class _NotAllowed(Exception):
    """A construct that the grammar of checks does not allow."""


def _require_condition(node: ast.expr) -> None:
    match node:
        case ast.BoolOp(values=values):
            for value in values:
                _require_condition(value)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            _require_condition(operand)
        case ast.Compare(left=step, ops=[ast.In() | ast.NotIn()], comparators=[metric]):
            if not isinstance(_key(step), str | int):
                raise _NotAllowed(f'`{ast.unparse(step)}` is no step; `in` asks for one, as in `"10" in data["loss"]`')
            _require_value(metric)
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            for comparison in ops:
                if type(comparison) not in COMPARISONS:
                    signs = ", ".join(sign for sign, _ in COMPARISONS.values())
                    raise _NotAllowed(f"compare with {signs} only, or ask for one step with `in`")
            for side in (left, *comparators):
                _require_value(side)
        case _:
            _require_value(node)
            raise _NotAllowed(f"it is a value and not a condition; compare it, as in `{ast.unparse(node)} < 1`")


def _require_value(node: ast.expr) -> None:
    match node:
        case ast.Constant(value=bool() | int() | float() | str()):
            pass
        case ast.Name(id="data"):
            pass
        case ast.Subscript(value=value, slice=key):
            _require_value(value)
            if not (isinstance(_key(key), str | int)):
                raise _NotAllowed("a key is a string or a whole number")
        case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
            _require_value(left)
            _require_value(right)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in SIGNS:
            _require_value(operand)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            _require_call(name, args, keywords)
        case ast.Name(id=name):
            raise _NotAllowed(f"there is no name {name}; the run's numbers are `data`")
        case _:
            raise _NotAllowed(f"`{ast.unparse(node)}` is not in the grammar of checks (docs/trends.md)")


def _require_call(name: str, args: list[ast.expr], keywords: list[ast.keyword]) -> None:
    if name not in FUNCTIONS | BUILTINS:
        nearest = difflib.get_close_matches(name, [*FUNCTIONS, *BUILTINS], n=1)
        raise _NotAllowed(
            f"there is no function {name}; did you mean {nearest[0] if nearest else ', '.join(FUNCTIONS)}?"
        )
    for argument in (*args, *(keyword.value for keyword in keywords)):
        _require_value(argument)
    try:
        named = {keyword.arg: keyword.value for keyword in keywords if keyword.arg is not None}
        if len(named) < len(keywords):
            raise TypeError("** is not in the grammar")
        inspect.signature((FUNCTIONS | BUILTINS)[name]).bind(*args, **named)
    except TypeError as error:
        raise _NotAllowed(f"{name}: {error}") from None


def _looks_at_data(node: ast.expr) -> bool:
    return any(isinstance(part, ast.Name) and part.id == "data" for part in ast.walk(node))


def _key(node: ast.expr) -> object:
    match node:
        case ast.Constant(value=bool()):
            return None
        case ast.Constant(value=value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(value))):
            return -value
    return None


class _Evaluation:
    """One evaluation on a run's metrics; `values` collects the compared ones."""

    def __init__(self, data: object) -> None:
        self._data = data
        self.values: list[Any] = []

    def condition(self, node: ast.expr) -> list[str]:
        """Explains why the condition does not hold; None if it does."""
        match node:
            case ast.BoolOp(op=op, values=values):
                parts = [self.condition(value) for value in values]
                if isinstance(op, ast.Or) and not all(parts):
                    return []
                return [reason for part in parts for reason in part]
            case ast.UnaryOp(operand=operand):
                return [] if self.condition(operand) else [f"{ast.unparse(operand)} holds"]
            case ast.Compare(left=step, ops=[ast.In() | ast.NotIn() as op], comparators=[metric]):
                known = self.steps(metric)
                self.values.append(str(_key(step)) in known)
                if self.values[-1] == isinstance(op, ast.In):
                    return []
                return [f"{ast.unparse(metric)} has {described_steps(known)}"]
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                sides = [self.side(side) for side in (left, *comparators)]
                reasons = []
                for first, comparison, second in zip(sides, ops, sides[1:], strict=False):
                    sign, holds = COMPARISONS[type(comparison)]
                    if not holds(*comparable(first, sign, second)):
                        reasons.append(f"{shown(first)} {sign} {shown(second)} is false")
                return reasons
        raise AssertionError(ast.dump(node))

    def side(self, node: ast.expr) -> Any:
        value = self.value(node)
        if not _looks_at_data(node):
            return value
        if isinstance(value, dict | list):
            raise CheckError(f"{ast.unparse(node)} is {described(value)}; take one step of it, or min, max, mean …")
        self.values.append(value)
        return value if isinstance(value, bool | str) else finite(value, node)

    def value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name():
                return self._data
            case ast.Subscript(value=inner, slice=key):
                return item(self.value(inner), _key(key))
            case ast.BinOp(left=left, op=op, right=right):
                try:
                    return ARITHMETIC[type(op)](self.number(left), self.number(right))
                except ArithmeticError as error:
                    raise CheckError(f"{ast.unparse(node)}: {error}") from None
            case ast.UnaryOp(op=op, operand=operand):
                return SIGNS[type(op)](self.number(operand))
            case ast.Call(func=ast.Name(id="abs"), args=[argument]):
                return abs(self.number(argument))
            case ast.Call(func=ast.Name(id="len"), args=[argument]):
                value = self.value(argument)
                return len(value if isinstance(value, list) else self.steps(argument))
            case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
                values = [self.value(argument) for argument in args]
                named = {str(keyword.arg): self.value(keyword.value) for keyword in keywords}
                try:
                    return FUNCTIONS[name](*values, **named)
                except OverflowError as error:
                    raise CheckError(f"{ast.unparse(node)}: {error}") from None
        raise AssertionError(ast.dump(node))

    def steps(self, node: ast.expr) -> list[str]:
        """Returns the steps of a metric."""
        value = self.value(node)
        if not isinstance(value, dict):
            raise CheckError(f"{ast.unparse(node)} is {described(value)}, not a metric with steps")
        return list(value)

    def number(self, node: ast.expr) -> float:
        return finite(self.value(node), node)


def finite(value: Any, node: ast.expr) -> float:
    if isinstance(value, bool | str | dict | list):
        raise CheckError(f"{ast.unparse(node)} is {described(value)}, not a number")
    if not is_finite(value):
        raise CheckError(f"{ast.unparse(node)} is not finite ({shown(value)})")
    number: float = value
    return number


def comparable(first: Any, sign: str, second: Any) -> tuple[Any, Any]:
    for value in (first, second):
        if isinstance(value, bool | str) and (sign not in ("==", "!=") or type(first) is not type(second)):
            raise CheckError(f"{shown(first)} {sign} {shown(second)} compares {described(value)} with another type")
    return first, second


def item(container: Any, key: object) -> Any:
    """Looks up `container[key]`; a whole number also finds the step of that number."""
    if isinstance(container, list):
        if isinstance(key, int) and -len(container) <= key < len(container):
            return container[key]
        raise CheckError(f"there is no {key!r} in a list of {len(container)}")
    if not isinstance(container, dict):
        raise CheckError(f"there is no {key!r} in {described(container)}")
    name = str(key)
    if name not in container:
        nearest = difflib.get_close_matches(name, list(container), n=3, cutoff=0.5)
        raise CheckError(
            f"there is no {name!r}" + (f"; the nearest are {', '.join(map(repr, nearest))}" if nearest else "")
        )
    return container[name]


def described_steps(steps: list[str]) -> str:
    if len(steps) <= MOST_STEPS_SHOWN:
        return f"the steps {', '.join(steps)}" if steps else "no steps"
    return f"{len(steps)} steps, from {steps[0]} to {steps[-1]}"


def shown(value: Any) -> str:
    if value is None:
        return "null"
    return f"{value:.7g}" if isinstance(value, float) else str(value)
