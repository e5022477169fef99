"""Each example does what its README says, line by line, and its checks see the mistake that the README plants.

Those of TRL and verl are in test_released_frameworks.py, which has the frameworks imported; that of the audit in
test_live_example.py.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from readme_commands import EXAMPLES, commands, play, typed

from rlcanary.scaffold.plan import Plan
from rlcanary.scaffold.survey import survey


def test_every_folder_has_a_readme_of_a_page() -> None:
    for folder in (each for each in EXAMPLES.iterdir() if each.is_dir() and not each.name.startswith(".")):
        text = (folder / "README.md").read_text()
        assert len(text.splitlines()) <= 45, folder.name
        assert commands(text), folder.name


def test_checks_of_a_single_file_trainer_see_a_mask_without_the_end(tmp_path: Path) -> None:
    edit = ("train.py", "return is_eos_BT.cumsum(dim=1) - is_eos_BT == 0", "return is_eos_BT.cumsum(dim=1) == 0")
    trained, checked, broken = play("single_file_trainer", tmp_path / "example", edit)
    assert trained.splitlines()[-1].startswith("step 20 ")
    assert "44 passed" in checked
    assert "FAIL mask." in broken


def test_teams_ci_is_green_until_its_loss_averages_over_padding(tmp_path: Path) -> None:
    folder = tmp_path / "example"
    edit = ("teamrl/losses.py", "mask.sum().clamp(min=1)", "mask.numel()")
    known, tests, broken = play("team_ci", folder, edit)
    assert "1 failed as expected" in known
    assert "xfailed" in tests
    assert "::error file=tests/canary.py,line=" in broken
    assert (folder / "summary.md").read_text().startswith("## ❌")
    assert ElementTree.parse(folder / "results.xml").getroot().find("testsuite").get("failures") != "0"


def test_team_has_what_init_writes(tmp_path: Path) -> None:
    """The workflow and the hook of the example are those that a reader gets, for whom it is a repository of its own."""
    folder = tmp_path / "team_ci"
    shutil.copytree(EXAMPLES / "team_ci", folder)
    written = {file.path: file.text for file in Plan(survey(folder), None).files()}
    assert set(written.values()) == {None}, "the example lacks a file that init writes"
    workflow = yaml.safe_load((folder / ".github/workflows/rlcanary.yml").read_text())
    command = workflow["jobs"]["check"]["steps"][-1]["run"]
    assert command.startswith(Plan(survey(folder), None).command)


def test_commands_of_the_page_on_ci_work_in_the_teams_repository(tmp_path: Path) -> None:
    folder = tmp_path / "example"
    shutil.copytree(EXAMPLES / "team_ci", folder)
    page = (EXAMPLES.parent / "docs/ci.md").read_text()
    before = (folder / "tests/canary_expected.txt").read_text()
    played = {command for command, _ in commands((folder / "README.md").read_text())}
    for command, _ in commands(page):
        if command in played or command.startswith("pytest"):  # the example's own test has them
            continue
        expects_red = command == "rlcanary check tests/canary.py"
        done = typed(command, folder)
        assert done.returncode == int(expects_red), f"{command}\n{done.stdout}{done.stderr}"
    assert (folder / "tests/canary_expected.txt").read_text() == before
    files = {f"{name}": (folder / name).stat().st_size for name in ("results.json", "results.xml", "results.sarif")}
    assert min(files.values()) > 0
    assert json.loads((folder / "results.json").read_text())["adapter"] == "teamrl"


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
def test_rows_are_read_as_they_were_published_and_in_the_order_of_a_file(tmp_path: Path) -> None:
    edit = ("easy_first.txt", "gsm8k.jsonl/3", "gsm8k.jsonl/4")
    *_, ordered, prefixed, _ = played = play("published_rows", tmp_path / "example", edit)
    assert ordered.split() == ["gsm8k.jsonl/3", "gsm8k.jsonl/1", "gsm8k.jsonl/2"]
    assert len(played) == 6
    assert "4 used" in prefixed


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
def test_nightly_is_green_until_its_advantages_are_negated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On this machine; tests/integration/launch has a real Slurm."""
    for name, value in {"EXECUTOR": "local", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}.items():
        monkeypatch.setenv(name, value)
    edit = ("train.py", "return [reward - mean for reward in rewards]", "return [-reward for reward in rewards]")

    def add_to_git(folder: Path) -> None:
        for command in (("init", "-q"), ("add", ".")):
            subprocess.run(["git", *command], cwd=folder, check=True)

    planned, green, asked, red = play("slurm_nightlies", tmp_path / "example", edit, prepare=add_to_git)
    assert "GPU-hours: 0.00" in planned
    assert "good" in green
    assert "bandit" in asked
    assert "a metric check fails" in red
