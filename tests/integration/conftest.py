"""Fixtures of the tests that bisect real repositories."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bisect_repositories import make_history, numbered


@pytest.fixture
def plain_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No configuration but ours, and a temporary folder that must be empty again at the end."""
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):
        monkeypatch.setenv(name, os.devnull)
    for name, value in {"NAME": "Nobody", "EMAIL": "nobody@example.org"}.items():
        monkeypatch.setenv(f"GIT_AUTHOR_{name}", value)
        monkeypatch.setenv(f"GIT_COMMITTER_{name}", value)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    yield
    left = [path.name for path in scratch.iterdir() if path.name.startswith("rlcanary")]
    assert left == [], "a bisect left temporary files behind"


@pytest.fixture
def history(plain_git: None, tmp_path: Path) -> Path:
    return make_history(tmp_path / "a repo", 100, numbered)
