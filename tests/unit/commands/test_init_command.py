"""`rlcanary init`: one command, and CI is green with an honest list of what fails."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from command_line import rlcanary

from rlcanary.checks import Result
from rlcanary.commands.checks.init import _counted

WORKFLOW = ".github/workflows/rlcanary.yml"


def contents(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): path.read_text()
        for path in root.rglob("*")
        if path.suffix != ".pyc" and path.is_file()
    }


def uses(root: Path, package: str) -> Path:
    (root / "pyproject.toml").write_text(f'[project]\nname = "mine"\nversion = "1"\ndependencies = ["{package}"]\n')
    return root


def test_repository_of_no_framework_gets_a_first_adapter(tmp_path: Path) -> None:
    (tmp_path / "grpo.py").write_text("def group_advantages(returns): ...\n")
    done = rlcanary("init", "--only", "advantage,mask,loss", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "group_advantages" in done.stdout
    adapter = (tmp_path / "tests/canary.py").read_text()
    assert "class Canary(Adapter)" in adapter
    assert "    advantages: group_advantages (grpo.py:1)\n" in adapter
    assert re.search(r"^torch==[\d.]+$", (tmp_path / "tests/canary_requirements.txt").read_text(), re.MULTILINE)
    assert "-r tests/canary_requirements.txt" in (tmp_path / WORKFLOW).read_text()
    command = "check tests/canary.py --only advantage,mask,loss --expected tests/canary_expected.txt"
    assert command in (tmp_path / WORKFLOW).read_text()
    assert rlcanary(*command.split(), cwd=tmp_path).returncode == 0


def test_exceptions_that_hide_what_they_should_compare_are_told(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    adapter = """
from rlcanary import Adapter


class Canary(Adapter):
    def advantages(self, rewards, group_ids):
        import kernels_that_are_missing
"""
    (tmp_path / "tests/canary.py").write_text(adapter)
    done = rlcanary("init", "--only", "advantage", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\d checks: ModuleNotFoundError: No module named 'kernels_that_are_missing'\n", done.stdout)
    assert "delete tests/canary_expected.txt and run rlcanary init again" in done.stdout


def test_a_check_that_ran_and_compared_nothing_is_counted_among_those_that_ran() -> None:
    statuses = ("pass", "not-compared", "not-provided", "adapter-error")
    results = [Result("mask.any", "mask", status, "", "", 0.0) for status in statuses]
    assert _counted(results) == "0 of 2 checks that ran fail today"


def test_nothing_that_is_there_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/canary.py").write_text((Path(__file__).parents[2] / "support/plain_loss.py").read_text())
    own = {
        "pytest.ini": "[pytest]\ntestpaths = tests\n",
        ".pre-commit-config.yaml": "repos: []\n",
        "tests/canary_expected.txt": "",
    }
    for name, text in own.items():
        (tmp_path / name).write_text(text)
    before = contents(tmp_path)
    done = rlcanary("init", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    after = contents(tmp_path)
    assert {name: after[name] for name in before} == before
    assert after.keys() - before.keys() == {WORKFLOW}
    assert "canary_expected = tests/canary_expected.txt" in done.stdout
    assert "- id: rlcanary" in done.stdout
    again = rlcanary("init", cwd=tmp_path)
    assert (again.returncode, contents(tmp_path)) == (0, after)


def test_pyproject_keeps_every_line_and_gets_the_setting_once(tmp_path: Path) -> None:
    text = uses(tmp_path, "numpy").joinpath("pyproject.toml").read_text()
    for _ in range(2):
        assert rlcanary("init", "--only", "mask", cwd=tmp_path).returncode == 0
        setting = '\n[tool.pytest.ini_options]\ncanary_expected = ["tests/canary_expected.txt"]\n'
        assert (tmp_path / "pyproject.toml").read_text() == text + setting


def test_pyproject_keeps_its_line_ends_and_stays_a_link(tmp_path: Path) -> None:
    text = '[project]\r\nname = "mine"\r\nversion = "1"\r\n'
    (tmp_path / "shared.toml").write_bytes(text.encode())
    (tmp_path / "pyproject.toml").symlink_to("shared.toml")
    assert rlcanary("init", "--only", "mask", cwd=tmp_path).returncode == 0
    setting = '\r\n[tool.pytest.ini_options]\r\ncanary_expected = ["tests/canary_expected.txt"]\r\n'
    assert (tmp_path / "shared.toml").read_bytes().decode() == text + setting
    assert (tmp_path / "pyproject.toml").is_symlink()


def test_dry_run_names_the_files_and_writes_none(tmp_path: Path) -> None:
    done = rlcanary("init", "--dry-run", cwd=uses(tmp_path, "trl"))
    assert done.returncode == 0
    assert [name in done.stdout for name in ("tests/canary.py", WORKFLOW, "tests/canary_expected.txt")] == [True] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["pyproject.toml"]


def test_framework_that_is_not_installed_is_said_and_leaves_the_rest(tmp_path: Path) -> None:
    done = rlcanary("init", cwd=uses(tmp_path, "openrlhf"))
    assert done.returncode == 2
    assert "openrlhf is not installed" in done.stderr
    assert "run rlcanary init again" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert contents(tmp_path).keys() == {"pyproject.toml", "tests/canary.py"}
    assert "canary_expected" not in (tmp_path / "pyproject.toml").read_text()
    assert WORKFLOW not in done.stdout


def test_interrupted_init_leaves_no_setting_that_names_a_list_which_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    adapter = """
from rlcanary import Adapter


class Canary(Adapter):
    def advantages(self, rewards, group_ids):
        raise KeyboardInterrupt
"""
    (tmp_path / "tests/canary.py").write_text(adapter)
    before = contents(tmp_path)
    done = rlcanary("init", "--only", "advantage", cwd=tmp_path)
    assert done.returncode not in (0, 2)
    assert "wrote" not in done.stdout
    assert contents(tmp_path) == before


def test_folder_that_cannot_be_made_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / ".github").write_text("")
    done = rlcanary("init", cwd=tmp_path)
    assert done.returncode == 2
    assert ".github" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == [".github"]


def test_trainer_of_ones_own_is_the_start_beside_an_import_of_a_framework(tmp_path: Path) -> None:
    (tmp_path / "grpo.py").write_text("class GRPO:\n    def compute_loss(self): ...\n")
    (tmp_path / "finetune.py").write_text("from trl import SFTTrainer\n")
    done = rlcanary("init", "--dry-run", cwd=tmp_path)
    assert "GRPO.compute_loss" in done.stdout
    assert "--framework trl starts from its adapter" in done.stdout
    assert "textbook code" in done.stdout
    (tmp_path / "requirements.txt").write_text("trl\n")
    assert "its adapter is the start" in rlcanary("init", "--dry-run", cwd=tmp_path).stdout


def test_subfolder_of_a_repository_has_its_workflow_and_hook_where_they_are_read(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    folder = tmp_path / "libs/my trainer"
    folder.mkdir(parents=True)
    done = rlcanary("init", "--only", "mask", cwd=folder)
    assert done.returncode == 0, done.stderr
    workflow = yaml.safe_load((tmp_path / ".github/workflows/rlcanary-libs-my trainer.yml").read_text())
    job = workflow["jobs"]["check"]
    assert job["defaults"] == {"run": {"working-directory": "libs/my trainer"}}
    hook = yaml.safe_load((tmp_path / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"][0]
    assert re.search(hook["files"], "libs/my trainer/grpo.py")
    assert not re.search(hook["files"], "libs/other/grpo.py")
    assert "canary_expected = libs/my trainer/tests/canary_expected.txt" in done.stdout
    assert not (folder / ".github").exists()
    assert not (folder / ".pre-commit-config.yaml").exists()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for command in (job["steps"][-1]["run"].partition("--github")[0], hook["entry"]):
        where = folder if command.startswith("rlcanary") else tmp_path
        ran = subprocess.run(shlex.split(command), cwd=where, env=os.environ | {"PATH": path}, capture_output=True)
        assert ran.returncode == 0, ran.stderr


def test_the_list_has_all_failures_for_pytest_whatever_ci_runs(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    adapter = """
from rlcanary import Adapter


class Canary(Adapter):
    def advantages(self, rewards, group_ids):
        return rewards

    def keep_group(self, rewards):
        return True
"""
    (tmp_path / "tests/canary.py").write_text(adapter)
    done = rlcanary("init", "--only", "advantage", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    known = (tmp_path / "tests/canary_expected.txt").read_text()
    assert "advantage.declared_formula  #" in known
    assert "filter.constant_group_is_dropped  #" in known
    assert "--only advantage --expected" in (tmp_path / WORKFLOW).read_text()


@pytest.mark.parametrize("options", [(), ("--dry-run",)])
def test_misspelt_choice_is_refused_before_anything_is_written(tmp_path: Path, options: tuple[str, ...]) -> None:
    done = rlcanary("init", "--only", "loos", *options, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("rlcanary: no check starts with loos")
    assert contents(tmp_path) == {}
