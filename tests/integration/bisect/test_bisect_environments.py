"""Bisects over histories whose dependencies change, with environments that uv, pip and a user's command really build."""

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import pytest
from bisect_repositories import bisect, contents, found, git, make_history, refusal, started_search
from waiting import HANG_S, wait_for

pytestmark = pytest.mark.usefixtures("plain_git")

COMMITS = 24
USES = "python", "-c", "import app, toolib; assert app.works(toolib)"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "environments"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """toolib 1.0, 1.1 and 1.2, each knowing its version."""
    folder = tmp_path_factory.mktemp("wheels")
    for version in ("1.0", "1.1", "1.2"):
        about = f"toolib-{version}.dist-info"
        with zipfile.ZipFile(folder / f"toolib-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr("toolib.py", f"version = '{version}'\n")
            wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: toolib\nVersion: {version}\n")
            wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{about}/RECORD", "")
    return folder


def version_at(i: int) -> str:
    return "1.0" if i < 8 else "1.1" if i < 16 else "1.2"


def application(culprit: int) -> Callable[[int], str]:
    """A module that works with no toolib but the one of its own commit, and is broken from `culprit` on."""

    def text(i: int) -> str:
        needs = f"    assert toolib.version == '{version_at(i)}', toolib.version\n"
        return f"def works(toolib):\n{needs}    return {i} < {culprit}\n"

    return text


@pytest.fixture
def with_pip(tmp_path: Path, wheels: Path) -> Path:
    text = application(13)

    def files(i: int) -> Mapping[str, str]:
        wanted = f"--no-index\n--find-links {wheels}\ntoolib=={version_at(i)}\n"
        return {"src/app.py": text(i), "requirements.txt": wanted, "number": f"{i}\n"}

    return make_history(tmp_path / "a repo", COMMITS, files)


def built(result: subprocess.CompletedProcess[str]) -> int:
    words = result.stdout.split(" environments built")
    return int(words[0].split()[-1]) if len(words) > 1 else 0


def test_pip_environment_is_that_of_each_commit_and_shared_where_dependencies_are_the_same(
    with_pip: Path, cache: Path
) -> None:
    before = contents(with_pip)
    arguments = "--good", "c1", "--bad", f"c{COMMITS}", "--env-dir", str(cache), "--fresh", "--", *USES
    first = bisect(with_pip, *arguments)
    assert found(first) == "change 13 [wip]"
    assert "in this range (3 sets)" in first.stderr
    assert "untestable" not in first.stderr
    assert 2 <= built(first) <= 3
    again = bisect(with_pip, *arguments)
    assert found(again) == "change 13 [wip]"
    assert built(again) == 0
    assert contents(with_pip) == before


def test_uv_environment_is_that_of_each_commit(tmp_path: Path, wheels: Path, cache: Path) -> None:
    project = tmp_path / "lock"
    locks = {}
    text = application(18)
    for version in ("1.0", "1.1", "1.2"):
        project.mkdir(exist_ok=True)
        (project / "pyproject.toml").write_text(pyproject(wheels, version))
        subprocess.run(["uv", "lock", "--quiet"], cwd=project, check=True, timeout=HANG_S)
        locks[version] = (project / "uv.lock").read_text()

    def files(i: int) -> Mapping[str, str]:
        version = version_at(i)
        return {"src/app.py": text(i), "pyproject.toml": pyproject(wheels, version, i), "uv.lock": locks[version]}

    repository = make_history(tmp_path / "r", COMMITS, files)
    ends = "--good", "c1", "--bad", f"c{COMMITS}", "--env-dir", str(cache)
    plain = bisect(repository, *ends, "--jobs", "2", "--", *USES)
    assert found(plain) == "change 18 [wip]"
    assert "untestable" not in plain.stderr
    assert 2 <= built(plain) <= 3
    through_uv = bisect(repository, *ends, "--fresh", "--", "uv", "run", *USES)
    assert found(through_uv) == "change 18 [wip]"
    assert built(through_uv) == 0


def pyproject(wheels: Path, version: str, release: int = 0) -> str:
    return (
        f'[project]\nname = "app"\nversion = "0.{release}"\nrequires-python = ">=3.11"\n'
        f'dependencies = ["toolib=={version}"]\n'
        f'[tool.uv]\nno-index = true\nfind-links = ["{wheels}"]\n'
    )


def test_command_of_the_user_fills_the_environment(with_pip: Path, cache: Path) -> None:
    fill = "mkdir -p $RLCANARY_ENV/bin && cp requirements.txt $RLCANARY_ENV/"
    command = "sh", "-c", "cmp requirements.txt $RLCANARY_ENV/requirements.txt || exit 99; test $(cat number) -lt 13"
    ends = "--good", "c1", "--bad", f"c{COMMITS}"
    result = bisect(with_pip, *ends, "--env-dir", str(cache), "--env", fill, "--", *command)
    assert found(result) == "change 13 [wip]"
    assert "exit 99" not in result.stdout
    assert 2 <= built(result) <= 3


def test_program_that_only_the_built_environment_has_is_found(with_pip: Path, cache: Path) -> None:
    tool = "printf '#!/bin/sh\\ntest $(cat number) -lt 13\\n'"
    fill = f"mkdir -p $RLCANARY_ENV/bin && {tool} > $RLCANARY_ENV/bin/mytool && chmod +x $RLCANARY_ENV/bin/mytool"
    ends = "--good", "c1", "--bad", f"c{COMMITS}"
    result = bisect(with_pip, *ends, "--env-dir", str(cache), "--env", fill, "--", "mytool")
    assert found(result) == "change 13 [wip]"


def test_build_that_was_killed_half_way_is_never_used(with_pip: Path, cache: Path, tmp_path: Path) -> None:
    """The first build hangs after it has made the folder, and the driver is killed; the next start builds it anew."""
    gate, hang = tmp_path / "gate", ["sleep", f"83.{os.getpid()}"]

    def builders() -> list[psutil.Process]:
        return [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == hang]

    stop = f"{{ touch '{gate}'; exec {' '.join(hang)}; }}"
    fill = f"mkdir -p $RLCANARY_ENV/bin; test -e '{gate}' || {stop}; touch $RLCANARY_ENV/whole"
    command = "sh", "-c", "test -e $RLCANARY_ENV/whole || exit 99; test $(cat number) -lt 13"
    arguments = (
        *("--good", "c1", "--bad", f"c{COMMITS}", "--env-dir", str(cache), "--env", fill, "--"),
        *command,
    )
    with started_search(with_pip, *arguments) as search:
        wait_for(lambda: gate.exists() and builders())
        search.kill()
        search.communicate()
    (half,) = [path for path in cache.iterdir() if path.is_dir()]
    assert len(builders()) == 1
    result = bisect(with_pip, *arguments)
    assert found(result) == "change 13 [wip]"
    assert "exit 99" not in result.stdout
    assert not half.exists()
    assert builders() == []
    markers = [json.loads(path.read_text())["folder"] for path in cache.glob("*.json")]
    assert sorted(markers) == sorted(path.name for path in cache.iterdir() if path.is_dir())


def test_build_that_fails_makes_its_commits_untestable_and_is_tried_once(
    tmp_path: Path, wheels: Path, cache: Path
) -> None:
    def files(i: int) -> Mapping[str, str]:
        version = "9.9" if 9 <= i < 13 else version_at(i)
        return {"requirements.txt": f"--no-index\n--find-links {wheels}\ntoolib=={version}\n", "number": f"{i}\n"}

    repository = make_history(tmp_path / "r", COMMITS, files)
    counter = tmp_path / "builds"
    fill = (
        f"cat requirements.txt | tail -1 >> '{counter}'; ! grep -q ==9.9 requirements.txt && mkdir -p $RLCANARY_ENV/bin"
    )
    ends = "--good", "c1", "--bad", f"c{COMMITS}", "--env-dir", str(cache), "--env", fill
    result = bisect(repository, *ends, "--", "sh", "-c", "test $(cat number) -lt 15")
    assert found(result) == "change 15 [wip]"
    assert "not be built (exit 1" in result.stderr
    assert counter.read_text().count("9.9") == 1
    broken = bisect(repository, *ends[:4], "--env", "exit 3", "--env-dir", str(cache), "--", "true")
    assert "with --env none" in refusal(broken)


def test_program_that_the_environment_lacks_is_not_taken_from_the_users(with_pip: Path, cache: Path) -> None:
    """pytest is on the PATH, but with another Python's packages."""
    (with_pip / "test_app.py").write_text("def test_app():\n    pass\n")
    ends = "--good", "c1", "--bad", f"c{COMMITS}", "--env-dir", str(cache)
    refused = refusal(bisect(with_pip, *ends, "--env", "mkdir -p $RLCANARY_ENV/bin", "--", "pytest", "test_app.py"))
    assert "not in the environment" in refused


def test_dry_run_counts_the_builds_and_runs_nothing(with_pip: Path, cache: Path) -> None:
    result = bisect(with_pip, "--good", "c1", "--bad", f"c{COMMITS}", "--env-dir", str(cache), "--dry-run", "--", *USES)
    assert result.returncode == 0
    assert "23 commits to choose from" in result.stdout
    assert "of 3 sets of dependencies" in result.stdout
    assert not cache.exists()


def test_same_dependencies_everywhere_leave_the_users_environment_alone(tmp_path: Path, wheels: Path) -> None:
    repository = make_history(
        tmp_path / "r", 9, lambda i: {"pyproject.toml": pyproject(wheels, "1.0", i), "value": f"{i}\n"}
    )
    command = "sh", "-c", "test -z $RLCANARY_ENV && test $(cat value) -lt 5"
    result = bisect(repository, "--good", "c1", "--bad", "c9", "--", *command)
    assert found(result) == "change 5 [wip]"
    assert "the dependencies change" not in result.stderr


def test_project_without_a_lock_file_is_run_in_the_users_environment_and_that_is_said(
    tmp_path: Path, wheels: Path
) -> None:
    """What a pyproject.toml declares is seldom all that a command needs."""
    repository = make_history(
        tmp_path / "r", 9, lambda i: {"pyproject.toml": pyproject(wheels, "1.0" if i < 4 else "1.1"), "value": f"{i}\n"}
    )
    command = "sh", "-c", "test -z $RLCANARY_ENV && test $(cat value) -lt 5"
    result = bisect(repository, "--good", "c1", "--bad", "c9", "--", *command)
    assert found(result) == "change 5 [wip]"
    assert "there is no lock file" in result.stderr
    empty = "mkdir -p $RLCANARY_ENV/bin"
    asked = bisect(repository, "--good", "c1", "--bad", "c9", "--env", empty, "--deterministic", "--", *command)
    assert f"It ran in an environment built with {empty}: --env none uses yours" in refusal(asked)


def test_submodules_and_packages_of_the_repository_count_as_dependencies(tmp_path: Path) -> None:
    from rlcanary.bisect.runs.dependencies import dependency_keys
    from rlcanary.system.git import Repository

    def files(i: int) -> Mapping[str, str]:
        return {
            "pyproject.toml": f'[project]\nversion = "{i}"\n[tool.uv.sources]\nkit = {{path = "packages/kit"}}\n',
            "packages/kit/kit.py": "old\n" if i < 4 else "new\n",
            "train.py": f"{i}\n",
        }

    checkout = make_history(tmp_path / "r", 6, files)
    git(checkout, "update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},lib")
    git(checkout, "commit", "--quiet", "-m", "a submodule")
    git(checkout, "tag", "c7")
    repository = Repository.around(checkout)
    commits = repository.commits("--reverse", "c1..c7")
    keys = list(dependency_keys(repository, repository.commit("c1"), commits, {"python": sys.version}).values())
    assert keys[0] == keys[2] != keys[3] == keys[5] != keys[6]
    other = dependency_keys(repository, repository.commit("c1"), commits, {"python": "2.7"})
    assert not set(keys) & set(other.values())
