"""The acceptance cases of the issue that no other module covers, and a count that none is missing."""

import ast
import json
import os
import pty
import re
import shutil
import signal
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
    log_of,
    make_history,
    numbered,
    refusal,
    started_search,
    values,
)
from waiting import HANG_S, wait_for

pytestmark = pytest.mark.usefixtures("plain_git")

CASES = 53


def named_cases() -> set[int]:
    """The numbers in the docstrings of the tests of bisect: B01, or B02-B05."""
    named: set[int] = set()
    for path in Path(__file__).parent.glob("test_bisect_*.py"):
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        for function in functions:
            text = ast.get_docstring(function) or ""
            if not function.name.startswith("test_"):
                continue
            for first, last in re.findall(r"\bB(\d\d)(?:-B(\d\d))?\b", text):
                named |= set(range(int(first), int(last or first) + 1))
    return named


def test_every_acceptance_case_is_named_by_a_test_that_runs_it() -> None:
    assert named_cases() == set(range(1, CASES + 1))


def drive(repository: Path, driver: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [driver, *arguments],
        cwd=repository,
        env=os.environ | {"GOOD": "c1", "BAD": "c100"} | variables,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def test_coreutils_timeout_is_read_as_a_timeout_and_can_be_said_to_be_bad(history: Path) -> None:
    """B06: exit 124 of a real `timeout`."""
    ends = "--good", "c1", "--bad", "c100"
    hang = "sh", "-c", "test $(cat value) -lt 63 || timeout 0.2 sleep 9999"
    refused = refusal(bisect(history, *ends, "--", *hang))
    assert "exit 124: timed out, 3 times" in refused
    assert "add --on-timeout bad" in refused
    assert found(bisect(history, *ends, "--on-timeout", "bad", "--", *hang)) == "change 63 [wip]"


@pytest.mark.parametrize("code", [126, 127])
def test_command_that_is_gone_in_new_commits_blames_none_of_them(history: Path, code: int) -> None:
    """B07: from c63 on the command cannot be run."""
    gone = "sh", "-c", f"test $(cat value) -lt 63 || exit {code}"
    refused = refusal(bisect(history, "--good", "c1", "--bad", "c100", "--", *gone))
    assert f"BAD (50c9bb548b change 100 [wip]) cannot be tested: exit {code}" in refused
    later = bisect(
        history,
        "--good",
        "c1",
        "--bad",
        "c100",
        "--",
        "sh",
        "-c",
        f"v=$(cat value); [ $v = 50 ] && exit {code}; {BUG[2]}",
    )
    assert found(later) == "change 63 [wip]"


def test_command_that_good_lacks_is_found_out_without_a_run(history: Path, tmp_path: Path) -> None:
    """B10"""
    repository = make_history(tmp_path / "r", 9, lambda i: numbered(i) | ({"check.sh": "exit 0\n"} if i > 3 else {}))
    git(repository, "checkout", "--quiet", "--detach", "c2")
    ends = "--good", "c1", "--bad", "c9"
    for command in (["./check.sh"], ["bash", "check.sh"]):
        result = bisect(repository, *ends, "--", *command)
        assert "is not in" in refusal(result)
        assert "  1  " not in result.stderr
    assert "no such file in the checkout" in refusal(bisect(repository, *ends, "--", "bash", "chekc.sh"))
    both = refusal(bisect(repository, *ends, "--", "bash", "-c", "chekc"))
    assert "nor can BAD" in both


def test_log_of_another_repository_with_the_same_tags_is_refused(history: Path, tmp_path: Path) -> None:
    """B21"""
    found(bisect(history, "--good", "c1", "--bad", "c100", "--", *BUG))
    other = make_history(tmp_path / "other", 100, lambda i: {"value": f"{i}\n", "other": "x\n"})
    refused = refusal(bisect(other, "--replay", str(log_of(history)), "--", *BUG))
    assert re.search("is not a commit in this repository|belongs to another repository", refused)
    (journal,) = (history / ".git" / "rlcanary" / "bisect").glob("*/journal.jsonl")
    assert "belongs to another repository" in refusal(bisect(other, "--replay", str(journal), "--", *BUG))


def test_journal_replays_like_a_log(history: Path, tmp_path: Path) -> None:
    """B46-B48: BISECT_REPLAY_LOG takes the journal that the result names."""
    counter = tmp_path / "runs"
    command = counting(counter, "test $(cat value) -lt 63")
    found(bisect(history, "--good", "c1", "--bad", "c100", "--", *command))
    (journal,) = (history / ".git" / "rlcanary" / "bisect").glob("*/journal.jsonl")
    runs = len(values(counter))
    for place in (journal, journal.parent):
        assert (
            found(drive(history, DRIVER, *command, GOOD="", BAD="", BISECT_REPLAY_LOG=str(place))) == "change 63 [wip]"
        )
    assert len(values(counter)) == runs


def test_search_goes_on_with_the_same_commits_after_new_ones_landed(history: Path, tmp_path: Path) -> None:
    """B20, B21: BAD was HEAD, and HEAD has moved since."""
    counter = tmp_path / "runs"
    command = counting(counter, "test $(cat value) -lt 63")
    stopped = bisect(history, "--good", "c1", "--bad", "HEAD", "--budget-runs", "4", "--", *command)
    hint = stopped.stdout.split("resume with: ")[1]
    git(history, "commit", "--quiet", "--allow-empty", "-m", "landed meanwhile")
    resumed = subprocess.run(hint, shell=True, cwd=history, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert found(resumed) == "change 63 [wip]"
    assert f"BAD  {git(history, 'rev-parse', '--short=10', 'c100')}" in resumed.stderr
    assert not set(values(counter)[:4]) & set(values(counter)[4:])


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signal_to_the_group_in_the_good_check_is_an_interruption(
    history: Path, tmp_path: Path, signum: signal.Signals
) -> None:
    """B29, B30, B33"""
    gate = tmp_path / "gate"
    with started_search(
        history, "--good", "c1", "--bad", "c100", "--", "sh", "-c", f"touch '{gate}'; sleep 9999"
    ) as search:
        wait_for(gate.exists)
        os.killpg(search.pid, signum)
        _, errors = search.communicate(timeout=HANG_S)
    assert search.returncode == 128 + signum
    assert f"interrupted by {signum.name}; resume with: " in errors
    assert "fails" not in errors


def test_terminal_that_goes_away_loses_nothing(history: Path, tmp_path: Path) -> None:
    """B31: as when ssh drops, with a real terminal: SIGHUP comes, and nothing can be printed any more."""
    gate = tmp_path / "gate"
    script = f"[ $(cat value) = 50 ] && [ ! -e '{gate}' ] && {{ touch '{gate}'; sleep 93; }}; test $(cat value) -lt 63"
    command = "rlcanary", "bisect", "--good", "c1", "--bad", "c100", "--", "sh", "-c", script
    child, terminal = pty.fork()
    if child == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # pytest may itself run under nohup
        os.chdir(history)
        os.execvp(command[0], command)
    while not gate.exists():
        os.read(terminal, 65536)
    os.close(terminal)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGHUP
    assert len(git(history, "worktree", "list").splitlines()) == 1
    resumed = bisect(history, *command[2:])
    assert found(resumed) == "change 63 [wip]"
    assert "2 outcomes known" in resumed.stderr


@pytest.mark.parametrize("where", ["self", "child"])
@pytest.mark.parametrize("signum", [signal.SIGSEGV, signal.SIGABRT])
def test_crash_is_bad_unless_good_crashes_too(history: Path, where: str, signum: signal.Signals) -> None:
    """B08: real signals, of the command itself and of a child that it waits for."""
    kill = f"kill -{signum.name[3:]} $$"
    die = kill if where == "self" else f"sh -c '{kill}'; exit $?"
    ends = "--good", "c1", "--bad", "c100"
    result = bisect(history, *ends, "--", "sh", "-c", f"test $(cat value) -lt 63 || {{ {die}; }}")
    assert found(result) == "change 63 [wip]"
    assert ("died of SIG" if where == "self" else f"exit {128 + signum}") in result.stdout
    assert "GOOD (" in refusal(bisect(history, *ends, "--", "sh", "-c", die))


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_commit_that_the_machine_kills_every_time_is_stepped_around(
    history: Path, tmp_path: Path, signum: signal.Signals
) -> None:
    """B08"""
    counter = tmp_path / "runs"
    kill = f"[ $(cat value) = 50 ] && kill -{signum.name[3:]} $$"
    result = bisect(
        history, "--good", "c1", "--bad", "c100", "--", *counting(counter, f"{kill}; test $(cat value) -lt 63")
    )
    assert found(result) == "change 63 [wip]"
    assert values(counter).count(50) == 3
    assert f"killed by {signum.name}, 3 times" in result.stdout


def test_driver_works_from_a_copy_beside_the_checkout_and_takes_options(history: Path) -> None:
    """B38, B40: in tools.bisect/, which old commits do not have."""
    copy = history / "tools.bisect"
    copy.mkdir()
    shutil.copy(DRIVER, copy / "bisect-run.sh")
    before = contents(history)
    result = drive(history, Path("tools.bisect/bisect-run.sh"), "--jobs", "2", "sh", "-c", "test $(cat value) -lt 63")
    assert found(result) == "change 63 [wip]"
    assert contents(history) == before
    assert "Usage: rlcanary bisect" in drive(history, DRIVER, "--help").stdout
    assert "No such option" in drive(history, DRIVER, "--jbos", "2", "true").stderr
    # A command is never taken for a subcommand.
    assert "command not found: 'status'" in drive(history, DRIVER, "status").stderr


def test_driver_that_the_history_holds_and_changes_is_not_disturbed(tmp_path: Path) -> None:
    """B40"""
    broken = "#!/bin/sh\nexit 1\n"

    def files(i: int) -> dict[str, str]:
        return numbered(i) | {"tools/bisect-run.sh": broken if i < 55 else DRIVER.read_text()}

    repository = make_history(tmp_path / "r", 100, files, executable=["tools/bisect-run.sh"])
    result = drive(repository, Path("tools/bisect-run.sh"), *BUG)
    assert found(result) == "change 63 [wip]"


def test_driver_saves_where_it_is_told_and_its_hint_goes_on(history: Path, tmp_path: Path) -> None:
    """B28, B44: BISECT_SAVE_DIR and the line that resumes through the driver."""
    gate, logs = tmp_path / "gate", tmp_path / "the logs"
    script = (
        f"[ $(cat value) = 50 ] && [ ! -e '{gate}' ] && {{ touch '{gate}'; sleep 9999; }}; test $(cat value) -lt 63"
    )
    process = subprocess.Popen(
        [DRIVER, "sh", "-c", script],
        cwd=history,
        env=os.environ | {"GOOD": "c1", "BAD": "c100", "BISECT_SAVE_DIR": str(logs), "SKIP_GOOD_CHECK": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for(gate.exists)
    os.killpg(process.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == 143
    hint = errors.splitlines()[-1].split("resume with: ")[1]
    assert hint.startswith("BISECT_REPLAY_LOG='")
    resumed = subprocess.run(hint, shell=True, cwd=history, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert found(resumed) == "change 63 [wip]"
    assert len(list(logs.glob("*.log"))) == 2
    assert not (history / "bisect-logs").exists()


def test_saved_logs_do_not_show_in_git_status(history: Path) -> None:
    """B43, B45: one log, in a folder that git ignores without an entry of the user's."""
    found(bisect(history, "--good", "c1", "--bad", "c100", "--", *BUG))
    assert git(history, "status", "--porcelain", "--untracked-files=all") == ""
    assert len(list((history / "bisect-logs").glob("*.log"))) == 1


def test_log_is_found_by_a_relative_path_and_edited_logs_count(history: Path) -> None:
    """B46, B47"""
    found(bisect(history, "--good", "c1", "--bad", "c100", "--", *BUG))
    log = log_of(history)
    sha = git(history, "rev-parse", "c75")
    log.write_text(log.read_text().replace(f"git bisect bad {sha}", f"git bisect skip {sha}"))
    relative = os.path.relpath(log, history / "sub dir")
    command = "sh", "-c", "test $(cat ../value) -lt 63"
    assert found(bisect(history / "sub dir", "--replay", relative, "--", *command)) == "change 63 [wip]"


def test_adjacent_ends_cost_one_run_each(history: Path, tmp_path: Path) -> None:
    """B49"""
    counter = tmp_path / "runs"
    command = counting(counter, "test $(cat value) -lt 63")
    assert found(bisect(history, "--good", "c62", "--bad", "c63", "--", *command)) == "change 63 [wip]"
    assert values(counter) == [62, 63]
    trusting = bisect(history, "--good", "c62", "--bad", "c63", "--skip-good-check", "--fresh", "--", *command)
    assert found(trusting) == "change 63 [wip]"
    assert set(values(counter)[2:]) == {63}


def test_good_when_added_takes_the_newest_addition(tmp_path: Path) -> None:
    """B52: the test was added at c5, deleted at c20 and added again at c30."""

    def files(i: int) -> dict[str, str]:
        return numbered(i) | ({"tests/test_x.py": "pass\n"} if 5 <= i < 20 or i >= 30 else {})

    repository = make_history(tmp_path / "r", 100, files)
    result = bisect(repository, "--good-when-added", "tests/test_x.py", "--bad", "c100", "--", *BUG)
    assert found(result) == "change 63 [wip]"
    assert "GOOD " + git(repository, "rev-parse", "--short=10", "c30") in result.stderr


def test_swapped_ends_are_named_so(history: Path, tmp_path: Path) -> None:
    """B15"""
    counter = tmp_path / "runs"
    refused = refusal(bisect(history, "--good", "c100", "--bad", "c1", "--", *counting(counter, "true")))
    assert "GOOD and BAD are swapped" in refused
    assert not counter.exists()


def test_json_says_what_the_text_says_when_no_commit_is_found(history: Path, tmp_path: Path) -> None:
    """B09, B53"""
    script = "v=$(cat value); [ $v -ge 55 ] && [ $v -le 70 ] && exit 125; test $v -lt 63"
    arguments = "--deterministic", "--json", str(tmp_path / "r.json")
    result = bisect(history, "--good", "c1", "--bad", "c100", *arguments, "--", "sh", "-c", script)
    answer = json.loads((tmp_path / "r.json").read_text())
    assert result.returncode == answer["exit_code"] == 1
    assert answer["status"] == "range"
    assert [len(answer["suspects"]), answer["first_bad"]] == [17, None]
    assert answer["runs"] < 16
    assert "Traceback" not in result.stderr
    assert "+ " not in result.stderr
