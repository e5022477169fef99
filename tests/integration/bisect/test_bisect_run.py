"""`rlcanary bisect` and its driver on real git repositories. The numbers B01 to B53 name the cases of the issue."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from bisect_repositories import (
    BUG,
    DRIVER,
    bisect,
    contents,
    counting,
    found,
    git,
    make_history,
    numbered,
    refusal,
    started_search,
)
from waiting import HANG_S

pytestmark = pytest.mark.usefixtures("plain_git")


@pytest.mark.parametrize("culprit", [2, 63, 100])
def test_driver_names_the_culprit_of_a_hundred_commits_with_few_runs(history: Path, culprit: int) -> None:
    """B01, B20: halving, then runs that confirm the culprit, its parent and the commits beside them."""
    result = subprocess.run(
        [DRIVER, "sh", "-c", f"test $(cat value) -lt {culprit}"],
        cwd=history,
        env=os.environ | {"GOOD": "c1", "BAD": "HEAD"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert found(result) == f"change {culprit} [wip]"
    assert f"{git(history, 'rev-parse', f'c{culprit}')} is the first bad commit" in result.stdout
    runs = int(result.stdout.split(" runs in ")[0].splitlines()[-1])
    assert runs <= 2 + 7 + 8
    assert git(history, "status", "--porcelain") == ""
    assert git(history, "symbolic-ref", "HEAD") == "refs/heads/main"


def test_each_run_is_told_a_seed_of_its_own(history: Path, tmp_path: Path) -> None:
    seeds = tmp_path / "seeds"
    command = ("sh", "-c", f"echo $RLCANARY_BISECT_SEED >> '{seeds}'; test $(cat value) -lt 3")
    found(bisect(history, "--good", "c1", "--bad", "c4", "--", *command))
    told = seeds.read_text().split()
    assert len(told) >= 5
    assert len(set(told)) == len(told)


def test_json_result_holds_the_commit_its_files_and_the_evidence(history: Path, tmp_path: Path) -> None:
    """B53"""
    found(bisect(history, "--good", "c1", "--bad", "c100", "--json", str(tmp_path / "result.json"), "--", *BUG))
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["status"], result["exit_code"]) == ("found", 0)
    assert result["first_bad"]["sha"] == git(history, "rev-parse", "c63")
    assert result["first_bad"]["files"] == ["value"]
    assert {o["outcome"] for o in result["observations"]} == {"good", "bad"}
    assert result["runs"] == len(result["observations"])
    assert all(Path(o["output"]).is_file() for o in result["observations"])


def test_nothing_of_the_users_is_touched(tmp_path: Path) -> None:
    """B02-B05, B36, B50: edits, staged and ignored files, a manual bisect under way and a lock on the index."""

    def files(i: int) -> dict[str, str]:
        old = {"model.bin": "tracked\n", "colliding": "tracked\n"} if i < 40 else {}
        return {"value": f"{i}\n", "notes": "n\n", "staged": "s\n", ".gitignore": "model.bin\n"} | old

    repository = make_history(tmp_path / "r", 100, files)
    (repository / "notes").write_text("edited\n")
    (repository / "staged").write_text("edited\n")
    git(repository, "add", "staged")
    for name in ("model.bin", "colliding"):
        (repository / name).write_text("mine\n")
    for step in (["start"], ["bad", "c90"]):
        git(repository, "bisect", *step)
    (repository / ".git" / "index.lock").touch()
    before = contents(repository)
    result = bisect(repository, "--good", "c1", "--bad", "c100", "--", *BUG)
    assert found(result) == "change 63 [wip]"
    assert "changes in 2 tracked files" in result.stderr
    assert contents(repository) == before
    assert git(repository, "status", "--porcelain", "--", "bisect-logs") == ""


def test_runs_in_the_same_subdirectory_of_each_commit(history: Path) -> None:
    """B38, B39"""
    command = "sh", "-c", "test -f kept && test $(cat ../value) -lt 63"
    assert found(bisect(history / "sub dir", "--good", "c1", "--bad", "c100", "--", *command)) == "change 63 [wip]"


def test_folder_that_a_commit_lacks_makes_it_untestable(tmp_path: Path) -> None:
    repository = make_history(tmp_path / "r", 9, lambda i: {"value": f"{i}\n"} | ({"sub/x": ""} if i > 3 else {}))
    result = bisect(repository / "sub", "--good", "c1", "--bad", "c9", "--", "true")
    assert "the folder sub does not exist" in refusal(result)


def test_linked_worktree_and_detached_head_stay_as_they_are(history: Path, tmp_path: Path) -> None:
    """B19, B37"""
    linked = tmp_path / "linked"
    git(history, "worktree", "add", "--quiet", "--detach", str(linked), "c80")
    before = contents(history), contents(linked)
    assert found(bisect(linked, "--good", "c1", "--bad", "c100", "--", *BUG)) == "change 63 [wip]"
    kept = {name: digest for name, digest in contents(history).items() if "/rlcanary/" not in name}
    assert (kept, contents(linked)) == before
    assert git(linked, "rev-parse", "HEAD") == git(history, "rev-parse", "c80")
    assert len(git(history, "worktree", "list").splitlines()) == 2


def test_two_worktrees_may_search_at_once(history: Path, tmp_path: Path) -> None:
    """B35"""
    linked = tmp_path / "linked"
    git(history, "worktree", "add", "--quiet", "--detach", str(linked), "c80")
    command = "sh", "-c", "sleep 0.1; test $(cat value) -lt 63"
    with started_search(linked, "--good", "c1", "--bad", "c100", "--", *command) as first:
        assert found(bisect(history, "--good", "c1", "--bad", "c100", "--", *command)) == "change 63 [wip]"
        out, _ = first.communicate(timeout=HANG_S)
    assert "change 63 [wip]" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--good", "c70"], r"GOOD \(.* change 70 .* fails \(exit 1, passed 0 of 4 runs\): give an older commit"),
        (["--bad", "c50"], r"BAD \(.* change 50 .* passes \(exit 0, passed 4 of 4 runs\): nothing is broken"),
        (["--good", "c70", "--deterministic"], r"GOOD \(.* change 70 .* fails \(exit 1\): give an older commit"),
        (["--bad", "c50", "--deterministic"], r"BAD \(.* change 50 .* passes \(exit 0\): nothing is broken"),
    ],
)
def test_end_that_is_not_what_it_should_be_is_refused(history: Path, arguments: list[str], message: str) -> None:
    """B13, B14"""
    command = "sh", "-c", "echo the value is $(cat value); test $(cat value) -lt 63"
    result = bisect(history, "--good", "c1", "--bad", "c100", *arguments, "--", *command)
    assert re.search(message, refusal(result))
    assert "    the value is " in result.stderr
    assert not (history / "bisect-logs").exists() or not list((history / "bisect-logs").glob("*.log"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--good", "c100", "--bad", "c1"], "GOOD and BAD are swapped"),
        (["--good", "c1", "--bad", "mian"], "BAD='mian' does not name a commit in .*: did you mean 'main'"),
        (["--good", "c1\nc2", "--bad", "main"], "GOOD holds 2 lines, not one commit"),
        (["--good", "c1"], "BAD is missing"),
        (["--bad", "c1"], "GOOD is missing"),
        (["--good", "", "--bad", "c1"], "GOOD is missing"),
        (["--good", "c1", "--bad", "c1"], "GOOD and BAD are the same commit"),
        (["--good-when-added", "never", "--bad", "c9"], "--good-when-added never: no commit up to"),
        (["--good", "c1", "--bad", "c9", "--pin", "gone"], "--pin gone: no such file"),
        (["--good", "c1", "--bad", "c9", "--save-dir", "value"], "cannot write the log to .*value: "),
        (
            ["--good", "c1", "--bad", "c9", "--json", "gone/x.json"],
            "cannot write gone/x.json: its folder does not exist",
        ),
        (["--good", "c1", "--bad", "c9", "--replay", "gone.log"], "cannot read the log gone.log: No such file"),
    ],
)
def test_mistake_costs_one_line_and_no_run(history: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    """B15, B16, B47, B49, B52"""
    counter = tmp_path / "runs"
    before = contents(history)
    result = bisect(history, *arguments, "--", *counting(counter, "true"))
    assert re.search(message, refusal(result))
    assert not counter.exists()
    assert contents(history) == before


def test_outside_a_repository_without_a_command_or_with_a_missing_one(history: Path, tmp_path: Path) -> None:
    ends = "--good", "c1", "--bad", "c100"
    assert "is not in a git repository" in refusal(bisect(tmp_path, *ends, "--", "true"))
    assert "is not in a working tree" in refusal(bisect(history / ".git", *ends, "--", "true"))
    assert "the command to run" in refusal(bisect(history, *ends))
    assert "command not found: 'pytset'" in refusal(bisect(history, *ends, "--", "pytset", "x"))
    assert "without quotes" in refusal(bisect(history, *ends, "--", "test -f x"))
    assert "no such file in the checkout" in refusal(bisect(history, *ends, "--", "./gone.sh"))


def test_git_directory_that_cannot_be_written_costs_one_line(history: Path) -> None:
    (history / ".git" / "rlcanary").write_text("a file is in the way\n")
    assert "cannot write" in refusal(bisect(history, "--good", "c1", "--bad", "c100", "--", *BUG))


def test_driver_says_how_to_get_rlcanary(history: Path, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "env"):
        (tools / name).symlink_to(shutil.which(name) or name)
    result = subprocess.run(
        [DRIVER, "true"],
        cwd=history,
        env={"PATH": str(tools), "GOOD": "c1", "BAD": "c9"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "pip install rlcanary" in result.stderr


def test_diverged_good_is_replaced_by_the_merge_base(history: Path) -> None:
    """B17, B18"""
    for name, start in (("side", "c20"), ("fix", "c80")):
        git(history, "branch", name, start)
        tree = git(history, "rev-parse", "c20^{tree}")
        commit = git(history, "commit-tree", "-p", start, "-m", f"{name} work", tree)
        git(history, "update-ref", f"refs/heads/{name}", commit)
    result = bisect(history, "--good", "side", "--bad", "c100", "--", *BUG)
    assert found(result) == "change 63 [wip]"
    assert "not an ancestor of BAD" in result.stderr
    refused = refusal(bisect(history, "--good", "fix", "--bad", "c100", "--", *BUG))
    assert "merge base of GOOD and BAD" in refused
    assert "already fails" in refused
    assert "GOOD has a fix" in refused


def test_untestable_stretch_is_reported_as_a_range_with_its_own_exit_code(history: Path, tmp_path: Path) -> None:
    """B09"""
    command = "sh", "-c", "v=$(cat value); [ $v -ge 55 ] && [ $v -le 70 ] && exit 125; test $v -lt 63"
    result = bisect(history, "--good", "c1", "--bad", "c100", "--json", str(tmp_path / "r.json"), "--", *command)
    assert result.returncode == 1
    assert "is the first bad commit" not in result.stdout
    answer = json.loads((tmp_path / "r.json").read_text())
    assert answer["status"] == "range"
    assert answer["first_bad"] is None
    assert [c["subject"] for c in answer["suspects"]] == [f"change {i} [wip]" for i in range(55, 72)]
    assert answer["runs"] <= 2 + 14
    for suspect in answer["suspects"]:
        assert suspect["sha"] in result.stdout


def test_command_that_older_commits_lack_blames_none_of_them(tmp_path: Path) -> None:
    """B07, B11: the commits before c55 have no test.sh, and `bash test.sh` exits 127 there."""
    script = "test $(cat value) -lt 63\n"
    repository = make_history(tmp_path / "r", 100, lambda i: numbered(i) | ({"test.sh": script} if i >= 55 else {}))
    git(repository, "checkout", "--quiet", "--detach", "c1")
    command = "bash", "test.sh"
    refused = refusal(bisect(repository, "--good", "c1", "--bad", "c100", "--", *command))
    assert "not found in GOOD: test.sh" in refused
    assert "--good-when-added test.sh" in refused
    skipped = bisect(repository, "--good", "c1", "--bad", "c100", "--skip-good-check", "--", *command)
    assert found(skipped) == "change 63 [wip]"
    added = bisect(repository, "--good-when-added", "test.sh", "--bad", "c100", "--", *command)
    assert found(added) == "change 63 [wip]"
    assert "GOOD " + git(repository, "rev-parse", "--short=10", "c55") in added.stderr


def test_pytest_that_does_not_find_the_test_is_untestable_also_inside_a_script(tmp_path: Path) -> None:
    """B12, with a real pytest: the test appears at c5, the bug at c6."""
    test = "from lib import answer\n\ndef test_answer():\n    assert answer() == 42\n"

    def files(i: int) -> dict[str, str]:
        return {"lib.py": f"def answer():\n    return {42 if i < 6 else i}\n", "conftest.py": ""} | (
            {"tests/test_answer.py": test} if i >= 5 else {"tests/x": ""}
        )

    repository = make_history(tmp_path / "r", 16, files)
    (repository / "run.sh").write_text("exec python -m pytest -q -p no:cacheprovider tests/test_answer.py\n")
    result = bisect(repository, "--good", "c1", "--bad", "c16", "--skip-good-check", "--", "bash", "run.sh")
    assert found(result) == "change 6 [wip]"
    assert "pytest did not find the test" in result.stderr
    assert "for every commit: run.sh" in result.stderr


def test_new_test_that_no_commit_holds_is_run_on_all_of_them(tmp_path: Path) -> None:
    repository = make_history(
        tmp_path / "r", 16, lambda i: {"lib.py": f"answer = {42 if i < 9 else i}\n", "conftest.py": ""}
    )
    (repository / "test_new.py").write_text("from lib import answer\n\ndef test_answer():\n    assert answer == 42\n")
    command = "pytest", "-q", "-p", "no:cacheprovider", "test_new.py::test_answer"
    result = bisect(repository, "--good", "c1", "--bad", "c16", "--", *command)
    assert found(result) == "change 9 [wip]"
    assert "every commit: test_new.py" in result.stderr
