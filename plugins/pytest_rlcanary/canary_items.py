"""Make test items of the conformance checks of `--canary`, and say in the terminal how they ended."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import pytest

from pytest_rlcanary.refusal import refuse
from rlcanary.errors import UserError

if TYPE_CHECKING:
    from rlcanary.adapters import Adapter
    from rlcanary.checks import Check, Result
    from rlcanary.checks.findings.coverage import Coverage
    from rlcanary.checks.findings.expected import Expectation

RESULTS = pytest.StashKey[dict[str, list[tuple["Check", "Result"]]]]()
NOT_PROVIDED = "canary not provided"
NOT_COMPARED = "canary not compared"
ADAPTER_ERROR = "canary adapter error"


def add_checks(session: pytest.Session, items: list[pytest.Item], chosen: set[str]) -> None:
    """Add the checks of every adapter to the items, or of them only those whose ids were chosen."""
    config = session.config
    specs: list[str] = config.getoption("canary")
    sys.path.insert(0, str(Path.cwd()))
    from rlcanary.adapters import load_adapter

    expected: dict[str, Expectation] = {}
    try:
        adapters = [load_adapter(spec) for spec in specs]
        # The checks import torch, which an adapter that was loaded has.
        from rlcanary.checks import all_checks
        from rlcanary.checks.findings.expected import read_expected
        from rlcanary.checks.worlds.models import chosen as chosen_models

        worlds = chosen_models(config.getoption("canary_worlds"))
        for path in config.getini("canary_expected"):
            expected |= read_expected(path)
    except UserError as error:
        refuse(config, "--canary", str(error))
        return
    for spec, adapter in zip(specs, adapters, strict=True):
        parent = CanaryChecks.from_parent(session, name=f"canary[{adapter.name}]", nodeid=f"canary[{adapter.name}]")
        for check in all_checks():
            item = CanaryItem.from_parent(parent, name=check.id, check=check, adapter=adapter, spec=spec)
            item.expectation, item.worlds = expected.get(check.id), worlds
            if not chosen or item.nodeid in chosen:
                items.append(item)
    if unknown := chosen - {item.nodeid for item in items}:
        refuse(config, min(unknown), "there is no such check; docs/checks/index.md lists them")


def status(report: pytest.TestReport | pytest.CollectReport, config: pytest.Config) -> tuple[str, str, str] | None:
    """Count checks that compared nothing, are not provided, or met an adapter error apart from skipped tests."""
    if report.when == "call" and NOT_PROVIDED in dict(report.user_properties):
        return None if config.getoption("canary_list_not_provided") else ("not provided", "", "NOT PROVIDED")
    if report.when == "call" and NOT_COMPARED in dict(report.user_properties):
        return "not compared", "n", "NOT COMPARED"
    if report.when == "call" and ADAPTER_ERROR in dict(report.user_properties):
        return "adapter error", "a", "ADAPTER ERROR"
    return None


def summarize(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name the causes of the failures, the share of the checks that ran, and those that compared nothing."""
    for name, line in _coverage(terminalreporter).items():
        terminalreporter.line(f"canary {name}: {line}")
    if nothing_was_checked(terminalreporter):
        terminalreporter.line("rlcanary: nothing was checked: no check that ran had something to compare", red=True)
    failed = {
        report.nodeid for report in terminalreporter.stats.get("failed", []) if report.nodeid.startswith("canary[")
    }
    for spec in config.getoption("canary") if failed else ():
        _show_causes(terminalreporter, config, spec, failed)
    for category, title, name in (
        ("not compared", "checks that compared nothing", NOT_COMPARED),
        ("adapter error", "checks that met an error of the adapter itself", ADAPTER_ERROR),
    ):
        reports = terminalreporter.stats.get(category, [])
        if reports:
            terminalreporter.section(title)
        for report in reports:
            terminalreporter.line(f"{report.nodeid}: {dict(report.user_properties)[name]}")


def nothing_was_checked(terminalreporter: pytest.TerminalReporter) -> bool:
    """Tell if there were checks, and none compared anything."""
    told = _told_of(terminalreporter).values()
    return bool(told) and all(NOT_PROVIDED in each or NOT_COMPARED in each for each in told)


def _told_of(terminalreporter: pytest.TerminalReporter) -> dict[str, dict[str, object]]:
    """Return what the reports of checks tell, by their ids."""
    return {
        report.nodeid: dict(report.user_properties)
        for report in itertools.chain.from_iterable(terminalreporter.stats.values())
        if isinstance(report, pytest.TestReport) and report.when == "call" and report.nodeid.startswith("canary[")
    }


def _coverage(terminalreporter: pytest.TerminalReporter) -> dict[str, Coverage]:
    """Return how much of the suite ran, by adapter."""
    reports = _told_of(terminalreporter)
    if not reports:
        return {}
    # The checks import torch, which is there where one of them ran.
    from rlcanary.checks.findings.coverage import coverage

    adapters = dict.fromkeys(nodeid.partition("::")[0] for nodeid in reports)
    found = {}
    for adapter in adapters:
        own = {name.partition("::")[2]: told for name, told in reports.items() if name.startswith(f"{adapter}::")}
        missing = {
            name: frozenset(filter(None, str(told[NOT_PROVIDED]).split(", ")))
            for name, told in own.items()
            if NOT_PROVIDED in told
        }
        misfits = [name for name, told in own.items() if ADAPTER_ERROR in told]
        found[adapter.removeprefix("canary[").removesuffix("]")] = coverage(own, missing, misfits)
    return found


def _show_causes(terminalreporter: pytest.TerminalReporter, config: pytest.Config, spec: str, failed: set[str]) -> None:
    """Name the causes of an adapter's failures, which fold the rest."""
    from rlcanary.adapters import load_adapter
    from rlcanary.bugs.causes import causes_of
    from rlcanary.checks import all_checks, run_check
    from rlcanary.checks.findings.grouping import grouped
    from rlcanary.checks.findings.report import folded, told_of
    from rlcanary.checks.worlds.models import chosen as chosen_models

    adapter = load_adapter(spec)
    seed, timeout, examples = (config.getoption(f"canary_{name}") for name in ("seed", "timeout", "examples"))
    ran = config.stash.get(RESULTS, {}).get(spec)
    if ran is None:
        # Under xdist the results are those of other processes.
        chosen = [check for check in all_checks() if f"canary[{adapter.name}]::{check.id}" in failed]
        worlds = chosen_models(config.getoption("canary_worlds"))
        ran = [(check, run_check(check, adapter, spec, seed, timeout, examples, worlds)) for check in chosen]
    checks, results = [check for check, _ in ran], [result for _, result in ran]
    unexpected = [result for result in results if f"canary[{adapter.name}]::{result.id}" in failed]
    diagnosis = causes_of(checks, results, adapter, seed, timeout)
    folds, rest = folded(unexpected, diagnosis.causes)
    shared = [fold for fold in grouped(rest, checks, results) if fold.told]
    if folds or shared:
        terminalreporter.section(f"causes of the failures of {adapter.name}")
    for cause, members in folds:
        terminalreporter.line(cause.words, bold=True)
        terminalreporter.line(f"  {told_of(members)}")
    for fold in shared:
        terminalreporter.line(f"{fold.members[0].id} (no known cause)", bold=True)
        for line in fold.told.splitlines():
            terminalreporter.line(f"  {line}")
    if str(diagnosis):
        terminalreporter.line(f"rlcanary: {diagnosis}")


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
    """One check on one adapter.

    Attributes:
        expectation: the way in which it is expected to fail, or None.
        worlds: the models on which it runs besides its own.
    """

    expectation: Expectation | None = None
    worlds: tuple[str, ...] = ()

    def __init__(self, *, check: Check, adapter: Adapter, spec: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.check, self.adapter, self.spec = check, adapter, spec
        self.add_marker(pytest.mark.canary)

    def runtest(self) -> None:
        from rlcanary.checks import run_check
        from rlcanary.checks.findings.expected import compare

        seed, timeout, examples = (self.config.getoption(f"canary_{name}") for name in ("seed", "timeout", "examples"))
        result = run_check(self.check, self.adapter, self.spec, seed, timeout, examples, self.worlds)
        self.config.stash.setdefault(RESULTS, {}).setdefault(self.spec, []).append((self.check, result))
        comparison = compare([result], {} if self.expectation is None else {self.check.id: self.expectation})
        if comparison.unexpected:
            failure = comparison.unexpected[0]
            least = self.config.getoption("canary_fail_on") or self.config.getini("canary_fail_on")
            if not comparison.is_red_from(least):
                pytest.xfail(f"{failure.severity}, below the severity {least}: {failure.message.splitlines()[0]}")
            raise CheckFailed(failure)
        if comparison.known and self.expectation is not None:
            pytest.xfail(self.expectation.reason)
        if comparison.stale and result.status == "pass":
            raise CheckFailed(replace(result, message="is expected to fail, but passes: remove it from the file"))
        if result.status == "not-compared":
            self.user_properties.append((NOT_COMPARED, result.message))
        if result.status == "adapter-error":
            self.user_properties.append((ADAPTER_ERROR, result.message))
        if result.status == "not-provided":
            self.user_properties.append((NOT_PROVIDED, ", ".join(sorted(result.missing))))
        if result.status != "pass":
            pytest.skip(f"{result.status.replace('-', ' ')}: {result.message}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if not isinstance(excinfo.value, CheckFailed):
            return super().repr_failure(excinfo, style)
        result = excinfo.value.result
        width = self.config.get_terminal_writer().fullwidth - 1
        effect = [f"severity: {result.severity}"] if result.severity else []
        parts = [result.message, *effect, "", *(fill(paragraph, width) + "\n" for paragraph in self.check.paragraphs)]
        if result.snippet:
            parts += ["Reproduce:", *(f"    {line}" for line in result.snippet.splitlines())]
        return "\n".join(parts)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, f"{self.check.id} of {self.adapter.name}"
