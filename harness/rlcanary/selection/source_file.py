"""Read a Python file without running it: its functions, what each reads, and the parts of its body that are only read.

A module's body is one block, as pytest-testmon has it, without its *constants*: names bound once to a literal or to what is
made of literals (see `constants`), at the top level or in a class without bases and decorators. A constant does not fail and
has no effect, so only tests that run code which reads its name depend on it. Likewise a function's parameters belong to the
function's block, unless it is decorated.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from rlcanary.selection.constants import Names, constant, is_literal, names_of
from rlcanary.selection.fills import Fill, Function, Passed, annotations_of, fills_in, handed_in, names_in, walked

MODULE = 0
BEHIND = 2**31  # all lines of a file
CACHING = re.compile(r"cache|memo|once|singleton|lazy", re.IGNORECASE)
# Code that reads names which it does not spell.
DYNAMIC = frozenset(
    {"vars", "dir", "eval", "exec", "asdict", "astuple", "fields", "getmembers", "attrgetter", "__import__", "__dict__"}
) | {"__globals__", "f_globals", "f_locals"}
LOOKS_UP = frozenset({"getattr", "hasattr", "__getattribute__"})
OWN_NAMES = frozenset({"globals", "locals"})  # the same, of names that are bound in its own file
# Names in a module that pytest and Python look for.
LOOKED_FOR = re.compile(r"__\w+__|pytest\w*|collect_ignore\w*|setup\w*|teardown\w*")
ALL, VERSION = "__all__", "__version__"
ONLY_READ = frozenset({ALL, VERSION, "__author__", "__copyright__", "__email__", "__license__"})  # of a module


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
    """The body of a function or, at line 0, of the module, or a constant.

    Attributes:
        first: the line at which the code begins, decorators included, as `co_firstlineno` has it.
        start: the line of the first statement of the body, which is where pytest-testmon's block begins.
        end: the last line.
        names: the names that it reads, the identifiers in its texts among them.
        elsewhere: those of them that need not be the file's own, such as names of attributes.
        handed: those of what is not only asked for an attribute: others may read any of a class that they are given.
        dynamic: it reads names that it does not spell,
        reads_own: that are bound in its own file,
        reads_modules: that are bound in modules which it imported by name, which are in its variables `modules`,
        reads_attributes: that are attributes of its own class,
        beginnings: that begin so.
        function: its tree.
        renamed: the names that its file gives to others.
        fills: where it fills what later calls read.
        waits: calling it runs nothing yet: a generator or a coroutine.
        caches: its decorator keeps what it returns.
        code: a text that changes with the block's meaning.
    """

    name: str
    first: int
    start: int
    end: int
    imports: list[Import] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    elsewhere: set[str] = field(default_factory=set)
    handed: set[str] = field(default_factory=set)
    dynamic: bool = False
    reads_own: bool = False
    reads_modules: bool = False
    reads_attributes: bool = False
    modules: frozenset[str] = frozenset()
    beginnings: set[str] = field(default_factory=set)
    function: Function | None = field(default=None, repr=False)
    renamed: dict[str, str] = field(default_factory=dict, repr=False)
    fills: list[Fill] = field(default_factory=list)
    waits: bool = False
    caches: bool = False
    nodes: list[ast.AST] = field(default_factory=list, repr=False)
    hidden: frozenset[int] = frozenset()

    @property
    def last_name(self) -> str:
        return self.name.rpartition(".")[2]

    @cached_property
    def whole(self) -> Fill:
        """All of it, as if it filled something."""
        passed = Passed(self.function).by(self.function.body) if self.function is not None else set()
        passed |= {self.renamed[name] for name in passed & self.renamed.keys()}
        return Fill(0, BEHIND, frozenset(self.names), frozenset(passed))

    @cached_property
    def code(self) -> str:
        return f"{self.name}:{', '.join(dumped(node, self.hidden) for node in self.nodes)}"


class SourceFile:
    """The blocks of one file. A file that cannot be parsed has only the module's block, and imports nothing."""

    def __init__(self, text: bytes) -> None:
        self.blocks = [Block("<module>", MODULE, 1, 2 * BEHIND)]
        self.constants: list[Block] = []
        self.bases: dict[str, set[str]] = {}  # of the classes of the module
        self.imports_by_name = any(name in text for name in (b"import_module", b"__import__", b"importorskip"))
        self.is_valid = False
        self.renamed: dict[str, str] = {}
        try:
            self.tree = ast.parse(text)
        except (SyntaxError, ValueError):
            return
        self.is_valid = True
        module = self.blocks[0]
        if self.tree.body:
            module.start = self.tree.body[0].lineno
        module.nodes = [self.tree]
        self.hidden: set[int] = set()
        self.bound = Counter(bindings(self.tree))
        self.find_constants(self.tree, "", names_of(self.tree, self.bound))
        self.visit(self.tree, module, "")
        hidden = frozenset(self.hidden)
        seen: Counter[str] = Counter()
        own = {place.name for place in self.constants}
        for block in self.blocks:
            block.hidden = hidden
            seen[block.name] += 1
            if seen[block.name] > 1:
                block.name += f"#{seen[block.name]}"
            block.names |= {self.renamed[name] for name in block.names & self.renamed.keys()}
            for fill in block.fills:
                fill.names |= {self.renamed[name] for name in fill.names & self.renamed.keys()}
                fill.passed |= {self.renamed[name] for name in fill.passed & self.renamed.keys()}
            block.elsewhere |= block.names - own
            block.handed |= {self.renamed[name] for name in block.handed & self.renamed.keys()}

    def find_constants(self, scope: ast.Module | ast.ClassDef, prefix: str, known: Names) -> None:
        bound = self.bound if isinstance(scope, ast.Module) else Counter(bindings(scope))
        for statement in scope.body:
            if isinstance(statement, ast.ClassDef) and not prefix and is_plain(statement):
                inner = known.inside(Counter(bindings(statement)))
                self.find_constants(statement, f"{statement.name}.", inner)
            names, value = constant(statement, known)
            special = {name for name in names if LOOKED_FOR.fullmatch(name)} - (ONLY_READ if not prefix else set())
            if value is None or special or any(bound[name] > 1 for name in names):
                continue
            self.hidden.add(id(value))
            for name in names:
                line = BEHIND + len(self.constants)  # a line of its own: other code can be on the statement's
                place = Block(prefix + name, statement.lineno, line, line)
                place.nodes = [value]
                place.names = {each.id for each in ast.walk(value) if isinstance(each, ast.Name)}
                self.constants.append(place)

    def visit(self, node: ast.AST, block: Block, prefix: str) -> None:
        """Visit the statements of a block; those of functions in it are blocks of their own."""
        for child in statements_in(node):
            if isinstance(child, Function):
                self.visit_function(child, block, prefix)
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                self.visit(ast.Module(child.orelse, []), block, prefix)
                continue
            if isinstance(child, ast.Import | ast.ImportFrom):
                block.imports.extend(imports_of(child))
                renamed = {each.asname: each.name.rpartition(".")[2] for each in child.names if each.asname}
                self.renamed.update(renamed)
                if block.first != MODULE:
                    block.names.update(each.name for each in child.names)
            elif self.imports_by_name and not has_statements(child):
                for expression in ast.walk(child):
                    block.imports.extend(imports_of(expression))
            if isinstance(child, ast.ClassDef):  # whose bases are handed with it
                self.bases.setdefault(child.name, set()).update(handed_in(child.bases))
            else:
                block.handed |= handed_in(expressions_of(child))
            for part in expressions_of(child):
                self.read_names(part, block)
            self.visit(child, block, f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix)

    def visit_function(self, child: Function, block: Block, prefix: str) -> None:
        first = min((decorator.lineno for decorator in child.decorator_list), default=child.lineno)
        inner = Block(prefix + child.name, first, child.body[0].lineno, child.end_lineno or child.lineno)
        inner.nodes = [*child.body]
        defaults = [each for each in (*child.args.defaults, *child.args.kw_defaults) if each is not None]
        for each in (*child.decorator_list, *defaults, *annotations_of(child)):
            self.read_names(each, block)
        if not child.decorator_list and all(is_literal(each) for each in defaults):
            self.hidden.add(id(child.args))
            inner.nodes.append(child.args)
        inner.caches = any(CACHING.search(ast.unparse(decorator)) for decorator in child.decorator_list)
        inner.fills = list(fills_in(child))
        inner.function, inner.renamed = child, self.renamed
        inner.modules = frozenset(imported_in(child)) if self.imports_by_name else frozenset()
        inner.waits = isinstance(child, ast.AsyncFunctionDef) or any(
            isinstance(each, ast.Yield | ast.YieldFrom) for each in walked(child.body)
        )
        self.blocks.append(inner)
        block.handed |= handed_in(defaults)
        self.visit(child, inner, f"{prefix}{child.name}.")

    def read_names(self, node: ast.AST, block: Block) -> None:
        if id(node) in self.hidden:
            return
        for each in ast.walk(node):
            names = names_in(each)
            block.names.update(names)
            if not isinstance(each, ast.Name):
                block.elsewhere.update(names)
            block.dynamic = block.dynamic or not DYNAMIC.isdisjoint(names)
            block.reads_own = block.reads_own or not OWN_NAMES.isdisjoint(names)
            if call := computed_name(each):
                self.read_computed(call, block)

    def read_computed(self, call: ast.Call, block: Block) -> None:
        owner = call.args[0]
        if isinstance(owner, ast.Name) and owner.id in block.modules:
            block.reads_modules = True
        elif begins := beginning(call.args[1]):
            block.beginnings.add(begins)
        elif isinstance(owner, ast.Name) and owner.id in ("self", "cls"):
            block.reads_attributes = True
        else:
            block.dynamic = True

    @cached_property
    def imported_names(self) -> set[str]:
        """The names that are taken from other modules; `*` for all."""
        return {name for block in self.blocks for statement in block.imports for name in statement.names}

    @cached_property
    def by_first_line(self) -> dict[int, Block]:
        return {block.first: block for block in reversed(self.blocks)}

    @cached_property
    def innermost(self) -> list[Block]:
        return sorted(self.blocks, key=lambda block: (block.start, -block.end), reverse=True)

    def block_at(self, first_line: int, name: str) -> Block:
        """Find the block of a code object: its own, or for a lambda, a comprehension or a class the one around it."""
        return self.blocks_at(first_line, name)[-1]

    def blocks_at(self, first_line: int, name: str) -> list[Block]:
        """Find the blocks that may have begun to run where this code object did; the last is its own.

        A lambda in a function's header begins on the same line as the function, and may hide that the function ran.
        """
        if name == "<module>":
            return [self.blocks[0]]
        own = self.by_first_line.get(first_line)
        if own is not None and own.last_name.partition("#")[0] == name.rpartition(".")[2]:
            return [own]
        return [*([own] if own is not None and own.first != MODULE else []), self.block_around(first_line)]

    def block_around(self, line: int) -> Block:
        """Find the innermost block with this line."""
        return next((block for block in self.innermost if block.start <= line <= block.end), self.blocks[0])


@lru_cache(1000)
def parsed(text: bytes) -> SourceFile:
    """Parse a file once for all who read the same text: the map of the project, and testmon's fingerprints."""
    return SourceFile(text)


def computed_name(node: ast.AST) -> ast.Call | None:
    """Return the node, if it looks up an attribute whose name is computed."""
    if not isinstance(node, ast.Call) or len(node.args) < 2 or isinstance(node.args[1], ast.Constant):
        return None
    called = getattr(node.func, "attr", getattr(node.func, "id", ""))
    return node if called in LOOKS_UP else None


def beginning(name: ast.expr) -> str:
    """Return the text that a computed name begins with, as far as it is spelled."""
    first: ast.expr | None = name
    if isinstance(name, ast.JoinedStr):
        first = name.values[0] if name.values else None
    while isinstance(first, ast.BinOp) and isinstance(first.op, ast.Add):
        first = first.left
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""


def imported_in(function: Function) -> set[str]:
    """Return the function's variables that hold what `import_module` returned, and nothing else."""
    found: set[str] = set()
    bound: Counter[str] = Counter()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and len(node.targets) == 1:
            value = node.value
            if (
                isinstance(value, ast.Call)
                and getattr(value.func, "attr", getattr(value.func, "id", "")) == "import_module"
            ):
                found.add(node.targets[0].id)
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound[node.id] += 1
        elif isinstance(node, ast.arg):
            bound[node.arg] += 1
        elif isinstance(node, ast.Global | ast.Nonlocal):
            bound.update(dict.fromkeys(node.names, 2))
        elif isinstance(node, Function | ast.ClassDef):
            bound[node.name] += 1
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound.update(each.asname or each.name.partition(".")[0] for each in node.names)
    return {name for name in found if bound[name] == 1}


def is_plain(node: ast.ClassDef) -> bool:
    """Tell if nothing looks at a class while it is made."""
    return not (node.decorator_list or node.keywords or node.bases)


def bindings(scope: ast.Module | ast.ClassDef) -> Iterator[str]:
    """Yield the names that the statements of a scope bind, each as often as it is bound."""
    waiting: list[ast.AST] = list(scope.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, Function | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (each.asname or each.name.partition(".")[0] for each in node.names)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif not isinstance(node, ast.Lambda):
            waiting.extend(ast.iter_child_nodes(node))


def dumped(node: object, hidden: frozenset[int]) -> str:
    """Write a tree as text, without the bodies of its functions and without hidden nodes, which are in other blocks."""
    if isinstance(node, ast.AST):
        if id(node) in hidden and not isinstance(node, ast.arguments):
            return "constant"
        values = []
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(node, Function) and name == "body":
                values.append("body")
            elif isinstance(node, Function) and name == "args" and id(value) in hidden:
                values.append(", ".join(dumped(each, hidden) for each in annotations_of(node)))
            else:
                values.append(dumped(value, hidden))
        return f"{type(node).__name__}({', '.join(values)})"
    if isinstance(node, list):
        return f"[{', '.join(dumped(each, hidden) for each in node)}]"
    return repr(node)


def statements_in(node: ast.AST) -> Iterator[ast.stmt]:
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, name, ()) if not isinstance(node, ast.expr) else ():
            if isinstance(child, ast.stmt):
                yield child
            else:
                yield from statements_in(child)


def expressions_of(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the parts of a statement that are not statements of blocks within."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        for child in ast.iter_child_nodes(waiting.pop()):
            if isinstance(child, ast.expr | ast.keyword | ast.pattern):
                yield child
            elif not isinstance(child, ast.stmt):
                waiting.append(child)
    if isinstance(statement, ast.AugAssign):
        yield statement


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
