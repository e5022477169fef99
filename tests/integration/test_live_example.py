"""The example of the audit: silent as it is, and from a broken loss to a finding, a bundle and the commit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from bisect_repositories import DRIVER, found, git, make_history
from readme_commands import commands, typed
from waiting import HANG_S

EXAMPLE = Path(__file__).parents[2] / "examples/live_audit"
PAGE = Path(__file__).parents[2] / "docs/live.md"
RIGHT, WRONG = "mask.sum()", "mask.numel()"

pytestmark = pytest.mark.usefixtures("plain_git")


def files(is_wrong: bool) -> dict[str, str]:
    texts = {path.name: path.read_text() for path in EXAMPLE.glob("*.py")}
    assert RIGHT in texts["loss.py"]
    return {**texts, "loss.py": texts["loss.py"].replace(RIGHT, WRONG)} if is_wrong else texts


def train(folder: Path, run: Path) -> list[str]:
    """Train -> what is printed behind the last step."""
    command = [sys.executable, "train.py", "--folder", run]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    return lines[next(number for number, line in enumerate(lines) if line.startswith("step 11")) + 1 :]


def test_the_example_has_no_finding(tmp_path: Path) -> None:
    assert train(EXAMPLE, tmp_path) == []


def test_the_commands_of_the_page_lead_from_a_finding_to_the_commit(tmp_path: Path) -> None:
    tools = {"tools/bisect-run.sh": DRIVER.read_text()}
    moved = {"tests/.keep": "", "mylib/__init__.py": "", "mylib/canary.py": (EXAMPLE / "canary.py").read_text()}
    repository = make_history(
        tmp_path / "repository",
        12,
        lambda number: {**files(number >= 8), **tools, **moved, "n": f"{number}\n"},
        executable=list(tools),
    )
    git(repository, "tag", "v1.4", "c1")
    (finding,) = train(repository, tmp_path / "run")
    assert finding in " ".join((EXAMPLE / "README.md").read_text().split())
    (bundle,) = (tmp_path / "run/canary").iterdir()
    bundle_of_the_page = repository / "runs/mine/canary/update-40"
    bundle_of_the_page.parent.mkdir(parents=True)
    bundle.rename(bundle_of_the_page)
    replays = [command for command, _ in commands(PAGE.read_text()) if "rlcanary replay" in command]
    *judged, bisected = [typed(f"env OMP_NUM_THREADS=1 {command}", repository) for command in replays]
    assert [done.returncode for done in judged] == [1, 1, 1], [done.stderr for done in judged]
    assert found(bisected) == "change 8 [wip]"
    assert f"{git(repository, 'rev-parse', 'c8')} is the first bad commit" in bisected.stdout
    written = typed("env OMP_NUM_THREADS=1 python -m pytest tests/test_update_40.py", repository)
    assert written.returncode == 1, "the test that was written does not see the mistake"
