"""Older releases, installed beside the environment, fail exactly where their files of known failures say.

`make releases` runs this file. A release takes part by its file `tests/expected/FRAMEWORK-VERSION.txt`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

KNOWN = sorted((Path(__file__).parents[1] / "expected").glob("*-*.txt"))
AT_LEAST = {"trl": 100, "verl": 100, "torchrl": 90}


@pytest.mark.nightly
@pytest.mark.parametrize("known", KNOWN, ids=lambda path: path.stem)
def test_older_release_fails_exactly_where_it_is_known_to(known: Path, tmp_path: Path) -> None:
    framework, _, version = known.stem.partition("-")
    pytest.importorskip(framework)  # what it depends on is that of the latest release
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", "release", f"{framework}=={version}"]
    subprocess.run([sys.executable, *install], cwd=tmp_path, check=True)
    check = ["-m", "rlcanary", "check", framework, f"--expected={known}", "--json=out.json", "--timeout=600"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "release")}
    done = subprocess.run(
        [sys.executable, *check], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["versions"][framework] == version
    assert document["coverage"]["ran"] >= AT_LEAST[framework]
