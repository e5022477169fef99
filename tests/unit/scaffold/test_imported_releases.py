"""The releases that the checks ran with, as a requirements file."""

import importlib
import json
import sys
from importlib.metadata import Distribution, version
from pathlib import Path

import pytest
import torch

from rlcanary.scaffold.releases import imported_requirements, installed, requirement


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        (None, "mine==1.2"),
        (
            {"url": "https://example.org/mine", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "mine @ git+https://example.org/mine@abc",
        ),
        ({"url": "file:///team/parts/mine", "dir_info": {"editable": True}}, "-e ./parts/mine"),
        ({"url": "file:///team", "dir_info": {"editable": True}}, ""),
        ({"url": "file:///elsewhere/mine", "dir_info": {}}, ""),
        ({"url": "file:///elsewhere/mine", "vcs_info": {"vcs": "git", "commit_id": "abc"}}, ""),
    ],
    ids=[
        "release",
        "commit",
        "folder of the repository",
        "the repository",
        "folder elsewhere",
        "git repository elsewhere",
    ],
)
def test_requirement_installs_the_same_elsewhere(
    tmp_path: Path, origin: dict[str, object] | None, expected: str
) -> None:
    folder = tmp_path / "mine-1.2.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.2+cpu\n")
    if origin is not None:
        (folder / "direct_url.json").write_text(json.dumps(origin))
    assert requirement(Distribution.at(folder), Path("/team")) == expected


def test_what_is_imported_is_named_once_without_rlcanary(tmp_path: Path) -> None:
    lines = imported_requirements(tmp_path)
    assert f"torch=={version('torch').partition('+')[0]}" in lines
    assert torch.__version__.startswith(version("torch"))
    assert len(set(lines)) == len(lines)
    assert not [line for line in lines if line.startswith("rlcanary")]


def test_the_repository_is_known_by_what_pip_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An editable install leaves an `egg-info` in the repository, which is first on the path and does not say where from."""
    (tmp_path / "mine.egg-info").mkdir()
    (tmp_path / "mine.egg-info/PKG-INFO").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.2\n")
    written = tmp_path / "site/mine-1.2.dist-info"
    written.mkdir(parents=True)
    (written / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.2\n")
    (written / "direct_url.json").write_text(json.dumps({"url": tmp_path.as_uri(), "dir_info": {"editable": True}}))
    monkeypatch.syspath_prepend(written.parent)
    monkeypatch.syspath_prepend(tmp_path)
    assert requirement(installed("mine"), tmp_path) == ""


def test_a_release_beside_the_repository_is_not_what_was_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `verl==0.9` among its requirements CI could not install verl's own repository."""
    site, repository = tmp_path / "site", tmp_path / "repository"
    for folder in (site, repository):
        (folder / "shadowed_here").mkdir(parents=True)
        (folder / "shadowed_here/__init__.py").write_text("")
    info = site / "shadowed_here-0.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shadowed-here\nVersion: 0.9\n")
    (info / "top_level.txt").write_text("shadowed_here\n")
    monkeypatch.syspath_prepend(site)
    importlib.import_module("shadowed_here")
    assert "shadowed-here==0.9" in imported_requirements(repository)
    monkeypatch.delitem(sys.modules, "shadowed_here")
    monkeypatch.syspath_prepend(repository)
    importlib.import_module("shadowed_here")
    assert not [line for line in imported_requirements(repository) if line.startswith("shadowed-here")]
    monkeypatch.delitem(sys.modules, "shadowed_here")
