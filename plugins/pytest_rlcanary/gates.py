"""Add marks that state a test's needs, and flags that let it run; other tests are skipped with the reason.

A mark that the project, its conftest or another plugin registers under the same name is theirs: it gates nothing here,
unless pyproject.toml declares it under [tool.rlcanary.gates].
"""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path

import pytest

from pytest_rlcanary.hooks import hooks_in
from pytest_rlcanary.marks import marks
from rlcanary.errors import UserError
from rlcanary.gates import BUILT_IN, MARKERS, REPORT_OPTION, Gate, Machine, Mark, check_flags, held_back, read_gates

GATES = pytest.StashKey[list[Gate]]()


def __dir__() -> list[str]:
    return hooks_in(globals())


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rlcanary")
    group.addoption(REPORT_OPTION, metavar="PATH", help="write which tests the gates hold back (see `rlcanary gates`)")


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(early_config: pytest.Config, parser: pytest.Parser) -> Generator[None]:
    """Add the gates' flags once the conftests have added theirs, so that a project's own flag of that name stays."""
    result = yield
    try:
        gates = read_gates(early_config.rootpath)
    except UserError as error:
        raise pytest.UsageError(str(error)) from error
    group = parser.getgroup("rlcanary")
    taken = {
        name for known in (parser._anonymous, *parser._groups) for option in known.options for name in option.names()
    }
    gates = [gate for gate in gates if gate not in BUILT_IN or gate.flag not in taken]
    for gate in gates:
        what = f"run the tests marked {gate.name}{' and nothing else' if gate.kind == 'only' else ' too'}"
        if gate.flag not in taken:
            group.addoption(gate.flag, dest=gate.destination, action="store_true", default=False, help=what)
    early_config.stash[GATES] = gates
    return result


def pytest_configure(config: pytest.Config) -> None:
    gates = config.stash.get(GATES, None)
    if gates is None:  # no conftest was looked for
        gates = config.stash[GATES] = list(BUILT_IN)
    for line in marker_lines(gates):
        config.addinivalue_line("markers", line)
    try:
        check_flags(gates, given(config, gates))
    except UserError as error:
        raise pytest.UsageError(str(error)) from error


def marker_lines(gates: list[Gate]) -> list[str]:
    own = [f"{gate.name}: {gate.description}; runs with {gate.flag}" for gate in gates if gate.name not in MARKERS]
    return [*MARKERS.values(), *own]


def given(config: pytest.Config, gates: list[Gate]) -> list[str]:
    """List the gates whose flag is on, whatever its name among pytest's options is: it may be a project's own."""
    return [gate.name for gate in gates if config.getoption(gate.flag, False)]


def foreign_marks(config: pytest.Config, gates: list[Gate]) -> set[str]:
    """Find the built-in marks registered by other code, and not declared as gates in pyproject.toml."""
    ours = set(marker_lines(gates))
    registered = {
        line.partition(":")[0].partition("(")[0].strip() for line in config.getini("markers") if line not in ours
    }
    declared = {gate.name for gate in gates if gate not in BUILT_IN}
    return registered & MARKERS.keys() - declared


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gates = config.stash[GATES]
    foreign = foreign_marks(config, gates)
    active = [gate for gate in gates if gate.name not in foreign]
    on = given(config, active)
    gated = {gate.name for gate in active} | MARKERS.keys() - foreign
    has_only = any(gate.kind == "only" for gate in active if gate.name in on)
    machine: Machine | None = None
    held: dict[str, list[dict[str, str]]] = {}
    first: list[pytest.Item] = []
    for item in items:
        found = [Mark(mark.name, mark.args, tuple(mark.kwargs)) for mark in marks(item) if mark.name in gated]
        if not found and not has_only:
            continue
        first += [item] if any(mark.name == "run_first" for mark in found) else []
        try:
            machine = machine or Machine.here()
            reasons = held_back(found, active, on, machine)
        except UserError as error:
            from pytest_rlcanary.refusal import refuse

            refuse(config, item.nodeid, str(error))
            continue
        if reasons:
            item.add_marker(pytest.mark.skip(reason="; ".join(reason.reason for reason in reasons)))
            held[item.nodeid] = [reason._asdict() for reason in reasons]
    if first:
        chosen = set(first)
        items[:] = [*first, *(item for item in items if item not in chosen)]
    if path := config.getoption(REPORT_OPTION):
        from rlcanary.system.files import write_whole

        write_whole(Path(path), json.dumps({"collected": len(items), "held": held}))
