"""Snapshots that cannot be taken."""

import subprocess
from pathlib import Path

from command_line import rlcanary


def test_a_snapshot_without_a_file_is_refused(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    done = rlcanary("code-snapshot", cwd=tmp_path)
    assert done.returncode == 2
    assert "git tracks no file" in done.stderr
    assert not (tmp_path / "code_snapshots").exists()


def test_a_snapshot_into_a_file_is_refused(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / "file").write_text("x")
    subprocess.run(["git", "add", "file"], cwd=tmp_path, check=True)
    done = rlcanary("code-snapshot", "--folder", "file", cwd=tmp_path)
    assert done.returncode == 2
    assert "cannot make the folder" in done.stderr
