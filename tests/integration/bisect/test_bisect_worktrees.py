"""What a run of `rlcanary bisect` sees: the commit's files, and nothing of other runs. B01 to B53 are cases of the issue."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from bisect_repositories import (
    BUG,
    bisect,
    contents,
    found,
    git,
    make_history,
    numbered,
    refusal,
)
from waiting import HANG_S

pytestmark = pytest.mark.usefixtures("plain_git")


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("interpreter", [(), ("bash",), ("bash", "-e"), ("timeout", "60", "bash")])
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
    assert "commit: checks/check.sh" in result.stderr
    assert "GOOD (" in refusal(
        bisect(repository, "--good", "c1", "--bad", "c100", "--no-pin", "--", "bash", "checks/check.sh")
    )


@pytest.mark.parametrize("option", ["-e", "-ne"])
def test_code_of_an_interpreter_is_not_taken_for_a_file(tmp_path: Path, option: str) -> None:
    repository = make_history(tmp_path / "r", 16, numbered)
    code = "exit($_/1 >= 9)" if "n" in option else "exit(<>/1 >= 9)"
    result = bisect(repository, "--good", "c1", "--bad", "c16", "--", "perl", option, code, "value")
    assert found(result) == "change 9 [wip]"


def test_absolute_path_of_a_test_means_the_commits_test(tmp_path: Path) -> None:
    repository = make_history(
        tmp_path / "r", 16, lambda i: {"test_x.py": f"def test_x():\n    assert {i} < 9\n", "conftest.py": ""}
    )
    result = bisect(repository, "--good", "c1", "--bad", "c16", "--", "pytest", "-q", f"{repository}/test_x.py::test_x")
    assert found(result) == "change 9 [wip]"


@pytest.mark.parametrize("whole", [False, True])
def test_folder_of_the_checkout_means_the_commits_folder(tmp_path: Path, whole: bool) -> None:
    repository = make_history(tmp_path / "r", 16, numbered)
    place = str(repository) if whole else "."
    command = "sh", "-c", 'test $(cat "$1/value") -lt 9', "-", place
    assert found(bisect(repository, "--good", "c1", "--bad", "c16", "--", *command)) == "change 9 [wip]"


def test_untracked_folder_is_named_at_the_opening_unless_its_path_is_whole(tmp_path: Path) -> None:
    repository = make_history(tmp_path / "r", 16, numbered)
    (repository / "run/bundle").mkdir(parents=True)
    command = "sh", "-c", 'test -d "$1" && test $(cat value) -lt 9', "-"
    ends = "--good", "c1", "--bad", "c16", "--"
    notice = "not in the history, so no run finds it: run/bundle; a whole path names the one in your checkout"
    relative = bisect(repository, *ends, *command, "run/bundle")
    assert "GOOD (" in refusal(relative)
    assert notice in relative.stderr
    assert notice in bisect(repository, "--dry-run", *ends, *command, "run/bundle").stdout
    result = bisect(repository, *ends, *command, str(repository / "run/bundle"))
    assert found(result) == "change 9 [wip]"
    assert notice not in result.stderr


@pytest.mark.parametrize("layout", ["pth", "finder", "PYTHONPATH"])
def test_package_installed_from_the_checkout_is_imported_from_the_commit(tmp_path: Path, layout: str) -> None:
    """An editable install points every run at the user's checkout, which would make all commits look alike."""
    repository = make_history(tmp_path / "r", 16, lambda i: {"src/lib/__init__.py": f"answer = {i}\n"})
    environment = repository / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True, timeout=HANG_S)
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
    assert "the commit under test" in result.stderr


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

    def files(i: int) -> dict[str, str]:
        return {"n": f"{i}\n", "data/x": ""} | ({"extra": "", "extra.bin": ""} if i == 6 else {})

    library = make_history(tmp_path / "library", 20, files)
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
    script = f"{follows}; echo x > lib/n; touch lib/new; test -d $1 && test $(cat value) -lt 23"
    command = "sh", "-c", script, "-", "lib/data"
    result = bisect(with_submodule, "--good", "s1", "--bad", "s40", *options, "--", *command)
    assert found(result) == "step 23"
    assert "no run finds it" not in result.stderr
    assert "exit 99" not in result.stdout
    assert (with_submodule / "lib" / "NOTE.txt").read_text() == "mine\n"
    if "--in-place" not in options:
        assert contents(with_submodule) == before


@pytest.mark.parametrize("name", ["extra", "extra.bin"], ids=["untracked", "ignored"])
def test_in_place_search_overwrites_no_file_in_a_submodule(with_submodule: Path, name: str) -> None:
    (with_submodule / ".git/modules/lib/info/exclude").write_text("*.bin\n")
    (with_submodule / "lib" / name).write_text("mine\n")
    ends = "--deterministic", "--good", "s10", "--bad", "s13"
    result = bisect(with_submodule, *ends, "--in-place", "--", "sh", "-c", "test $(cat value) -lt 13")
    assert result.returncode == 1
    assert "untestable" in result.stderr
    assert (with_submodule / "lib" / name).read_text() == "mine\n"
    assert git(with_submodule, "status", "--short", "--untracked-files=no") == ""


def test_in_place_search_leaves_edits_in_a_submodule_that_the_branch_no_longer_has(with_submodule: Path) -> None:
    git(with_submodule, "rm", "--quiet", "--cached", "lib", ".gitmodules")
    (with_submodule / ".gitmodules").unlink()
    git(with_submodule, "commit", "--quiet", "-m", "without lib")
    (with_submodule / "lib" / "n").write_text("edited\n")
    result = bisect(with_submodule, "--good", "s1", "--bad", "HEAD", "--in-place", "--", "true")
    assert "lib has uncommitted changes" in refusal(result)
    assert (with_submodule / "lib" / "n").read_text() == "edited\n"


def test_in_place_search_mends_a_submodule_that_a_run_deleted(with_submodule: Path) -> None:
    follows = "test $(cat lib/n) = $((($(cat value) + 1) / 2)) || exit 99; v=$(cat value); rm -rf lib"
    ends = "--deterministic", "--good", "s1", "--bad", "s40"
    result = bisect(with_submodule, *ends, "--in-place", "--", "sh", "-c", f"{follows}; test $v -lt 23")
    assert found(result) == "step 23"
    assert "exit 99" not in result.stdout
    assert git(with_submodule, "status", "--short", "--ignore-submodules=untracked") == ""


def test_in_place_search_is_refused_where_a_submodule_has_edits_that_git_status_hides(with_submodule: Path) -> None:
    git(with_submodule, "config", "submodule.lib.ignore", "all")
    (with_submodule / "lib" / "n").write_text("edited\n")
    refused = refusal(bisect(with_submodule, "--good", "s1", "--bad", "s40", "--in-place", "--", "true"))
    assert "uncommitted changes" in refused
    assert (with_submodule / "lib" / "n").read_text() == "edited\n"


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


@pytest.mark.parametrize("in_place", [False, True])
def test_pinned_file_is_not_written_through_a_link_of_an_older_commit(tmp_path: Path, in_place: bool) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "check.sh").write_text("precious\n")
    repository = make_history(tmp_path / "r", 1, numbered)
    for i in range(2, 10):
        scripts = repository / "scripts"
        if i == 2:
            scripts.symlink_to(mine)
        if i == 4:
            scripts.unlink()
            scripts.mkdir()
            (scripts / "check.sh").write_text("test $(cat value) -lt 7\n")
        (repository / "value").write_text(f"{i}\n")
        git(repository, "add", ".")
        git(repository, "commit", "--quiet", "-m", f"change {i}")
        git(repository, "tag", f"c{i}")
    ends = ("--deterministic", "--skip-good-check", "--good", "c2", "--bad", "c9")
    bisect(repository, *ends, *(["--in-place"] if in_place else []), "--", "sh", "scripts/check.sh")
    assert (mine / "check.sh").read_text() == "precious\n"
    assert git(repository, "symbolic-ref", "HEAD") == "refs/heads/main"
