"""What the plugins show pytest of themselves, which is less than they hold (`pytest_rlcanary.hooks`)."""

import importlib
from importlib.metadata import distribution

import pytest
from _pytest.fixtures import FixtureFunctionDefinition

MODULES = [each.value for each in distribution("rlcanary").entry_points if each.group == "pytest11"]


@pytest.mark.parametrize("name", MODULES)
def test_a_plugin_shows_its_hooks_and_fixtures_and_nothing_else(name: str) -> None:
    module = importlib.import_module(name)
    fixtures = {each for each, value in vars(module).items() if isinstance(value, FixtureFunctionDefinition)}
    assert set(dir(module)) == fixtures | {each for each in vars(module) if each.startswith("pytest_")}
