"""`rlcanary bisect` and its driver on real git repositories. The numbers B01 to B53 name the cases of the issue."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from bisect_repositories import (
    BUG,
    DRIVER,
    bisect,
    contents,
    counting,
    found,
    git,
    log_of,
    make_history,
    numbered,
    refusal,
    started_search,
    values,
    wait_for,
)

pytestmark = pytest.mark.usefixtures("plain_git")


@pytest.mark.parametrize("culprit", [2, 63, 100])
def test_driver_names_the_culprit_of_a_hundred_commits_with_few_runs(history: Path, culprit: int) -> None:
    """B01, B20: halving, then runs that confirm the culprit and its parent, or the end that it rests on."""
    result = subprocess.run(
        [DRIVER, "sh", "-c", f"test $(cat value) -lt {culprit}"],
        cwd=history,
        env=os.environ | {"GOOD": "c1", "BAD": "HEAD"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert found(result) == f"change {culprit} [wip]"
    assert f"{git(history, 'rev-parse', f'c{culprit}')} is the first bad commit" in result.stdout
    runs = int(result.stdout.split(" runs, ")[0].splitlines()[-1])
    assert runs <= 2 + 7 + 5
    assert git(history, "status", "--porcelain") == ""
    assert git(history, "symbolic-ref", "HEAD") == "refs/heads/main"


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
    assert "uncommitted changes in 2 tracked files are not under test" in result.stderr
    assert contents(repository) == before
    assert git(repository, "status", "--porcelain", "--", "bisect-logs") == ""


def test_runs_in_the_same_subdirectory_of_each_commit(history: Path) -> None:
    """B38, B39"""
    command = "sh", "-c", "test -f kept && test $(cat ../value) -lt 63"
    assert found(bisect(history / "sub dir", "--good", "c1", "--bad", "c100", "--", *command)) == "change 63 [wip]"


def test_folder_that_a_commit_lacks_makes_it_untestable(tmp_path: Path) -> None:
    repository = make_history(tmp_path / "r", 9, lambda i: {"value": f"{i}\n"} | ({"sub/x": ""} if i > 3 else {}))
    result = bisect(repository / "sub", "--good", "c1", "--bad", "c9", "--", "true")
    assert "the folder sub does not exist at this commit" in refusal(result)


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
        out, _ = first.communicate(timeout=60)
    assert "change 63 [wip]" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--good", "c70"], r"GOOD \(.* change 70 .* fails \(exit 1, passed 0 of 4 runs\): give an older commit"),
        (["--bad", "c50"], r"BAD \(.* change 50 .* passes \(exit 0, passed 4 of 4 runs\): nothing broke"),
        (["--good", "c70", "--deterministic"], r"GOOD \(.* change 70 .* fails \(exit 1\): give an older commit"),
        (["--bad", "c50", "--deterministic"], r"BAD \(.* change 50 .* passes \(exit 0\): nothing broke"),
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
    assert "the command to run on each commit is missing" in refusal(bisect(history, *ends))
    assert "command not found: 'pytset'" in refusal(bisect(history, *ends, "--", "pytset", "x"))
    assert "without quotes around all of them" in refusal(bisect(history, *ends, "--", "test -f x"))
    assert "no such file in the checkout, GOOD or BAD" in refusal(bisect(history, *ends, "--", "./gone.sh"))


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
    assert "is not an ancestor of BAD: the search starts at their merge base" in result.stderr
    refused = refusal(bisect(history, "--good", "fix", "--bad", "c100", "--", *BUG))
    assert "the merge base of GOOD and BAD" in refused
    assert "already fails" in refused
    assert "GOOD holds a fix" in refused


def test_search_goes_along_the_first_parents_and_then_into_the_guilty_merge(tmp_path: Path) -> None:
    """B42: commits that are broken inside a branch do not lead the search astray."""
    repository = make_history(tmp_path / "r", 1, numbered)
    tip = git(repository, "rev-parse", "main")
    for i in range(2, 30):
        trees = []
        for value in ("broken", str(i)):
            (repository / "value").write_text(f"{value}\n")
            git(repository, "add", "value")
            trees.append(git(repository, "write-tree"))
        inner = git(repository, "commit-tree", "-p", tip, "-m", f"wip {i}", trees[0])
        tip = git(repository, "commit-tree", "-p", tip, "-p", inner, "-m", f"merge {i}", trees[1])
    git(repository, "update-ref", "refs/heads/main", tip)
    command = "sh", "-c", "test $(cat value) -lt 13"
    result = bisect(repository, "--good", "c1", "--bad", "main", "--", *command)
    assert found(result) == "wip 13"
    merge = git(repository, "rev-parse", "--short=10", "main~16")
    assert f"It came in with the merge {merge} merge 13" in result.stdout
    for look in ("status", "visualize"):
        shown = bisect(repository, look).stdout
        assert f"inside the merge {merge} merge 13" in shown
        assert "wip 13" in shown
    assert found(bisect(repository, "--good", "c1", "--bad", "main", "--first-parent", "--", *command)) == "merge 13"


def test_merge_of_two_sides_that_pass_is_itself_the_culprit(tmp_path: Path) -> None:
    repository = make_history(tmp_path / "r", 8, lambda i: {"left": "old\n" if i < 5 else "new\n", "value": f"{i}\n"})
    git(repository, "checkout", "--quiet", "-b", "side", "c3")
    (repository / "right").write_text("new\n")
    git(repository, "add", "right")
    git(repository, "commit", "--quiet", "-m", "right side")
    git(repository, "checkout", "--quiet", "main")
    git(repository, "merge", "--quiet", "--no-ff", "-m", "the merge", "side")
    (repository / "value").write_text("9\n")
    git(repository, "commit", "--quiet", "-am", "after")
    command = "sh", "-c", "! { test -e right && grep -q new left; }"
    result = bisect(repository, "--good", "c1", "--bad", "main", "--", *command)
    assert found(result) == "the merge"
    assert "both sides pass, and what they make together fails" in result.stdout


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
    assert "command not found in GOOD: test.sh is not in" in refused
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
    assert "pytest could not find what to run" in result.stderr
    assert "pinned as it is in your checkout, the same for every commit: run.sh" in result.stderr


def test_new_test_that_no_commit_holds_is_run_on_all_of_them(tmp_path: Path) -> None:
    repository = make_history(
        tmp_path / "r", 16, lambda i: {"lib.py": f"answer = {42 if i < 9 else i}\n", "conftest.py": ""}
    )
    (repository / "test_new.py").write_text("from lib import answer\n\ndef test_answer():\n    assert answer == 42\n")
    command = "pytest", "-q", "-p", "no:cacheprovider", "test_new.py::test_answer"
    result = bisect(repository, "--good", "c1", "--bad", "c16", "--", *command)
    assert found(result) == "change 9 [wip]"
    assert "the same for every commit: test_new.py" in result.stderr


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("interpreter", [(), ("bash",), ("timeout", "60", "bash")])
def test_script_of_the_command_does_not_change_under_the_search(
    tmp_path: Path, absolute: bool, interpreter: tuple[str, ...]
) -> None:
    """B41: the script is broken before c55, and finds the code beside itself."""

    def files(i: int) -> dict[str, str]:
        script = "#!/bin/bash\nexit 1\n" if i < 55 else '#!/bin/bash\ntest $(cat "$(dirname "$0")/../value") -lt 63\n'
        return numbered(i) | {"checks/check.sh": script}

    repository = make_history(tmp_path / "r", 100, files, executable=["checks/check.sh"])
    script = str(repository / "checks" / "check.sh") if absolute else "checks/check.sh"
    result = bisect(repository, "--good", "c1", "--bad", "c100", "--", *interpreter, script)
    assert found(result) == "change 63 [wip]"
    assert "the same for every commit: checks/check.sh" in result.stderr
    assert "GOOD (" in refusal(
        bisect(repository, "--good", "c1", "--bad", "c100", "--no-pin", "--", "bash", "checks/check.sh")
    )


def test_absolute_path_of_a_test_means_the_commits_test(tmp_path: Path) -> None:
    repository = make_history(
        tmp_path / "r", 16, lambda i: {"test_x.py": f"def test_x():\n    assert {i} < 9\n", "conftest.py": ""}
    )
    result = bisect(repository, "--good", "c1", "--bad", "c16", "--", "pytest", "-q", f"{repository}/test_x.py::test_x")
    assert found(result) == "change 9 [wip]"


@pytest.mark.parametrize("layout", ["pth", "finder", "PYTHONPATH"])
def test_package_installed_from_the_checkout_is_imported_from_the_commit(tmp_path: Path, layout: str) -> None:
    """An editable install points every run at the user's checkout, which would make all commits look alike."""
    repository = make_history(tmp_path / "r", 16, lambda i: {"src/lib/__init__.py": f"answer = {i}\n"})
    environment = repository / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True, timeout=60)
    (environment / ".gitignore").write_text("*\n")
    (site,) = environment.glob("lib/python*/site-packages")
    variables = {}
    if layout == "PYTHONPATH":
        variables["PYTHONPATH"] = str(repository / "src")
    elif layout == "pth":
        (site / "lib.pth").write_text(f"{repository / 'src'}\n")
    else:
        (site / "editable_finder.py").write_text(
            "import importlib.util, sys\n"
            f"MAPPING = {{'lib': {str(repository / 'src' / 'lib')!r}}}\n"
            "class Finder:\n"
            "    @classmethod\n"
            "    def find_spec(cls, name, path=None, target=None):\n"
            "        if name in MAPPING:\n"
            "            return importlib.util.spec_from_file_location(name, MAPPING[name] + '/__init__.py')\n"
            "sys.meta_path.append(Finder)\n"
        )
        (site / "lib.pth").write_text("import editable_finder\n")
    command = ".venv/bin/python", "-c", "import lib; assert lib.answer < 9"
    result = bisect(repository, "--good", "c1", "--bad", "c16", "--", *command, env=variables)
    assert found(result) == "change 9 [wip]"
    assert "runs import the same folders of the commit under test" in result.stderr


def test_what_a_run_leaves_in_the_worktree_does_not_reach_the_next(history: Path) -> None:
    """B26: every run edits a tracked file, adds, stages and commits others and leaves folders without permissions."""
    script = (
        "test -e left && exit 99; v=$(cat value); mkdir -p left/locked; touch left/x left/locked/y; chmod 0 left/locked;"
        "echo 1 > value; echo s > staged; git add staged; git commit -qm mine; rm -rf 'sub dir'; test $v -lt 63"
    )
    before = contents(history)
    assert found(bisect(history, "--good", "c1", "--bad", "c100", "--", "sh", "-c", script)) == "change 63 [wip]"
    changed = {name for name, digest in contents(history).items() if before.get(name) != digest}
    assert all(name.startswith(".git/objects/") for name in changed)


def test_worktree_whose_git_file_was_destroyed_is_made_again(history: Path) -> None:
    command = "sh", "-c", "rm -f .git; test $(cat value) -lt 63"
    assert found(bisect(history, "--good", "c1", "--bad", "c100", "--", *command)) == "change 63 [wip]"
    assert len(git(history, "worktree", "list").splitlines()) == 1


def test_hooks_of_the_user_do_not_run(history: Path, tmp_path: Path) -> None:
    hook = history / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch '{tmp_path}/hooked'\n")
    hook.chmod(0o755)
    found(bisect(history, "--good", "c1", "--bad", "c100", "--", *BUG))
    assert not (tmp_path / "hooked").exists()


def test_git_variables_of_the_caller_do_not_point_runs_at_the_checkout(history: Path) -> None:
    variables = {
        "GIT_DIR": str(history / ".git"),
        "GIT_WORK_TREE": str(history),
        "GIT_INDEX_FILE": str(history / ".git/index"),
    }
    command = "sh", "-c", "test $(git show HEAD:value) -lt 63"
    before = contents(history)
    assert found(bisect(history, "--good", "c1", "--bad", "c100", "--", *command, env=variables)) == "change 63 [wip]"
    assert contents(history) == before


@pytest.fixture
def with_submodule(tmp_path: Path) -> Path:
    """A clone whose submodule lib moves with every second commit; its origin is gone, so all must come from the clone."""
    library = make_history(tmp_path / "library", 20, lambda i: {"n": f"{i}\n"})
    origin = make_history(tmp_path / "origin", 1, lambda i: {"readme": "x\n"})
    allowed = "-c", "protocol.file.allow=always"
    git(origin, *allowed, "submodule", "--quiet", "add", str(library), "lib")
    for i in range(1, 41):
        git(origin, "-C", "lib", "checkout", "--quiet", f"c{(i + 1) // 2}")
        (origin / "value").write_text(f"{i}\n")
        git(origin, "add", "-A")
        git(origin, "commit", "--quiet", "-m", f"step {i}")
        git(origin, "tag", f"s{i}")
    clone = tmp_path / "clone"
    git(tmp_path, *allowed, "clone", "--quiet", "--recurse-submodules", str(origin), str(clone))
    shutil.rmtree(library)
    return clone


@pytest.mark.parametrize("options", [(), ("--jobs", "3"), ("--in-place",)], ids=["worktree", "worktrees", "in place"])
def test_submodules_follow_each_commit_without_touching_the_users(
    with_submodule: Path, options: tuple[str, ...]
) -> None:
    """B22-B24, B27"""
    (with_submodule / "lib" / "NOTE.txt").write_text("mine\n")
    before = contents(with_submodule)
    follows = "test $(cat lib/n) = $((($(cat value) + 1) / 2)) || exit 99"
    script = f"{follows}; echo x > lib/n; touch lib/new; test $(cat value) -lt 23"
    result = bisect(with_submodule, "--good", "s1", "--bad", "s40", *options, "--", "sh", "-c", script)
    assert found(result) == "step 23"
    assert "exit 99" not in result.stdout
    assert (with_submodule / "lib" / "NOTE.txt").read_text() == "mine\n"
    if "--in-place" not in options:
        assert contents(with_submodule) == before


def test_submodule_commit_that_cannot_be_had_is_untestable(with_submodule: Path) -> None:
    """B25"""
    git(with_submodule, "checkout", "--quiet", "--detach", "s20")
    git(with_submodule, "update-index", "--cacheinfo", f"160000,{'1' * 40},lib")
    broken = git(with_submodule, "write-tree")
    git(with_submodule, "reset", "--quiet")
    tip = git(with_submodule, "rev-parse", "s20")
    for i in range(21, 26):
        tree = broken if i == 23 else git(with_submodule, "rev-parse", f"s{i}^{{tree}}")
        tip = git(with_submodule, "commit-tree", "-p", tip, "-m", f"again {i}", tree)
    command = "sh", "-c", "test $(cat value) -lt 25"
    result = bisect(with_submodule, "--good", "s20", "--bad", tip, "--", *command)
    assert found(result) == "again 25"
    assert "submodules: " in result.stderr


def slow_from_the_fourth_run(counter: Path) -> tuple[str, ...]:
    """Hangs, with a child, on its fourth run; later runs are quick."""
    hang = f"if [ $(wc -l < '{counter}') = 4 ]; then sleep 61 & echo $! > '{counter}.child'; wait; fi"
    return counting(counter, f"{hang}; test $(cat value) -lt 63")


@pytest.mark.parametrize("to_group", [False, True])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_stops_at_once_saves_a_log_and_the_log_resumes(
    history: Path, tmp_path: Path, signum: signal.Signals, to_group: bool
) -> None:
    """B28-B31, B44, B45"""
    counter, child = tmp_path / "runs", tmp_path / "runs.child"
    command = slow_from_the_fourth_run(counter)
    with started_search(history, "--good", "c1", "--bad", "c100", "--", *command) as search:
        wait_for(lambda: child.exists() and child.read_text().strip())
        began = time.monotonic()
        (os.killpg if to_group else os.kill)(search.pid, signum)
        _, errors = search.communicate(timeout=20)
        stopped_in = time.monotonic() - began
    assert search.returncode == 128 + signum
    assert stopped_in < 5
    assert f"interrupted by {signum.name}" in errors
    assert not psutil.pid_exists(int(child.read_text())) or psutil.Process(int(child.read_text())).status() == "zombie"
    assert len(git(history, "worktree", "list").splitlines()) == 1
    assert len(list((history / "bisect-logs").glob("*.log"))) == 1
    hint = errors.splitlines()[-1].split("resume with: ")[1]
    resumed = subprocess.run(hint, shell=True, cwd=history, capture_output=True, text=True, timeout=60)
    assert found(resumed) == "change 63 [wip]"
    before, after = values(counter)[:3], values(counter)[4:]
    assert values(counter)[3] == after[0]
    assert not set(before) & set(after)


def test_interruption_of_the_good_check_is_called_one(history: Path, tmp_path: Path) -> None:
    """B33"""
    with started_search(
        history, "--good", "c1", "--bad", "c100", "--", "sh", "-c", f"touch '{tmp_path}/on'; sleep 60"
    ) as search:
        wait_for((tmp_path / "on").exists)
        search.send_signal(signal.SIGINT)
        _, errors = search.communicate(timeout=20)
    assert search.returncode == 130
    assert "interrupted by SIGINT" in errors
    assert "fails" not in errors


def test_same_command_continues_after_sigkill_and_clears_up(history: Path, tmp_path: Path) -> None:
    """B32"""
    counter, child = tmp_path / "runs", tmp_path / "runs.child"
    command = slow_from_the_fourth_run(counter)
    with started_search(history, "--good", "c1", "--bad", "c100", "--", *command) as search:
        wait_for(lambda: child.exists() and child.read_text().strip())
        search.kill()
        search.communicate()
    orphan = psutil.Process(int(child.read_text()))
    assert orphan.status() != psutil.STATUS_ZOMBIE
    assert len(git(history, "worktree", "list").splitlines()) == 2
    result = bisect(history, "--good", "c1", "--bad", "c100", "--", *command)
    assert found(result) == "change 63 [wip]"
    assert "continuing the search that was cut short, 3 outcomes known" in result.stderr
    assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE
    assert len(git(history, "worktree", "list").splitlines()) == 1
    assert not set(values(counter)[:3]) & set(values(counter)[4:])
    again = bisect(history, "--good", "c1", "--bad", "c100", "--", *command)
    assert "continuing" not in again.stderr


def test_second_start_is_refused_and_the_first_finishes(history: Path, tmp_path: Path) -> None:
    """B34"""
    counter, gate = tmp_path / "runs", tmp_path / "gate"
    command = counting(counter, f"while [ ! -e '{gate}' ]; do sleep 0.02; done; test $(cat value) -lt 63")
    with started_search(history, "--good", "c1", "--bad", "c100", "--", *command) as first:
        wait_for(counter.exists)
        assert f"already running in this checkout (process {first.pid}" in refusal(
            bisect(history, "--good", "c1", "--bad", "c100", "--", *BUG)
        )
        gate.touch()
        out, errors = first.communicate(timeout=60)
    assert first.returncode == 0, errors
    assert "change 63 [wip]" in out


def test_timeout_ends_the_whole_process_group_and_is_retried_as_infrastructure(history: Path, tmp_path: Path) -> None:
    """B51: the commit that hangs, c50, is tried three times and stepped around."""
    counter = tmp_path / "runs"
    hang = f"[ $(cat value) = 50 ] && {{ sleep 62 & echo $! >> '{tmp_path}/children'; wait; }}"
    command = counting(counter, f"{hang}; test $(cat value) -lt 63")
    result = bisect(history, "--good", "c1", "--bad", "c100", "--timeout", "0.3", "--", *command)
    assert found(result) == "change 63 [wip]"
    assert values(counter).count(50) == 3
    assert "timed out after 0.3" in result.stdout
    assert " s, 3 times" in result.stdout
    children = [int(line) for line in (tmp_path / "children").read_text().split()]
    assert len(children) == 3
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in children)


def test_run_that_the_machine_killed_is_tried_again(history: Path, tmp_path: Path) -> None:
    """B08"""
    once = f"[ $(cat value) = 50 ] && [ ! -e '{tmp_path}/once' ] && touch '{tmp_path}/once' && kill -9 $$"
    result = bisect(history, "--good", "c1", "--bad", "c100", "--", "sh", "-c", f"{once}; test $(cat value) -lt 63")
    assert found(result) == "change 63 [wip]"
    assert result.stderr.count("infra") == 1
    assert "killed by SIGKILL" in result.stderr


@pytest.mark.parametrize("ending", ["exit 2", "exit 130", "exit 139", "exit 255", "kill -SEGV $$", "kill -ABRT $$"])
def test_every_other_way_to_fail_is_bad_and_stops_nothing(tmp_path: Path, ending: str) -> None:
    """B06, B08"""
    repository = make_history(tmp_path / "r", 16, numbered)
    command = "sh", "-c", f"test $(cat value) -lt 9 || {ending}"
    assert found(bisect(repository, "--good", "c1", "--bad", "c16", "--", *command)) == "change 9 [wip]"


def test_log_of_git_bisect_is_taken_over_with_the_commits_it_meant(history: Path, tmp_path: Path) -> None:
    """B21: the log says HEAD, and HEAD has moved since."""
    git(history, "checkout", "--quiet", "c90")
    git(history, "bisect", "start", "HEAD", "c1")
    git(history, "bisect", "good", "c40")
    log = tmp_path / "git.log"
    log.write_text(git(history, "bisect", "log") + "\n")
    git(history, "bisect", "reset")
    git(history, "checkout", "--quiet", "main")
    counter = tmp_path / "runs"
    result = bisect(history, "--replay", str(log), "--", *counting(counter, "test $(cat value) -lt 63"))
    assert found(result) == "change 63 [wip]"
    assert f"BAD  {git(history, 'rev-parse', '--short=10', 'c90')}" in result.stderr
    assert all(40 < value < 90 for value in values(counter))


def test_our_log_replays_without_a_run_and_git_can_read_it(history: Path, tmp_path: Path) -> None:
    """B48"""
    counter = tmp_path / "runs"
    command = counting(counter, "test $(cat value) -lt 63")
    found(bisect(history, "--good", "c1", "--bad", "c100", "--", *command))
    log, runs = log_of(history), len(values(counter))
    assert found(bisect(history, "--replay", str(log), "--", *command)) == "change 63 [wip]"
    assert len(values(counter)) == runs
    assert "is the first bad commit" in git(history, "bisect", "replay", str(log))


def test_edited_log_is_taken_at_its_word(history: Path) -> None:
    """B46: a verdict turned into skip, another dropped, one added at the end."""
    found(bisect(history, "--good", "c1", "--bad", "c100", "--", *BUG))
    log = log_of(history)
    sha = git(history, "rev-parse", "c63")
    text = log.read_text().replace(f"git bisect bad {sha}", f"git bisect skip {sha}")
    log.write_text(text + "git bisect skip c64\n")
    result = bisect(history, "--replay", str(log), "--", *BUG)
    assert result.returncode == 1
    assert "one of these 3 commits is the first bad one" in result.stdout


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "git bisect bad 1234567890123456789012345678901234567890",
            "line 5: 1234567890.* is not a commit in this repository",
        ),
        ("git bisct bad c5", "line 5: 'git bisct bad c5' is not a `git bisect` command"),
        ("git bisect good c90\ngit bisect bad c30", "the runs contradict each other: .* is good, but"),
        ('# rlcanary {"root": "1111111111111111111111111111111111111111"}', "belongs to another repository"),
    ],
)
def test_log_that_cannot_be_right_is_refused(history: Path, tmp_path: Path, line: str, message: str) -> None:
    log = tmp_path / "x.log"
    log.write_text(f"# a comment\n\ngit bisect start c100 c1\ngit bisect good c2\n{line}\n")
    assert re.search(message, refusal(bisect(history, "--replay", str(log), "--deterministic", "--", *BUG)))


def test_worktree_is_kept_at_the_culprit_on_request(history: Path) -> None:
    """BISECT_NO_RESET"""
    result = subprocess.run(
        [DRIVER, *BUG],
        cwd=history,
        env=os.environ | {"GOOD": "c1", "BAD": "c100", "BISECT_NO_RESET": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    found(result)
    line = next(line for line in result.stderr.splitlines() if line.startswith("worktree kept"))
    kept = Path(git(history, "worktree", "list", "--porcelain").split("worktree ")[2].splitlines()[0])
    assert (kept / "value").read_text() == "63\n"
    subprocess.run(line.split("delete it with: ")[1], shell=True, cwd=history, check=True)
    kept.parent.rmdir()
