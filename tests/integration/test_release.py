"""The distributions hold every file and right metadata, and their version is that of the git tag.

`make release` installs them as well, into bare environments of each Python, and plays the demo from the wheel.
"""

import importlib.util
import re
import runpy
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from packaging.version import Version

ROOT = Path(__file__).parents[2]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


release = load(ROOT / "tools/release.py")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return release.build(tmp_path_factory.mktemp("dist"))


def test_distributions_hold_every_file_and_right_metadata(built: tuple[Path, Path]) -> None:
    sdist, wheel = built
    release.check_contents(sdist, wheel)
    metadata = release.check_metadata(wheel)
    assert metadata.name == "rlcanary"
    assert metadata.requires_python is not None
    assert "3.11" in metadata.requires_python
    needed = [each.name for each in metadata.requires_dist or () if each.marker is None]
    assert not set(release.HEAVY) & set(needed)


def test_missing_file_and_one_too_many_are_noticed(built: tuple[Path, Path], tmp_path: Path) -> None:
    sdist, wheel = built
    for change, told in (("rlcanary/py.typed", "missing"), (None, "too many")):
        other = tmp_path / wheel.name
        with zipfile.ZipFile(wheel) as before, zipfile.ZipFile(other, "w") as after:
            for name in before.namelist():
                if name != change:
                    after.writestr(name, before.read(name))
            if change is None:
                after.writestr("rlcanary/left_over.py", "")
        with pytest.raises(release.Broken, match=told):
            release.check_contents(sdist, other)


@pytest.fixture
def tagged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], str]:
    """Commit once more in a repository with our setup.py, with a tag or without one -> the version there."""
    monkeypatch.delenv("RLCANARY_VERSION", raising=False)
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    shutil.copy(ROOT / "setup.py", tmp_path)
    git = ("git", "-C", str(tmp_path), "-c", "user.name=Nobody", "-c", "user.email=nobody@example.org")
    subprocess.run([*git, "init", "-q"], check=True)

    def commit(tag: str | None) -> str:
        subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "change"], check=True)
        if tag:
            subprocess.run([*git, "tag", tag], check=True)
        version: str = runpy.run_path(str(tmp_path / "setup.py"))["version"]()
        assert str(Version(version)) == version
        return version

    return commit


def test_version_is_that_of_the_tag(tagged: Callable[[str | None], str]) -> None:
    before = tagged(None)
    assert re.fullmatch(r"0\.1\.0\.dev1\+g\w+", before)
    assert tagged("v0.1.0") == "0.1.0"
    after = tagged(None)
    assert re.fullmatch(r"0\.1\.1\.dev1\+g\w+", after)
    assert tagged("v0.2.0rc1") == "0.2.0rc1"
    candidate = tagged(None)
    assert re.fullmatch(r"0\.2\.0rc2\.dev1\+g\w+", candidate)
    versions = [before, "0.1.0", after, "0.2.0rc1", candidate, tagged("v0.2.0")]
    assert sorted(versions, key=Version) == versions


def test_source_distribution_says_its_version_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLCANARY_VERSION", raising=False)
    shutil.copy(ROOT / "setup.py", tmp_path)
    version = runpy.run_path(str(tmp_path / "setup.py"))["version"]
    assert version() == "0+unknown"
    (tmp_path / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: rlcanary\nVersion: 0.3.1\n")
    assert version() == "0.3.1"
    monkeypatch.setenv("RLCANARY_VERSION", "0.4.0")
    assert version() == "0.4.0"
