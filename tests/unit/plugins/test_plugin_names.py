"""The names by which the plugins are switched off, and those that they show pytest (`pytest_rlcanary.hooks`)."""

import importlib
import re
from pathlib import Path

import pytest
from _pytest.fixtures import FixtureFunctionDefinition
from inner_session import run_session

from pytest_rlcanary import PLUGINS

MODULES = ["pytest_rlcanary", *(f"pytest_rlcanary.{name.replace('-', '_')}" for name in PLUGINS)]


@pytest.mark.parametrize("name", MODULES)
def test_a_plugin_shows_its_hooks_and_fixtures_and_nothing_else(name: str) -> None:
    module = importlib.import_module(name)
    fixtures = {each for each, value in vars(module).items() if isinstance(value, FixtureFunctionDefinition)}
    assert set(dir(module)) == fixtures | {each for each in vars(module) if each.startswith("pytest_")}


@pytest.mark.parametrize(
    ("options", "on"),
    [
        ((), set(PLUGINS)),
        (("-p", "no:rlcanary-tracker"), set(PLUGINS) - {"tracker"}),
        (("-p", "no:rlcanary"), set()),
        # Under its module's name it is one plugin still.
        (("-p", "pytest_rlcanary.tracker"), set(PLUGINS) - {"tracker"}),
    ],
)
def test_a_name_switches_one_plugin_off_and_one_name_all(
    tmp_path: Path, options: tuple[str, ...], on: set[str]
) -> None:
    run = run_session(tmp_path, "def test_one(): pass", "--trace-config", *options)
    assert run.code == 0, run.output
    listed = re.findall(r"^ +(\S+) *: (?!None)", run.output.partition("active plugins:")[2], re.MULTILINE)
    assert {f"rlcanary-{name}" for name in PLUGINS} & set(listed) == {f"rlcanary-{name}" for name in on}
    assert ("pytest_rlcanary.tracker" in listed) == ("pytest_rlcanary.tracker" in options)
