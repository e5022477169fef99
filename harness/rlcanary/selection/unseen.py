"""Find what a run did that no recorder sees: the kinds of docs/selection.md that the code itself shows."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from rlcanary.selection.dependencies import Run
from rlcanary.selection.source_file import MODULE, Block

SHOWN = 3


def unseen_in(run: Run) -> list[str]:
    """Return a line for each kind of which code that the tests ran may be a case."""
    ran = dict(blocks_in(run))
    return [
        *line("a later test is not followed to what these functions leave in globals", ran, leaves_state),
        *line(
            "modules that these functions import under a computed name count for the first test", ran, imports_by_name
        ),
    ]


def blocks_in(run: Run) -> Iterator[tuple[str, Block]]:
    """Yield the functions that ran for tests, with their names."""
    for name, context in list(run.contexts.items()):
        for code in context.code if name.startswith(("t:", "x:", "f:", "p:")) else ():
            yield from (
                (f"{file}: {block.name}", block) for file, block in run.blocks_of(code) if block.first != MODULE
            )


def line(text: str, ran: dict[str, Block], applies: Callable[[Block], bool]) -> list[str]:
    found = sorted(name for name, block in ran.items() if applies(block))
    return [f"{text}: {', '.join(found[:SHOWN])}{' …' if len(found) > SHOWN else ''}"] if found else []


def leaves_state(block: Block) -> bool:
    """Tell if a function stores in a global without a condition: a store under one counts for every test that asks."""
    kept = {name for node in nodes_of(block) if isinstance(node, ast.Global) for name in node.names}
    stores = (node for node in nodes_of(block) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    return any(
        node.id in kept and not any(fill.first <= node.lineno <= fill.last for fill in block.fills) for node in stores
    )


def imports_by_name(block: Block) -> bool:
    calls = (node for node in nodes_of(block) if isinstance(node, ast.Call) and node.args)
    return "__import__" in block.names and any(
        isinstance(node.func, ast.Name) and node.func.id == "__import__" and not isinstance(node.args[0], ast.Constant)
        for node in calls
    )


def nodes_of(block: Block) -> Iterator[ast.AST]:
    for node in block.nodes:
        yield from ast.walk(node)
