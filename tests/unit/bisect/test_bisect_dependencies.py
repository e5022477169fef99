"""What a pyproject.toml of some old commit may hold, however odd, does not end a search."""

from pathlib import Path

import pytest

from rlcanary.bisect.runs.dependencies import source_folders
from rlcanary.bisect.runs.environments import Pip
from rlcanary.bisect.runs.worktree import Untestable


@pytest.mark.parametrize("text", [b"[project\n", b"name = '\xff'\n"], ids=["not TOML", "not UTF-8"])
def test_commit_with_a_broken_pyproject_is_untestable(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "pyproject.toml").write_bytes(text)
    with pytest.raises(Untestable, match=r"pyproject\.toml cannot be read: "):
        Pip("python3").commands(tmp_path, tmp_path / "environment")
    assert source_folders(tmp_path) == [tmp_path]


@pytest.mark.parametrize(
    "text",
    [
        "project = 1\ndependency-groups = 1\ntool = 1\n",
        "[project]\ndependencies = 1\noptional-dependencies = 1\n[tool]\nsetuptools = 1\n",
        "[project.optional-dependencies]\ntest = 1\n[tool.setuptools]\npackages = 1\npackage-dir = 1\n",
        "[tool.setuptools.packages]\nfind = 1\n[tool.setuptools.package-dir]\na = 1\n",
    ],
)
def test_pyproject_with_other_values_than_expected_asks_for_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    assert len(Pip("python3").commands(tmp_path, tmp_path / "environment")) == 1
    assert source_folders(tmp_path) == [tmp_path]
