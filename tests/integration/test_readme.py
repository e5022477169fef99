"""The README's commands and examples, as a reader would type them."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlcanary.bugs import all_bugs
from rlcanary.checks import all_checks

README = (Path(__file__).parents[2] / "README.md").read_text()
PYTHON_BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def block_with(text: str) -> str:
    (block,) = [block for block in PYTHON_BLOCKS if text in block]
    return block


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to type in, with the commands of this environment first on PATH."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{Path('/usr/bin')}:{Path('/bin')}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_adapter_example_fails_exactly_where_the_text_says(reader: Path) -> None:
    example = block_with("class MyCodebase(Adapter)")
    assert len(example.splitlines()) <= 30
    (reader / "canary.py").write_text(example)
    done = subprocess.run(["rlcanary", "check", "canary.py", "--json", "out.json"], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    checks = json.loads((reader / "out.json").read_text())["checks"]
    failed = {item["id"] for item in checks if item["status"] in ("fail", "error")}
    told = README.split("This textbook GRPO fails")[1].split("\n\n")[0]
    assert failed == set(re.findall(r"`([a-z]+\.[a-z_]+)`", told))


def test_adapter_example_runs_under_pytest(reader: Path) -> None:
    (reader / "canary.py").write_text(block_with("class MyCodebase(Adapter)"))
    done = subprocess.run(["pytest", "--canary", "canary.py", "-q", "-k", "loss"], capture_output=True, text=True)
    assert "FAILED canary[my-codebase]::loss.masked_positions" in done.stdout


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
def test_tracker_example_and_its_one_liners(reader: Path) -> None:
    (reader / "tests/unit").mkdir(parents=True)
    (reader / "tests/unit/test_math.py").write_text(block_with("def test_exponentiate"))
    subprocess.run(["pytest", "-q"], check=True, capture_output=True)
    (one_liner,) = re.findall(r"^jq .*$", README, re.MULTILINE)
    row = subprocess.run(["bash", "-c", one_liner], capture_output=True, text=True, check=True).stdout
    assert row.rstrip().endswith("16")
    (trend,) = re.findall(r"^rlcanary trend test_math.*$", README, re.MULTILINE)
    assert "16" in subprocess.run(["bash", "-c", trend], capture_output=True, text=True, check=True).stdout


def test_readme_counts_what_is_there() -> None:
    assert f"{len(all_checks())} properties" in README
    assert f"{len(all_bugs())} silent bugs" in README


def test_every_page_that_the_readme_names_exists() -> None:
    root = Path(__file__).parents[2]
    for page in re.findall(r"\]\(([^)]+)\)", README):
        assert (root / page).is_file(), page
