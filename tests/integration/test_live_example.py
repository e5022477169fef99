"""The example of the audit: silent as it is, and from a broken loss to a finding, a bundle and the commit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from bisect_repositories import DRIVER, found, git, make_history
from waiting import HANG_S

EXAMPLE = Path(__file__).parents[2] / "examples/live_audit"
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


def test_a_finding_of_a_run_leads_to_the_commit(tmp_path: Path) -> None:
    repository = make_history(tmp_path / "repository", 12, lambda number: {**files(number >= 8), "n": f"{number}\n"})
    (finding,) = train(repository, tmp_path / "run")
    assert finding in " ".join((EXAMPLE / "README.md").read_text().split())
    (bundle,) = (tmp_path / "run/canary").iterdir()
    result = subprocess.run(
        [DRIVER, "rlcanary", "replay", bundle, "--adapter", "canary"],
        cwd=repository,
        env=os.environ | {"GOOD": "c1", "BAD": "c12", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert found(result) == "change 8 [wip]"
    assert f"{git(repository, 'rev-parse', 'c8')} is the first bad commit" in result.stdout
