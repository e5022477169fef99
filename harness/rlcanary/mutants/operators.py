"""Mutation operators: the small mistakes that can be made in a function, as changed syntax trees."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Pow: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.FloorDiv: ast.Mod,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
# Functions, dtypes and arguments taken for each other, in both directions.
NEIGHBOURS = {
    one: other
    for pair in (
        ("min", "max"),
        ("minimum", "maximum"),
        ("amin", "amax"),
        ("clamp_min", "clamp_max"),
        ("sum", "mean"),
        ("any", "all"),
        ("argmin", "argmax"),
        ("floor", "ceil"),
        ("softmax", "log_softmax"),
        ("repeat", "repeat_interleave"),
        ("exp", "expm1"),
        ("log", "log1p"),
    )
    for one, other in (pair, pair[::-1])
}
LOWER_PRECISION = {"float64": "float32", "double": "float", "float32": "bfloat16", "float": "bfloat16"}
REDUCTIONS = {"sum", "mean", "logsumexp", "log_softmax", "softmax", "var", "std"}
# Methods that may be left out.
PASSING = {
    "abs",
    "clamp",
    "clamp_min",
    "clamp_max",
    "clone",
    "detach",
    "double",
    "exp",
    "flip",
    "float",
    "sqrt",
    "square",
    "masked_fill",
    "nan_to_num",
}
# Values of one type, by the stem of their names: swapped ones train.
FAMILIES = (
    ("logprobs", "old_logprobs", "sampler_logprobs", "ref_logprobs", "trainer_logprobs"),
    ("log_prob", "log_probs", "old_log_prob", "old_log_probs", "rollout_log_probs", "ref_log_prob", "ref_log_probs"),
    ("per_token_logps", "old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps"),
    ("mask", "completion_mask", "attention_mask", "loss_mask", "response_mask"),
    ("clip_low", "clip_high"),
    ("importance_low", "importance_high"),
    ("epsilon_low", "epsilon_high"),
    ("low", "high"),
)
SHAPE = re.compile(r"_[A-Z][A-Z0-9]*$")
# Names of values that may carry a gradient.
DIFFERENTIABLE = re.compile(r"log_?p|logit|ratio|loss|kl|entrop|estimate|values?(_[A-Z]|$)|scores|hidden|penalty")
# Arguments without an effect on the CPU, or on values.
IDLE_KEYWORDS = {"device", "strict", "non_blocking", "pin_memory", "memory_format", "stacklevel"}
# Functions and objects that only tell somebody something. In longer names, "log" is the logarithm.
TELLING = re.compile(r"(log|print)$|(.*_)?(logger|logging|warn|warnings)(_|$)")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Mutation:
    """One mistake in a function.

    Attributes:
        felt: the expressions or statements of the source one of which has to run for the mistake to change anything: the
            mistaken one, or the branch that it leaves out.
        before: the statement as it was, without the statements inside it.
        after: the statement with the mistake.
    """

    felt: list[ast.AST]
    before: str
    after: str


def mutations(function: Function) -> Iterator[Mutation]:
    """Yield every first-order mutation of a function, in the order of its source.

    The tree itself carries a mutation until the next one is taken. Text and log lines stay, and so do guards, that is `if`
    statements that only raise or tell: code that accepts what it should refuse is no silent mistake in the numbers of a run.
    """
    names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    names |= {argument.arg for argument in ast.walk(function) if isinstance(argument, ast.arg)}
    yield from _of_block(function, names)


def _of_block(owner: ast.AST, names: set[str]) -> Iterator[Mutation]:
    for _, value in ast.iter_fields(owner):
        for index, item in enumerate(value) if isinstance(value, list) else ():
            if isinstance(item, ast.stmt) and not _is_left_alone(item):
                before, seen = _shown(item), {_shown(item)}
                spots: list[tuple[Any, Any, ast.AST, ast.AST]]
                spots = [(value, index, item, new) for new in _statements(item)]
                spots += [(*spot, new) for spot in _expressions(item) for new in _replacements(spot[2])]
                for holder, key, old, new in spots:
                    if isinstance(new, ast.Name) and new.id not in names:
                        continue
                    # A copy, since a part of the old one keeps its own place.
                    _put(holder, key, ast.fix_missing_locations(ast.copy_location(copy.copy(new), old)))
                    after = _shown(value[index])
                    if after not in seen:
                        seen.add(after)
                        yield Mutation(_felt(old, new), before, after)
                    _put(holder, key, old)
                yield from _of_block(item, names)
            elif isinstance(item, ast.ExceptHandler | ast.match_case):
                yield from _of_block(item, names)


def _expressions(node: ast.AST) -> Iterator[tuple[Any, Any, ast.AST]]:
    """Yield the expressions of a statement, outer ones first, with where they are held; not those of inner statements."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "decorator_list", "returns") or (name == "args" and isinstance(node, Function)):
            continue
        for holder, key, item in (
            [(value, index, item) for index, item in enumerate(value)]
            if isinstance(value, list)
            else [(node, name, value)]
        ):
            is_inner = isinstance(
                item, ast.stmt | ast.ExceptHandler | ast.match_case | ast.expr_context | ast.JoinedStr
            )
            is_idle = isinstance(item, ast.keyword) and item.arg in IDLE_KEYWORDS
            if isinstance(item, ast.AST) and not is_inner and not is_idle:
                yield holder, key, item
                yield from _expressions(item)


def _put(holder: Any, key: Any, new: ast.AST) -> None:
    if isinstance(holder, list):
        holder[key] = new
    else:
        setattr(holder, key, new)


def _shown(statement: ast.stmt) -> str:
    """Write a statement without those inside it."""
    inside: dict[str, object] = {
        name: [] for name in ("body", "orelse", "finalbody", "handlers", "cases") if hasattr(statement, name)
    }
    return ast.unparse(_with(statement, **inside))


def _is_left_alone(node: ast.AST) -> bool:
    match node:
        case ast.Raise() | ast.Assert():
            return True
        case ast.If(body=[*_, ast.Raise()], orelse=[]):
            return True
        case ast.If(body=body, orelse=orelse):
            return all(map(_is_left_alone, (*body, *orelse)))
        case ast.Expr(value=ast.Call(func=called)):
            return any(isinstance(part, ast.Name) and TELLING.match(part.id) for part in ast.walk(called))
    return False


def _felt(old: ast.AST, new: ast.AST) -> list[ast.AST]:
    """Return the parts one of which has to run for the new expression or statement to differ from the old one."""
    match old, new:
        case ast.If(body=body), ast.If(test=ast.Constant(value=False)):
            return [*body]
        case ast.If(orelse=[_, *_] as orelse), ast.If(test=ast.Constant(value=True)):
            return [*orelse]
        case ast.IfExp(body=body, orelse=orelse), _:
            return [orelse if new is body else body]
        case ast.BoolOp(values=values), _:
            kept = new.values if isinstance(new, ast.BoolOp) else [new]
            return [value for value in values if value not in kept] or [old]
    return [old]


def _replacements(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(ops=[op]):
            for other in COMPARISONS[type(op)]:
                yield _with(node, ops=[other()])
        case ast.BinOp(op=op) if type(op) in ARITHMETIC:
            yield _with(node, op=ARITHMETIC[type(op)]())
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int())):
            yield ast.Constant(0)
        case ast.UnaryOp(operand=operand):
            yield operand
        case ast.BoolOp(op=op, values=values):
            yield _with(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
            for index in range(len(values)):
                rest = values[:index] + values[index + 1 :]
                yield rest[0] if len(rest) == 1 else _with(node, values=rest)
        case ast.Constant():
            yield from _constants(node)
        case ast.IfExp(body=body, orelse=orelse):
            yield body
            yield orelse
        case ast.Slice(lower=lower, upper=upper):
            yield from _slices(node, lower, upper)
        case ast.Call():
            yield from _calls(node)
        case ast.Attribute(attr=attr, ctx=ast.Load()):
            yield from (_with(node, attr=other) for other in _family(attr))
            if attr in LOWER_PRECISION and isinstance(node.value, ast.Name):
                yield _with(node, attr=LOWER_PRECISION[attr])
        case ast.Name(id=name, ctx=ast.Load()):
            yield from (_with(node, id=other) for other in _family(name))


def _statements(node: ast.stmt) -> Iterator[ast.AST]:
    match node:
        case ast.If():
            yield _with(node, test=ast.Constant(value=False))
            yield _with(node, test=ast.Constant(value=True))
        case ast.With(items=[ast.withitem(optional_vars=None)], body=body):
            yield ast.If(test=ast.Constant(value=True), body=body, orelse=[])
        case ast.With(items=items):
            for index, item in enumerate(items):
                if item.optional_vars is None:
                    yield _with(node, items=items[:index] + items[index + 1 :])
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Continue() | ast.Break():
            yield ast.Pass()
        case ast.Assign(targets=[ast.Subscript() | ast.Attribute()]):
            yield ast.Pass()
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            if any(isinstance(part, ast.Name) and part.id == name for part in ast.walk(value)):
                yield ast.Pass()
            if DIFFERENTIABLE.search(name) and isinstance(value, ast.Call | ast.BinOp | ast.UnaryOp):
                yield _with(node, value=ast.Call(ast.Attribute(value, "detach", ast.Load()), [], []))


def _constants(node: ast.Constant) -> Iterator[ast.AST]:
    match node.value:
        case bool(value):
            yield ast.Constant(not value)
        case int(value):
            yield ast.Constant(value + 1)
            if value > 0:
                yield ast.Constant(value - 1)
        case float(value):
            yield ast.Constant(2 * value if value else 1.0)
            if value:
                yield ast.Constant(0.0)


def _slices(node: ast.Slice, lower: ast.expr | None, upper: ast.expr | None) -> Iterator[ast.AST]:
    if upper is not None:
        yield ast.Slice(lower=lower, upper=None, step=node.step)
    if lower is not None:
        yield ast.Slice(lower=None, upper=upper, step=node.step)
    if (lower is None) != (upper is None):
        yield ast.Slice(lower=upper, upper=lower, step=node.step)


def _calls(node: ast.Call) -> Iterator[ast.AST]:
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name in NEIGHBOURS:
        yield _with(node, func=_renamed(function, NEIGHBOURS[name]))
    if isinstance(function, ast.Attribute) and not _is_module(function.value):
        if name in PASSING:
            yield function.value
        if name in LOWER_PRECISION and not node.args:
            yield _with(node, func=_renamed(function, LOWER_PRECISION[name]))
        if name in REDUCTIONS and DIFFERENTIABLE.search(ast.unparse(function.value)):
            rounded = ast.Call(ast.Attribute(function.value, "bfloat16", ast.Load()), [], [])
            yield _with(node, func=_with(function, value=rounded))
    if name == "where" and len(node.args) == 3:
        yield node.args[1]
        yield node.args[2]
    for index, keyword in enumerate(node.keywords):
        if keyword.arg is not None and keyword.arg not in IDLE_KEYWORDS:
            yield _with(node, keywords=node.keywords[:index] + node.keywords[index + 1 :])
    if len(node.args) > 1 and not any(isinstance(argument, ast.Starred) for argument in node.args):
        for index, pair in enumerate(pairwise(node.args)):
            if all(isinstance(argument, ast.Name | ast.Attribute) for argument in pair):
                yield _with(node, args=[*node.args[:index], *pair[::-1], *node.args[index + 2 :]])
        yield _with(node, args=node.args[:-1])


def _is_module(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("torch", "np", "numpy", "math", "F")


def _renamed(function: ast.expr, name: str) -> ast.AST:
    return _with(function, **{"attr" if isinstance(function, ast.Attribute) else "id": name})


def _family(name: str) -> Iterator[str]:
    stem = SHAPE.sub("", name)
    for family in FAMILIES:
        if stem in family:
            yield from (other + name[len(stem) :] for other in family if other != stem)


def _with(node: ast.AST, **changes: object) -> ast.AST:
    new = copy.copy(node)
    for name, value in changes.items():
        setattr(new, name, value)
    return new
