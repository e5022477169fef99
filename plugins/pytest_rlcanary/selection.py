"""Let `--testmon` see code that runs in Ray actors, tasks and subprocesses.

Every process of the run records the code that it ran for each test (`rlcanary.selection.injected`). The process that
owns pytest-testmon's database saves the records there after each test. Without `--testmon` this plugin does nothing.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from pytest_rlcanary.hooks import hooks_in

TESTMON_OPTIONS = ("testmon", "testmon_noselect", "testmon_nocollect", "testmon_forceselect")


def is_wanted(options: Any) -> bool:
    return any(getattr(options, name, False) for name in TESTMON_OPTIONS) and not getattr(options, "no-testmon", False)


def __dir__() -> list[str]:
    return hooks_in(globals())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(
        "rlcanary_selection_environment",
        "with --testmon: names or patterns of environment variables on whose values every test depends",
        type="args",
        default=[],
    )


@pytest.hookimpl(tryfirst=True)  # a conftest imports the project's modules
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    options = early_config.known_args_namespace
    if not is_wanted(options) or options.collectonly or options.testmon_nocollect:
        return
    from pytest_rlcanary.recorded_session import begin

    begin(early_config)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, Any, Any]:
    if not is_wanted(config.option):
        return (yield)
    from pytest_rlcanary.recorded_session import prepared

    with prepared(config):
        return (yield)


@pytest.hookimpl(trylast=True)  # testmon has read its database by then
def pytest_configure(config: pytest.Config) -> None:
    if not is_wanted(config.option) or not hasattr(config, "testmon_data"):
        return
    from pytest_rlcanary.recorded_session import select_and_record

    select_and_record(config, config.testmon_data)


def pytest_report_header(config: pytest.Config) -> list[str]:
    if not is_wanted(config.option):
        return []
    from pytest_rlcanary.recorded_session import SAID

    return [f"rlcanary: selection: {line}" for line in config.stash.get(SAID, [])]
