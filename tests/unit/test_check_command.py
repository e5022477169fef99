"""`rlcanary check` as it is typed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

WRONG_MEAN = """
import torch
from rlcanary.adapters import Adapter

class WrongMean(Adapter):
    name = "wrong-mean"

    def advantages(self, rewards, group_ids):
        return (rewards - rewards.mean()) / (rewards.std() + 1e-6)

    def keep_group(self, rewards):
        return len(rewards) > 0
"""


def rlcanary(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rlcanary", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def test_reference_passes_every_check(tmp_path: Path) -> None:
    done = rlcanary("check", "reference", "--json", "out.json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["adapter"] == "reference"
    assert {item["status"] for item in document["checks"]} == {"pass"}
    assert len(document["checks"]) >= 12


def test_failure_shows_counterexample_and_exits_with_1(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(WRONG_MEAN)
    done = rlcanary("check", "mine", "--json", "out.json", cwd=tmp_path)
    assert done.returncode == 1
    assert "FAIL advantage.groups_are_separate" in done.stdout
    assert "not provided" in done.stdout
    items = {item["id"]: item for item in json.loads((tmp_path / "out.json").read_text())["checks"]}
    assert set(items["mask.pad_id_zero"]) == {"id", "area", "status", "message", "snippet", "seconds"}
    assert items["mask.pad_id_zero"]["status"] == "not-provided"
    failed = items["advantage.groups_are_separate"]
    assert failed["area"] == "advantage"
    done = subprocess.run([sys.executable, "-c", failed["snippet"]], cwd=tmp_path, capture_output=True, text=True)
    assert "AssertionError" in done.stderr


def test_exception_in_the_adapter_is_an_error_and_the_rest_runs(tmp_path: Path) -> None:
    broken = WRONG_MEAN.replace("rewards - rewards.mean()", "rewards - nothing")
    (tmp_path / "mine.py").write_text(broken)
    done = rlcanary("check", "mine.py", "--only", "advantage.", "--json", "out.json", cwd=tmp_path)
    assert done.returncode == 1
    checks = json.loads((tmp_path / "out.json").read_text())["checks"]
    assert {item["status"] for item in checks} == {"error"}
    assert "NameError" in checks[0]["message"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["check"], "Missing argument"),
        (["check", "nothing_like_it"], "no adapter 'nothing_like_it'"),
        (["check", "reference", "--only", "loos"], "no check starts with loos"),
        (["check", "reference", "--json", "no/such/folder/out.json"], "cannot write"),
        (["chek", "reference"], "No such command"),
    ],
)
def test_mistake_is_one_line_on_stderr_and_exit_2(arguments: list[str], told: str, tmp_path: Path) -> None:
    done = rlcanary(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert told in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []
