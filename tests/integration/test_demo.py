"""The demo: its repository is the same everywhere, its own tests never notice, and the bisect names the planted commit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).resolve().parents[2] / "tools" / "demo"

PLANTED_SUBJECT = "Accept strings for scale_rewards"


def python(*arguments: object, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    return subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=cwd, env=environment, capture_output=True, text=True
    )


def git(repository: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def build(path: Path) -> Path:
    done = python(DEMO / "history.py", "--dir", path)
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    return build(tmp_path_factory.mktemp("demo") / "tinygrpo")


@pytest.fixture(scope="module")
def planted(repository):
    return git(repository, "log", "--format=%H", f"--grep=^{PLANTED_SUBJECT}$")


def test_the_history_has_the_same_hashes_each_time(repository, tmp_path):
    assert git(build(tmp_path / "again"), "rev-parse", "HEAD") == git(repository, "rev-parse", "HEAD")


def test_the_planted_commit_is_one_of_forty(repository, planted):
    commits = git(repository, "rev-list", "--reverse", "HEAD").split()
    assert len(commits) == 40
    assert 15 < commits.index(planted) < 30


def test_an_existing_folder_is_not_built_over(tmp_path):
    done = python(DEMO / "history.py", "--dir", tmp_path)
    assert done.returncode == 2
    assert "exists already" in done.stderr


def test_every_check_passes_before_the_bug(repository, planted, tmp_path):
    checkout = tmp_path / "checkout"
    git(repository, "worktree", "add", "--quiet", "--detach", str(checkout), f"{planted}^")
    done = python("-m", "rlcanary", "check", DEMO / "canary.py", cwd=checkout)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """The demo, played with few nights: what it printed, what it wrote, and the folder it played in."""
    folder = tmp_path_factory.mktemp("play")
    temporary = folder / "tmp"
    temporary.mkdir()
    done = python(DEMO / "play.py", "--nights", 3, "--json", folder / "verdict.json", TMPDIR=str(temporary))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads((folder / "verdict.json").read_text()), temporary


def test_the_bisect_names_the_planted_commit(played, planted):
    _, verdict, _ = played
    assert verdict["named"] == verdict["planted"] == planted


def test_its_own_tests_are_green_before_and_after_the_bug(played, repository, planted):
    """A night whose tests are not green ends the demo."""
    _, verdict, _ = played
    nights = {commit for commit, _ in verdict["nights"]}
    after = set(git(repository, "rev-list", f"{planted}^..HEAD").split())
    assert nights & after
    assert nights - after


def test_only_checks_of_advantages_fail_with_the_bug(played):
    _, verdict, _ = played
    assert "advantage.declared_formula" in verdict["failed_checks"]
    assert all("advantage" in name for name in verdict["failed_checks"])


def test_the_nightly_metric_falls_with_the_bug(played):
    _, verdict, _ = played
    (_, first), *_, (_, last) = verdict["nights"]
    assert first > 3 * last


def test_the_audit_of_a_run_finds_the_bug_and_its_bundle_tells_the_commit_from_the_one_before(played):
    _, verdict, _ = played
    assert verdict["finding"].startswith("advantages: ")
    assert verdict["asked"] == [1, 0]


def test_output_that_no_terminal_reads_is_plain_text(played):
    output, _, _ = played
    assert "\x1b" not in output


def test_the_demo_leaves_nothing_behind(played):
    _, _, temporary = played
    assert list(temporary.iterdir()) == []
