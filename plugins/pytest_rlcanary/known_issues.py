"""Expect the failures that known_issues.toml names, and report entries that are obsolete."""

from __future__ import annotations

import datetime
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_rlcanary.hooks import Hooks, hooks_in
from rlcanary.errors import UserError

if TYPE_CHECKING:
    from rlcanary.known_issues import Issue

FILE_NAME = "known_issues.toml"

# On the tear-down of a test that is fixed; attributes of a report travel from a worker of xdist to its controller.
ISSUE_ATTRIBUTE = "rlcanary_known_issue"
ISSUE = pytest.StashKey["Issue"]()
PASSED = pytest.StashKey[bool]()
STALE_OUTPUT = "rlcanary_stale_issues"  # what a worker of xdist found, for only workers collect


def __dir__() -> list[str]:
    return hooks_in(globals())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("rlcanary_known_issues", "registry of known issues, relative to the root directory", default="")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", 'known_issue("ID"): the test fails as known_issues.toml says under this id')
    try:
        issues = read_registry(config)
    except UserError as error:
        raise pytest.UsageError(str(error)) from error
    known = KnownIssues(config, issues)
    config.pluginmanager.register(known, "rlcanary-known-issues-hooks")
    if issues:
        config.pluginmanager.register(Reports(known.fixed), "rlcanary-known-issues-reports")


def read_registry(config: pytest.Config) -> list[Issue]:
    """Read the entries of the file that the ini file names, or of known_issues.toml if there is one."""
    named = config.getini("rlcanary_known_issues")
    path = config.rootpath / (named or FILE_NAME)
    if not named and not path.exists():
        return []
    # Every start of pytest would pay for this, and most projects have no registry.
    from rlcanary.known_issues import read_issues

    return read_issues(path)


def reason_of(issue: Issue) -> str:
    return f"{issue.id}: {issue.reason}"


class KnownIssues(Hooks):
    """Hooks of a session with its registry."""

    def __init__(self, config: pytest.Config, issues: list[Issue]) -> None:
        self.config = config
        self.issues = {issue.id: issue for issue in issues}
        self.stale: list[str] = []
        self.fixed: dict[str, list[str]] = defaultdict(list)

    @pytest.hookimpl(tryfirst=True)  # before tests are deselected: a deselected test is not gone
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        today = datetime.date.today()
        passed = {issue.id: reason for issue in self.issues.values() if (reason := issue.ended(today))}
        self.stale = [f"{issue_id}: does not apply here: {reason}" for issue_id, reason in passed.items()]
        for item in items:
            issue = self.issue_of(item) if self.issues or "known_issue" in item.keywords else None
            if issue is not None and issue.id not in passed:
                item.stash[ISSUE] = issue
                # Not strict: whether a test is fixed is known after its tear-down.
                item.add_marker(pytest.mark.xfail(reason=reason_of(issue), strict=False))
        self.find_stale_tests(items)

    def issue_of(self, item: pytest.Item) -> Issue | None:
        """Find the issue that a test is marked with, or the first that names it."""
        marker = item.get_closest_marker("known_issue")
        if marker is None:
            return next((issue for issue in self.issues.values() if issue.matches(item.nodeid)), None)
        if len(marker.args) != 1 or marker.args[0] not in self.issues:
            from pytest_rlcanary.refusal import refuse

            known = ", ".join(self.issues) or f"none, for there is no {FILE_NAME}"
            refuse(self.config, item.nodeid, f"known_issue takes the id of an entry ({known}); got {marker.args}")
            return None
        return self.issues[marker.args[0]]

    def find_stale_tests(self, items: list[pytest.Item]) -> None:
        if not self.issues:
            return
        from rlcanary.known_issues import stale_tests

        nodeids = [item.nodeid for item in items]
        whole = self.whole_files({nodeid.partition("::")[0] for nodeid in nodeids})
        for issue in self.issues.values():
            gone = stale_tests(issue, nodeids, whole, self.config.rootpath)
            self.stale += [f"{issue.id}: there is no test {pattern}" for pattern in gone]

    def whole_files(self, files: set[str]) -> set[str]:
        """Choose the files of which all tests were collected; none where that cannot be known."""
        in_part = {argument.partition("::")[0] for argument in self.config.args if "::" in argument}
        # --lf collects the failed tests of a file alone; with --pyargs, arguments name modules.
        if self.config.getoption("lf", False) or (in_part and self.config.getoption("pyargs", False)):
            return set()
        return {file for file in files if not any(Path(argument).name == Path(file).name for argument in in_part)}

    @pytest.hookimpl(tryfirst=True)  # xdist sends the output in its own hook of this name
    def pytest_sessionfinish(self) -> None:
        if self.stale and hasattr(self.config, "workeroutput"):
            self.config.workeroutput[STALE_OUTPUT] = self.stale

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        found = getattr(node, "workeroutput", {}).get(STALE_OUTPUT, [])  # a worker that was killed leaves none
        self.stale = list(dict.fromkeys([*self.stale, *found]))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        lines = [
            f"{issue_id}: fixed? {nodeid} passes; remove it"
            for issue_id in self.fixed
            for nodeid in self.fixed[issue_id]
        ]
        lines += [f"{line}; remove it" for line in self.stale]
        if lines:
            terminalreporter.section("known issues to remove", sep="-", yellow=True)
            for line in lines:
                terminalreporter.line(line)
        stats = terminalreporter.stats
        ran = sum(len(stats.get(name, [])) for name in ("passed", "failed", "error", "xfailed", "xpassed"))
        if (skipped := len(stats.get("skipped", []))) and not ran:
            terminalreporter.section("nothing was tested", sep="-", yellow=True)
            terminalreporter.line(f"all {skipped} tests were skipped; -rs lists the reasons")


class Reports(Hooks):
    """Hooks that see every report; a session without a registry does not pay for them."""

    def __init__(self, fixed: dict[str, list[str]]) -> None:
        self.fixed = fixed

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # pytest has made an expected failure of the report by then
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        issue = item.stash.get(ISSUE, None)
        if issue is None:
            return report
        # A test may have an expected failure of its own.
        is_ours = getattr(report, "wasxfail", None) == reason_of(issue)
        if report.skipped and is_ours and call.excinfo is not None:
            from rlcanary.known_issues import failure_text

            if not issue.explains(failure_text(call.excinfo.value, report.longrepr)):
                report.outcome = "failed"
                del report.wasxfail
                report.sections.append((issue.id, f"this is another failure: it does not match {issue.error!r}"))
        if report.when == "setup" and PASSED in item.stash:  # an earlier attempt
            del item.stash[PASSED]
        elif report.when == "call":  # one report for each subtest, and that of the test
            item.stash[PASSED] = item.stash.get(PASSED, True) and report.passed and is_ours
        elif report.when == "teardown" and report.passed and item.stash.get(PASSED, False):
            setattr(report, ISSUE_ATTRIBUTE, issue.id)
            if issue.strict:
                report.outcome = "failed"
                report.longrepr = f"[XPASS(strict)] {reason_of(issue)}"
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if (issue_id := getattr(report, ISSUE_ATTRIBUTE, None)) is not None:
            self.fixed[issue_id].append(report.nodeid)
