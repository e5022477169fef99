"""`rlcanary check --matrix`: one codebase in several configurations, side by side."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import rlcanary

IGNORES_BATCH = """
from rlcanary import PRESETS, Adapter
from rlcanary.adapters.reference import ReferenceAdapter


class Mine(Adapter):
    name = "mine"
    conventions = PRESETS["grpo"]
    settable = ("advantage_scale",)

    def configurations(self):
        return {scale: self.configured(advantage_scale=scale) for scale in ("group", "none", "batch")}

    def advantages(self, rewards, group_ids):
        scale = "group" if self.conventions.advantage_scale == "batch" else self.conventions.advantage_scale
        return ReferenceAdapter(self.conventions.replace(advantage_scale=scale)).advantages(rewards, group_ids)
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(IGNORES_BATCH)
    return tmp_path


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")]


def test_setting_that_is_ignored_fails_in_its_configuration_alone(mine: Path) -> None:
    done = rlcanary("check", "mine.py", "--matrix", "--only", "advantage", "--json", "out.json", cwd=mine)
    assert done.returncode == 1
    table = [cells(line) for line in done.stdout.splitlines() if line[:1] in ("│", "┃")]
    assert table[:3] == [
        ["Check", "group", "none", "batch"],
        ["advantage.declared_formula", "pass", "pass", "FAIL"],
        ["advantage: 1 check", "pass", "-", "pass"],  # a scale of rewards shows nothing where nothing is scaled
    ]
    assert table[-1] == ["checks that failed", "0", "0", "1"]
    assert "FAIL advantage.declared_formula (wrong update) in batch" in done.stdout
    found = json.loads((mine / "out.json").read_text())["configurations"]
    assert {name: each["adapter"] for name, each in found.items()} == {
        name: f"mine[{name}]" for name in ("group", "none", "batch")
    }
    failed = [each for each in found["batch"]["checks"] if each["status"] == "fail"]
    program = subprocess.run(
        [sys.executable, "-c", failed[0]["snippet"]], cwd=mine, capture_output=True, text=True, check=False
    )
    assert "Finding: " in program.stderr, program.stderr


def test_configuration_is_checked_alone_by_its_name(mine: Path) -> None:
    codes = {
        name: rlcanary("check", f"mine.py[{name}]", "--only", "advantage.declared_formula", cwd=mine).returncode
        for name in ("group", "batch")
    }
    assert codes == {"group": 0, "batch": 1}
    unknown = rlcanary("check", "mine.py[token]", cwd=mine)
    assert (unknown.returncode, unknown.stderr) == (
        2,
        "rlcanary: mine.py has no configuration 'token': its configurations are group, none, batch\n",
    )


def test_method_with_a_misspelt_name_is_told_below_the_table(mine: Path) -> None:
    with (mine / "mine.py").open("a") as file:
        file.write("\n    def keep_groups(self, rewards):\n        return None\n")
    done = rlcanary("check", "mine.py", "--matrix", "--only", "advantage.declared_formula", cwd=mine)
    assert done.stderr == "rlcanary: keep_groups is no capability; did you mean keep_group?\n"


def test_matrix_without_configurations_and_with_files_of_one_is_refused(mine: Path) -> None:
    (mine / "plain.py").write_text(IGNORES_BATCH.replace("def configurations", "def others"))
    for arguments, told in (
        (("plain.py", "--matrix"), "plain.py lists no configurations"),
        (("mine.py", "--matrix", "--junit", "out.xml"), "--junit takes one configuration"),
    ):
        done = rlcanary("check", *arguments, cwd=mine)
        assert done.returncode == 2
        assert told in done.stderr
        assert len(done.stderr.splitlines()) == 1
