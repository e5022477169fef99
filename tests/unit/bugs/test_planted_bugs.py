"""Bugs of the museum that are planted in the installed code of frameworks are caught through their adapters."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlcanary.adapters import load_adapter
from rlcanary.bugs import all_bugs
from rlcanary.bugs.planted import FRAMEWORKS, framework_of
from rlcanary.bugs.planted.detecting import Sighting, sightings
from rlcanary.bugs.planted.plant import Planted
from rlcanary.commands.checks.bugs import bugs
from rlcanary.errors import UserError
from rlcanary.mutants.functions import function_at, with_text

PAGE = Path(__file__).parents[3] / "docs" / "planted.md"
MUSEUM = {bug.id: bug for bug in all_bugs()}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_planted_bug_is_in_the_museum_and_changes_code_that_the_framework_has(name: str) -> None:
    pytest.importorskip(name)
    framework = framework_of(name)
    named = [plant.bug for plant in framework.plants] + list(framework.elsewhere)
    assert len(set(named)) == len(named)
    assert set(named) <= MUSEUM.keys()
    _ = load_adapter(name).conventions
    framework.prepare()
    for plant in framework.plants:
        assert Planted(name, plant, frozenset()).diff


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_bug_that_a_framework_shipped_is_planted_in_it_or_has_a_reason(name: str) -> None:
    pytest.importorskip(name)
    framework = framework_of(name)
    shipped = {bug.id for bug in all_bugs() if bug.id.startswith(f"{name}.")}
    assert shipped <= {plant.bug for plant in framework.plants} | framework.elsewhere.keys()


def test_bugs_that_trl_shipped_are_caught_in_its_installed_code(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    wanted = ["trl.permuted-scale", "trl.distillation-mixture", "trl.distillation-limits"]
    file = tmp_path / "matrix.json"
    command = ["--adapter", "trl", "--json", str(file), *(part for bug in wanted for part in ("--only", bug))]
    done = CliRunner().invoke(bugs, command)
    assert done.exit_code == 0, done.output
    found = {each["bug"]: each["check"].partition(".")[0] for each in json.loads(file.read_text())["sightings"]}
    assert found == dict(zip(wanted, ["advantage", "distillation", "distillation"], strict=True))
    assert "trl: 3 of 3 planted bugs caught" in done.output


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_page_names_every_planted_bug_and_why_others_are_not(name: str) -> None:
    page, framework = PAGE.read_text(), framework_of(name)
    assert [plant.bug for plant in framework.plants if f"| {plant.bug} |" not in page] == []
    assert [bug for bug, reason in framework.elsewhere.items() if f"| {bug} | {reason} |" not in page] == []
    assert f"{len(framework.plants)} of {len(framework.plants)} in" in page


@pytest.mark.nightly
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_bugs_are_caught_in_a_framework_unless_a_reason_is_given(name: str) -> None:
    pytest.importorskip(name)
    found = list(sightings(framework_of(name)))
    assert [each for each in found if each.is_surprise] == []
    planted = [each for each in found if each.outcome != "elsewhere"]
    assert sum(each.outcome == "caught" for each in planted) >= 0.9 * len(planted)


def test_text_that_a_function_no_longer_has_is_refused() -> None:
    function = function_at("rlcanary.reference.masks:completion_mask")
    with pytest.raises(UserError, match="0 times instead of once"):
        with_text(function, [("no such text", "another")])
    with pytest.raises(UserError, match="there is no"):
        function_at("rlcanary.reference.masks:no_such_function")


def test_planted_function_has_the_source_lines_of_its_original() -> None:
    function = function_at("rlcanary.reference.masks:completion_mask")
    assert with_text(function, []).co_firstlineno == function.__code__.co_firstlineno


def test_bug_that_is_missed_without_a_reason_or_caught_in_spite_of_one_is_a_surprise() -> None:
    assert Sighting("trl", "any", "missed").is_surprise
    assert Sighting("trl", "any", "caught", reason="known").is_surprise
    assert not Sighting("trl", "any", "missed", reason="known").is_surprise
    assert not Sighting("trl", "any", "elsewhere", reason="known").is_surprise


def test_adapter_without_planted_bugs_is_refused() -> None:
    done = CliRunner().invoke(bugs, ["--adapter", "reference"])
    assert isinstance(done.exception, UserError)
    assert "trl, verl, torchrl" in str(done.exception)
