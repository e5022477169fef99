"""Find where a function fills what later calls read: caches, singletons, attributes that are made when first asked for."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

Function = ast.FunctionDef | ast.AsyncFunctionDef
NEW = ast.Dict | ast.List | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
# Functions whose result nobody else has yet. Of other calls (`get_cache()`) that cannot be read.
CONSTRUCTORS = frozenset({"dict", "list", "set", "bytearray", "deque", "defaultdict", "sorted", "copy", "deepcopy"})
IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
LONGEST_NAME_IN_TEXT = 200
IMPORTING = re.compile(r"^[ \t]*(?:import|from)[ \t]+\w", re.MULTILINE)
IMPORTING_ALL = re.compile(r"import[ \t]*\*")
# Methods that change what they belong to.
CHANGING = frozenset({"add", "append", "update", "insert", "extend", "setdefault", "set", "put", "register", "push"})
ASKING = frozenset({"getattr", "hasattr", "setattr", "delattr", "object"})  # unittest.mock's patch.object
LOOKING_UP = frozenset({"getattr", "methodcaller", "attrgetter"})
SCOPES = Function | ast.ClassDef | ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
ANY, ABSENT = "*", "?"  # a condition that may read any name; one that asks whether something is empty


@dataclass
class Fill:
    """Lines of a function that run once for many callers, because they keep what they find.

    Attributes:
        names: all names that they read.
        passed: those of them that stand for more than a call: what is called later, by other code.
    """

    first: int
    last: int
    names: frozenset[str]
    passed: frozenset[str]


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
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return names_in_text(node.value)
    return ()


def annotations_of(function: Function) -> list[ast.expr]:
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    found = [each.annotation for each in every if each is not None and each.annotation is not None]
    return [*found, *([function.returns] if function.returns is not None else [])]


def handed_in(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names in these expressions that are not only asked for an attribute, the last one of `a.b`."""
    every = [each for node in nodes for each in ast.walk(node)]
    asked = {id(each.value) for each in every if isinstance(each, ast.Attribute)}
    asked |= {id(each.args[0]) for each in every if isinstance(each, ast.Call) and asks_by_name(each)}
    names = {each.id for each in every if isinstance(each, ast.Name) and id(each) not in asked}
    return names | {each.attr for each in every if isinstance(each, ast.Attribute) and id(each) not in asked}


def asks_by_name(call: ast.Call) -> bool:
    """Tell if a call asks its first argument for one attribute by its name, as `getattr(a, "b")` and `patch.object` do."""
    called = getattr(call.func, "attr", getattr(call.func, "id", ""))
    return called in ASKING and len(call.args) > 1


def names_in_text(text: str) -> list[str]:
    """Return the identifiers in a text; in a long one only if it may be code that imports something."""
    if len(text) > LONGEST_NAME_IN_TEXT and not IMPORTING.search(text):
        return []
    found: list[str] = IDENTIFIER.findall(text)
    return [*found, "__all__"] if IMPORTING_ALL.search(text) else found


def fills_in(function: Function) -> Iterator[Fill]:
    """Find the lines that store something beyond the function's own variables, if it is not there yet.

    What they store shows in the condition: `if self.x is None`, `try … except KeyError`, a variable that was looked up.
    """
    kept = {name for node in ast.walk(function) if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
    values: defaultdict[str, list[ast.expr]] = defaultdict(list)
    bound: Counter[str] = Counter()
    local: set[str] = set()
    parts: list[tuple[ast.expr, ast.expr]] = []  # `found, ok = look(key)`, `with locked(key) as found`
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            bound[node.arg] += 1
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound[node.id] += 1
        elif isinstance(node, ast.Assign | ast.NamedExpr | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    values[target.id].append(node.value)
                    if not isinstance(node, ast.AnnAssign):
                        local.add(target.id)
                elif isinstance(target, ast.Tuple | ast.List):
                    parts.append((target, node.value))
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            parts.append((node.optional_vars, node.context_expr))
    made = {name for name, each in values.items() if len(each) == bound[name] and all(map(is_new, each))}
    local |= made
    for target, value in parts:
        for each in ast.walk(target):
            if isinstance(each, ast.Name):
                values[each.id].append(value)

    def fill(statements: list[ast.stmt]) -> Fill:
        names = {name for statement in statements for node in ast.walk(statement) for name in names_in(node)}
        last = statements[-1].end_lineno or statements[-1].lineno
        return Fill(statements[0].lineno, last, frozenset(names), frozenset(Passed(function).by(statements)))

    def stores(node: ast.AST) -> bool:
        return any(is_kept(each, kept, made - kept) for each in ast.walk(node))

    def fills(statements: list[ast.stmt], guard: set[str]) -> bool:
        changed = {name for each in statements for node in ast.walk(each) for name in changed_by(node)} - {
            "self",
            "cls",
        }
        by_call = any(isinstance(each, ast.Expr) and isinstance(each.value, ast.Call) for each in statements)
        return (any(map(stores, statements)) and (ANY in guard or not guard.isdisjoint(changed))) or (
            by_call and ABSENT in guard
        )

    def search(statements: list[ast.stmt], guard: set[str]) -> Iterator[Fill]:
        for number, statement in enumerate(statements):
            rest = statements[number:]
            if guard and fills(rest, guard):
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
            asked = asked_by(statement, values, local)
            if not bodies and stores(statement) and is_choice(statement):
                yield fill([statement])
            for body in bodies:
                yield from search(body, guard | asked)
            if isinstance(statement, ast.If | ast.Try | ast.Match) and leaves(statement):
                guard = guard | asked

    yield from search(function.body, set())


def is_new(value: ast.expr) -> bool:
    """Tell if an expression makes an object that nothing else can hold: a display, or a call of a class."""
    if not isinstance(value, ast.Call):
        return isinstance(value, NEW)
    name = last_name(value.func)
    return name in CONSTRUCTORS or name.lstrip("_")[:1].isupper()


def asked_by(statement: ast.stmt, values: Mapping[str, list[ast.expr]], local: set[str]) -> set[str]:
    """Return the names that the condition of a statement reads, also by way of the function's variables."""
    match statement:
        case ast.While(test=test) if not is_absence(test, local):
            return set()  # goes on where it stands
        case ast.If(test=test) | ast.While(test=test):
            parts: list[ast.AST] = [test]
        case ast.Try(body=body):
            parts = [*body]
        case ast.Match(subject=subject):
            parts = [subject]
        case _:
            return set()
    nodes = [node for part in parts for node in ast.walk(part)]
    # `"x" in y` asks for this key of `y` only.
    by_key = [node for node in nodes if isinstance(node, ast.Compare) and isinstance(node.left, ast.Constant)]
    unread = {id(each) for node in by_key for part in node.comparators for each in ast.walk(part)}
    names = {name for node in nodes if id(node) not in unread for name in names_in(node)}
    for name in list(names & values.keys()):
        names |= {each for value in values[name] for each in looked_up(value)}
    if any(isinstance(node, ast.Call) and not node.args and not node.keywords for node in nodes):
        names.add(ANY)  # such as `is_loaded()`
    if isinstance(statement, ast.If) and is_absence(statement.test, local):
        names.add(ABSENT)
    return names


def looked_up(value: ast.expr) -> set[str]:
    """Return the names of what an expression looks something up in: of a method's owner, of a function's arguments."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        value = value.func.value
    return {name for node in ast.walk(value) for name in names_in(node)}


def is_absence(test: ast.expr, local: set[str]) -> bool:
    """Tell if this asks whether something else than these variables is empty or lacks a key: a call may then fill it."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        asked = test.operand
    elif isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.NotIn):
        asked = test.comparators[0]
    elif (
        isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Is) and ast.unparse(test.comparators[0]) == "None"
    ):
        asked = test.left
    else:
        return False
    if isinstance(asked, ast.Call):  # `hasattr(self, "x")`, `getattr(self, "x", None)`
        return getattr(asked.func, "id", "") in ("hasattr", "getattr")
    return isinstance(asked, ast.Attribute) or (isinstance(asked, ast.Name) and asked.id not in local)


def changed_by(node: ast.AST) -> Iterable[str]:
    """Return the names of what a node stores in or changes."""
    if isinstance(node, ast.Call):
        owner = node.func.value if isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING else None
        if owner is not None or getattr(node.func, "id", "") == "setattr":
            keys = [name for argument in node.args[:2] for name in names_in(argument)]
            return [*keys, last_name(owner)] if owner is not None else keys
    if isinstance(getattr(node, "ctx", None), ast.Store | ast.Del):
        if isinstance(node, ast.Subscript):
            return [last_name(node.value), *names_in(node.slice)]
        return (last_name(node),)
    return ()


def last_name(node: ast.AST) -> str:
    while isinstance(node, ast.Subscript | ast.Call):
        node = node.value if isinstance(node, ast.Subscript) else node.func
    return str(getattr(node, "attr", None) or getattr(node, "id", ""))


class Passed:
    """Finds the names of functions that code may hand on without calling them: `map(load, names)`, `self.get = load`.

    Which functions a line calls is recorded; what others call later does not show there. A function's own variables hold
    what other lines of it name.
    """

    def __init__(self, function: Function) -> None:
        arguments = function.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        self.own = {each.arg for each in every if each is not None}
        self.values: dict[str, list[ast.expr]] = {}
        free: set[str] = set()
        for node in walked(function.body):
            if isinstance(node, ast.Global | ast.Nonlocal):
                free.update(node.names)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.own.add(node.id)
            elif isinstance(node, ast.Assign | ast.NamedExpr | ast.AnnAssign | ast.For | ast.AsyncFor):
                self.add_value(node)
        self.own -= free

    def add_value(self, node: ast.Assign | ast.NamedExpr | ast.AnnAssign | ast.For | ast.AsyncFor) -> None:
        value = node.iter if isinstance(node, ast.For | ast.AsyncFor) else node.value
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            for each in ast.walk(target):
                if isinstance(each, ast.Name) and value is not None:
                    self.values.setdefault(each.id, []).append(value)

    def by(self, nodes: Iterable[ast.AST]) -> set[str]:
        """Return the names that these parts of the function may hand on."""
        found: set[str] = set()
        waiting, seen = list(nodes), set[str]()
        while waiting:
            for node in handed_on(waiting.pop()):
                if isinstance(node, ast.Name) and node.id in self.own:
                    if node.id not in seen:
                        seen.add(node.id)
                        waiting.extend(self.values.get(node.id, ()))
                else:
                    found.update(names_in(node))
        return found


def handed_on(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the names and attributes in a tree that are read and not called, and texts by which functions are looked up."""
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if isinstance(each, ast.Name | ast.Attribute):
            yield each
        if not isinstance(each, ast.Call):
            waiting.extend(ast.iter_child_nodes(each))
            continue
        called = each.func
        waiting.extend([*each.args, *each.keywords])
        if not isinstance(called, ast.Name):
            waiting.append(called.value if isinstance(called, ast.Attribute) else called)
        if last_name(called) in LOOKING_UP:
            yield from (part for argument in each.args for part in ast.walk(argument) if isinstance(part, ast.Constant))


def walked(statements: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Walk through the statements of a function without the scopes within."""
    waiting = list(statements)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, SCOPES):
            waiting.extend(ast.iter_child_nodes(node))


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
