"""`pytest --canary=ADAPTER` collects every conformance check as a test item.

Each check is an item of its own, so that -k, -m canary, xdist, reruns and the tracker work on checks as on tests.
"""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import pytest

from rlcanary.errors import UserError

if TYPE_CHECKING:
    from rlcanary.adapters import Adapter
    from rlcanary.checks import Check, Result

CHOSEN = pytest.StashKey[set[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rlcanary")
    group.addoption(
        "--canary",
        action="append",
        default=[],
        metavar="ADAPTER",
        help="add the conformance checks of this adapter: trl, package.module:Class or a Python file (repeatable)",
    )
    parser.addini("canary_expected", "file of known failures of --canary: `check.id  # reason` a line", type="paths")
    group.addoption("--canary-seed", type=int, default=0, metavar="N", help="seed of the checks' random cases")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "canary: a conformance check of an adapter, from --canary")


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Keep the ids of checks among the arguments, such as one pasted from a failure, from being looked for as files."""
    arguments = session.config.args
    chosen = {argument for argument in arguments if argument.startswith("canary[")}
    if chosen:
        session.config.stash[CHOSEN] = chosen
        session.config.args = [argument for argument in arguments if argument not in chosen]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the checks before any other plugin selects among the items."""
    specs: list[str] = config.getoption("canary")
    chosen = config.stash.get(CHOSEN, set())
    if chosen and not specs:
        raise pytest.UsageError(f"{min(chosen)} is a check: say with --canary=ADAPTER of which adapter")
    if not specs:
        return
    sys.path.insert(0, str(Path.cwd()))
    from rlcanary.adapters import load_adapter

    expected: dict[str, str] = {}
    try:
        adapters = [load_adapter(spec) for spec in specs]
        # The checks import torch, which an adapter that was loaded has.
        from rlcanary.checks import all_checks
        from rlcanary.checks.expected import read_expected

        for path in config.getini("canary_expected"):
            expected |= read_expected(path)
    except UserError as error:
        raise pytest.UsageError(f"--canary: {error}") from error
    for spec, adapter in zip(specs, adapters, strict=True):
        parent = CanaryChecks.from_parent(session, name=f"canary[{adapter.name}]", nodeid=f"canary[{adapter.name}]")
        for check in all_checks():
            item = CanaryItem.from_parent(parent, name=check.id, check=check, adapter=adapter, spec=spec)
            if chosen and item.nodeid not in chosen:
                continue
            if check.id in expected:
                item.add_marker(pytest.mark.xfail(reason=expected[check.id], strict=True))
            items.append(item)
    if unknown := chosen - {item.nodeid for item in items}:
        raise pytest.UsageError(f"there is no check {min(unknown)}; docs/checks.md lists them")


class CanaryChecks(pytest.Collector):
    """The checks of one adapter."""

    def collect(self) -> list[pytest.Item]:
        return []


class CheckFailed(Exception):
    """A check that failed or raised, as the item's outcome."""

    def __init__(self, result: Result) -> None:
        super().__init__(result.message)
        self.result = result


class CanaryItem(pytest.Item):
    """One check on one adapter."""

    def __init__(self, *, check: Check, adapter: Adapter, spec: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.check, self.adapter, self.spec = check, adapter, spec
        self.add_marker(pytest.mark.canary)

    def runtest(self) -> None:
        from rlcanary.checks import run_check

        result = run_check(self.check, self.adapter, self.spec, self.config.getoption("canary_seed"))
        if result.status in ("not-provided", "not-compared"):
            pytest.skip(f"{result.status.replace('-', ' ')}: {result.message}")
        if result.status != "pass":
            raise CheckFailed(result)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if not isinstance(excinfo.value, CheckFailed):
            return super().repr_failure(excinfo, style)
        result = excinfo.value.result
        width = self.config.get_terminal_writer().fullwidth - 1
        parts = [result.message, "", *(fill(paragraph, width) + "\n" for paragraph in self.check.paragraphs)]
        if result.snippet:
            parts += ["Reproduce:", *(f"    {line}" for line in result.snippet.splitlines())]
        return "\n".join(parts)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, f"{self.check.id} of {self.adapter.name}"
