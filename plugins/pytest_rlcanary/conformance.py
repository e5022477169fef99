"""Collect every conformance check as a test item for `pytest --canary=ADAPTER`.

Each check is an item of its own, so that -k, -m canary, xdist, reruns and the tracker work on checks as on tests.
"""

from __future__ import annotations

import pytest

from pytest_rlcanary.hooks import hooks_in

CHOSEN = pytest.StashKey[set[str]]()
SEVERITIES = ("update", "dashboard", "hardening")


def __dir__() -> list[str]:
    return hooks_in(globals())


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rlcanary")
    group.addoption(
        "--canary",
        action="append",
        default=[],
        metavar="ADAPTER",
        help="add the conformance checks of this adapter: trl, package.module:Class or a Python file (repeatable)",
    )
    group.addoption(
        "--canary-fail-on",
        choices=SEVERITIES,
        metavar="SEVERITY",
        help="xfail failures below this severity: update, dashboard or hardening (default: ini canary_fail_on, hardening)",
    )
    parser.addini(
        "canary_fail_on", "severity from which a check fails: update, dashboard or hardening", default="hardening"
    )
    group.addoption(
        "--canary-list-not-provided",
        action="store_true",
        help="count checks that need what the adapter does not provide among the skipped tests",
    )
    parser.addini("canary_expected", "known failures of --canary, from rlcanary check --update-expected", type="paths")
    group.addoption("--canary-seed", type=int, default=0, metavar="N", help="seed of the checks' random cases")
    group.addoption(
        "--canary-examples", type=int, default=0, metavar="N", help="draw N more cases per check from the seed"
    )
    group.addoption(
        "--canary-worlds",
        default="",
        metavar="all|NAME[,NAME]",
        help="run every check that has a model on these models too, as rlcanary check --worlds does",
    )
    group.addoption(
        "--canary-timeout", type=float, default=120, metavar="SECONDS", help="limit of one check, 0 for none (120)"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getini("canary_fail_on") not in SEVERITIES:
        raise pytest.UsageError(
            f"canary_fail_on={config.getini('canary_fail_on')!r} is not one of {', '.join(SEVERITIES)}"
        )
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
    chosen = config.stash.get(CHOSEN, set())
    if config.getoption("canary"):
        from pytest_rlcanary.canary_items import add_checks

        add_checks(session, items, chosen)
    elif chosen:
        from pytest_rlcanary.refusal import refuse

        refuse(config, min(chosen), "this is a check: name its adapter with --canary=ADAPTER")


def pytest_report_teststatus(
    report: pytest.TestReport | pytest.CollectReport, config: pytest.Config
) -> tuple[str, str, str] | None:
    if not config.getoption("canary"):
        return None
    from pytest_rlcanary.canary_items import status

    return status(report, config)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Where nothing failed, end with 3, which blames no code, for an error of an adapter, or 2 if nothing was checked."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.exitstatus != pytest.ExitCode.OK or reporter is None or not session.config.getoption("canary"):
        return
    from pytest_rlcanary.canary_items import nothing_was_checked

    if reporter.stats.get("adapter error"):
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
    elif nothing_was_checked(reporter):
        session.exitstatus = pytest.ExitCode.INTERRUPTED  # as a user's mistake


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("canary"):
        from pytest_rlcanary.canary_items import summarize

        summarize(terminalreporter, config)
