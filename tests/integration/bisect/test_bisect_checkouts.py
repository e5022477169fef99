"""Commits that git cannot check out, and worktrees that vanish."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from bisect_repositories import BUG, bisect, contents, counting, found, git, make_history, numbered, refusal, values
from waiting import HANG_S

pytestmark = pytest.mark.usefixtures("plain_git")

ENDS = "--deterministic", "--good", "c1", "--bad", "c100"


def untested(stderr: str) -> set[int]:
    """The numbers of the commits that were untestable, from the lines of the runs."""
    return {int(number) for number in re.findall(r"untestable .* change (\d+) ", stderr)}


def break_blob(repository: Path, commit: str, path: str) -> None:
    """Lose the content of one file, as a clone that is not whole has."""
    blob = git(repository, "rev-parse", f"{commit}:{path}")
    pack = next((repository / ".git" / "objects" / "pack").glob("*.pack"), None)
    if pack is not None:
        moved = repository / "moved.pack"
        pack.rename(moved)
        for left in (repository / ".git" / "objects" / "pack").iterdir():
            left.unlink()
        os.system(f"cd '{repository}' && git unpack-objects -q < moved.pack")
        moved.unlink()
    (repository / ".git" / "objects" / blob[:2] / blob[2:]).unlink()


@pytest.fixture
def with_filter(tmp_path: Path) -> Path:
    """Commits 45 to 55 hold a file of a filter that fails, as LFS does where its server is gone."""

    def files(i: int) -> dict[str, str]:
        broken = {".gitattributes": "*.bin filter=large\n", "w.bin": f"{i}\n"} if 45 <= i <= 55 else {}
        return numbered(i) | broken | {"a new file": "x\n"}

    repository = make_history(tmp_path / "r", 100, files)
    git(repository, "config", "filter.large.smudge", "false")
    git(repository, "config", "filter.large.required", "true")
    return repository


def test_commit_whose_filter_fails_is_untestable_with_gits_reason(with_filter: Path, tmp_path: Path) -> None:
    result = bisect(with_filter, *ENDS, "--", *BUG)
    assert found(result) == "change 63 [wip]"
    assert "w.bin: smudge filter large" in result.stderr
    assert untested(result.stderr) <= set(range(45, 56))
    assert len(git(with_filter, "worktree", "list").splitlines()) == 1


def test_commit_with_a_missing_blob_is_untestable_and_the_search_goes_on_after_a_stop(tmp_path: Path) -> None:
    repository = make_history(tmp_path / "r", 100, numbered)
    break_blob(repository, "c50", "value")
    counter = tmp_path / "runs"
    command = counting(counter, "test $(cat value) -lt 63")
    first = bisect(repository, *ENDS, "--budget-runs", "4", "--", *command)
    assert first.returncode == 1
    assert untested(first.stderr) == {50}
    assert "git cannot check it out" in first.stderr
    second = bisect(repository, *ENDS, "--", *command)
    assert found(second) == "change 63 [wip]"
    assert 50 not in values(counter)


def test_good_that_cannot_be_checked_out_is_refused_with_the_reason(tmp_path: Path) -> None:
    repository = make_history(tmp_path / "r", 100, numbered)
    break_blob(repository, "c1", "value")
    refused = refusal(bisect(repository, *ENDS, "--", *BUG))
    assert refused.startswith("rlcanary: GOOD (")
    assert "git cannot check it out" in refused


def test_in_place_search_leaves_no_half_checked_out_files(with_filter: Path) -> None:
    """Git writes some files of a commit before the filter of another one fails."""
    before = contents(with_filter)
    result = bisect(with_filter, *ENDS, "--in-place", "--", *BUG)
    assert found(result) == "change 63 [wip]"
    changed = {name for name, digest in contents(with_filter).items() if before.get(name) != digest}
    assert [name for name in changed if not name.startswith(".git/")] == []


def test_worktree_has_the_line_ends_that_each_commits_attributes_ask_for(tmp_path: Path) -> None:
    """The file itself is the same in all commits."""

    def files(i: int) -> dict[str, str]:
        ends = "crlf" if i >= 63 else "lf"
        return {".gitattributes": f"*.txt text eol={ends}\n", "folder/a.txt": "a line\n", "value": f"{i}\n"}

    repository = make_history(tmp_path / "r", 100, files)
    command = "sh", "-c", "! grep -q \"$(printf '\\r')\" folder/a.txt"
    assert found(bisect(repository, *ENDS, "--", *command)) == "change 63 [wip]"


@pytest.mark.parametrize("vanishes", ['"$PWD"', '"$(dirname "$PWD")"'], ids=["worktree", "its folder"])
def test_worktree_that_vanishes_is_made_anew(history: Path, vanishes: str) -> None:
    before = contents(history)
    script = f"v=$(cat value); rm -rf {vanishes}; test $v -lt 63"
    assert found(bisect(history, *ENDS, "--", "sh", "-c", script)) == "change 63 [wip]"
    assert {name: digest for name, digest in contents(history).items() if name in before} == before
    assert len(git(history, "worktree", "list").splitlines()) == 1


@pytest.mark.parametrize(
    "trick",
    [
        "rm .git",
        'rm -rf "$PWD"; ln -s "$ROOT" "$PWD"',
        'up=$(dirname "$PWD"); rm -rf "$up"; ln -s "$(dirname "$ROOT")" "$up"',
    ],
    ids=["no link to git", "link to the checkout", "link to the checkout's folder"],
)
def test_git_never_works_on_the_users_checkout_in_place_of_the_worktree(
    history: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trick: str
) -> None:
    """The temporary folder lies in the checkout; runs destroy their worktree or put a link in its place."""
    (history / "scratch").mkdir()
    (history / "scratch" / ".gitignore").write_text("*\n")
    (history / "mine").write_text("untracked\n")
    (history / "value").write_text("edited\n")
    monkeypatch.setenv("TMPDIR", str(history / "scratch"))
    monkeypatch.setenv("ROOT", str(history))
    before = contents(history)
    assert (
        found(bisect(history, *ENDS, "--", "sh", "-c", f"v=$(cat value); {trick}; test $v -lt 63")) == "change 63 [wip]"
    )
    assert {name: digest for name, digest in contents(history).items() if name in before} == before


@pytest.fixture
def with_submodules(tmp_path: Path) -> Path:
    """A clone that has initialised the submodule lib and not the submodule huge, whose origin is gone."""
    origin = make_history(tmp_path / "origin", 1, lambda i: {"readme": "x\n"})
    allowed = "-c", "protocol.file.allow=always"
    for name in ("lib", "huge"):
        source = make_history(tmp_path / name, 1, lambda i: {"n": "x\n"})
        git(origin, *allowed, "submodule", "--quiet", "add", str(source), name)
    for i in range(1, 11):
        (origin / "value").write_text(f"{i}\n")
        git(origin, "add", "-A")
        git(origin, "commit", "--quiet", "-m", f"step {i}")
        git(origin, "tag", f"s{i}")
    clone = tmp_path / "clone"
    git(tmp_path, *allowed, "clone", "--quiet", str(origin), str(clone))
    git(clone, *allowed, "submodule", "--quiet", "update", "--init", "lib")
    for name in ("lib", "huge"):
        (tmp_path / name).rename(tmp_path / f"{name} is gone")
    return clone


SEARCH = "--deterministic", "--good", "s1", "--bad", "s10"


def test_only_initialised_submodules_are_taken_and_the_others_are_named(with_submodules: Path) -> None:
    script = "test -e lib/n && test ! -e huge/n || exit 99; test $(cat value) -lt 7"
    result = bisect(with_submodules, *SEARCH, "--", "sh", "-c", script)
    assert found(result) == "step 7"
    assert "exit 99" not in result.stdout
    assert "left out: huge (" in result.stderr


@pytest.mark.parametrize("place", [(), ("--in-place",)], ids=["worktree", "in place"])
def test_submodules_can_be_left_out(with_submodules: Path, place: tuple[str, ...]) -> None:
    if place:
        git(with_submodules, "submodule", "--quiet", "deinit", "--force", "lib")
    script = "test ! -e lib/n || exit 99; test $(cat value) -lt 7"
    result = bisect(with_submodules, *SEARCH, *place, "--no-submodules", "--", "sh", "-c", script)
    assert found(result) == "step 7"
    assert "exit 99" not in result.stdout
    assert "left out (--no-submodules)" in result.stderr


def test_submodule_that_is_active_by_a_pattern_counts_as_initialised(with_submodules: Path) -> None:
    """`git clone --recurse-submodules` asks for all: one that cannot be had makes its commits untestable, not bad."""
    git(with_submodules, "config", "submodule.active", ".")
    assert "GOOD (" in (refused := refusal(bisect(with_submodules, *SEARCH, "--", "true")))
    assert "tested: submodules: " in refused


@pytest.mark.parametrize(
    "words", [("../check.sh",), ("bash", "../check.sh"), ("sh", "-c", '. "$1"', "-", "../check.sh")]
)
def test_relative_path_that_leads_out_of_the_checkout_means_the_same_file_in_every_run(
    history: Path, words: tuple[str, ...]
) -> None:
    script = history.parent / "check.sh"
    script.write_text("#!/bin/sh\ntest $(cat value) -lt 63\n")
    script.chmod(0o755)
    assert found(bisect(history, *ENDS, "--", *words)) == "change 63 [wip]"


@pytest.mark.parametrize("options", [(), ("--jobs", "2")], ids=["same", "other jobs"])
def test_same_command_after_a_finished_search_shows_its_result(
    history: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    counter = tmp_path / "runs"
    command = counting(counter, "test $(cat value) -lt 63")
    first = bisect(history, *ENDS, "--", *command)
    ran = len(values(counter))
    again = bisect(history, *ENDS, *options, "--", *command)
    assert found(again) == found(first) == "change 63 [wip]"
    assert "\n0 runs in " in again.stdout
    assert len(values(counter)) == ran
    assert f"this search is finished, {ran} outcomes known" in again.stderr
    assert len(list((history / "bisect-logs").glob("*.log"))) == 1
    assert found(bisect(history, *ENDS, "--fresh", "--", *command)) == "change 63 [wip]"
    assert len(values(counter)) == 2 * ran


def test_worktree_that_a_finished_search_never_made_is_not_said_to_be_kept(history: Path) -> None:
    untestable = "case $(cat value) in 62 | 63) exit 125 ;; esac; test $(cat value) -lt 63"
    words = *ENDS, "--keep-worktree", "--", "sh", "-c", untestable
    (line,) = re.findall("worktree kept; .* --force .*", bisect(history, *words).stderr)
    kept = Path(shlex.split(line)[-1])
    again = bisect(history, *words)
    assert "0 runs in " in again.stdout
    assert "worktree kept" not in again.stderr
    git(history, "worktree", "remove", "--force", str(kept))
    kept.parent.rmdir()


def test_finished_search_goes_on_where_more_confidence_is_asked_and_runs_anew_where_the_runs_would_differ(
    history: Path, tmp_path: Path
) -> None:
    counter = tmp_path / "runs"
    command = counting(counter, "test $(cat value) -lt 63")
    ends = ENDS[1:]
    found(bisect(history, *ends, "--confidence", "0.8", "--", *command))
    ran = len(values(counter))
    found(bisect(history, *ends, "--confidence", "0.99", "--", *command))
    assert not {1, 100, 50} & set(values(counter)[ran:])
    ran = len(values(counter))
    found(bisect(history, *ends, "--timeout", "60", "--", *command))
    assert {1, 100, 50} <= set(values(counter)[ran:])
    ran = len(values(counter))
    (history / "pyproject.toml").write_text('[tool.rlcanary.bisect.outcomes]\n77 = "untestable"\n')
    found(bisect(history, *ends, "--timeout", "60", "--", *command))
    assert {1, 100, 50} <= set(values(counter)[ran:])


def test_start_that_was_refused_is_tried_again(history: Path, tmp_path: Path) -> None:
    command = "sh", "-c", f"test -e '{tmp_path}/mended' && test $(cat value) -lt 63"
    assert "GOOD (" in refusal(bisect(history, *ENDS, "--", *command))
    (tmp_path / "mended").touch()
    assert found(bisect(history, *ENDS, "--", *command)) == "change 63 [wip]"


def test_every_commit_that_fails_after_a_trusted_good_costs_few_runs(history: Path, tmp_path: Path) -> None:
    counter = tmp_path / "runs"
    command = counting(counter, "false")
    result = bisect(history, *ENDS[1:], "--skip-good-check", "--", *command)
    assert found(result) == "change 2 [wip]"
    assert len(values(counter)) <= 30


def test_search_without_a_budget_stops_after_many_runs_with_a_word(history: Path, tmp_path: Path) -> None:
    """The limit is lowered here to save time; the command passes and fails whatever the commit."""
    counter = tmp_path / "runs"
    coin = counting(counter, f"[ $(( $(wc -l < '{counter}') % 2 )) = 0 ]")
    program = "import rlcanary.bisect.loop as loop, sys; loop.MOST_RUNS = 12; from rlcanary.cli import main; main()"
    arguments = [sys.executable, "-c", program, "bisect", *ENDS[1:], "--", *coin]
    result = subprocess.run(arguments, cwd=history, capture_output=True, text=True, timeout=HANG_S)
    assert result.returncode == 1, result.stderr
    assert len(values(counter)) == 12
    assert "12 runs were not enough" in result.stdout
    assert "resume with: " in result.stdout
