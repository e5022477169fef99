"""Fixtures of the tests that bisect real repositories."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bisect_repositories import make_history, numbered
from slurm_cluster import missing_programs, slurm_cluster


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


@pytest.fixture(scope="session")
def cluster() -> Iterator[dict[str, str]]:
    """A Slurm of our own, by the variables that lead to it."""
    if missing := missing_programs():
        pytest.skip(f"Slurm is not installed ({', '.join(missing)}): apt-get install slurm-wlm munge")
    if os.geteuid():
        pytest.skip("a Slurm in a folder of its own has to be started as root")
    with slurm_cluster() as environment:
        yield {name: environment[name] for name in ("SLURM_CONF", "PATH")}


@pytest.fixture
def slurm(cluster: dict[str, str], plain_git: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """`sbatch` and its sisters speak to the cluster."""
    monkeypatch.setenv("SLURM_CONF", cluster["SLURM_CONF"])
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}{os.pathsep}/usr/sbin")
