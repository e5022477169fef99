"""`rlcanary bisect` interrupted, killed, timed out, and taken up again. B01 to B53 name the cases of the issue."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from bisect_repositories import (
    BUG,
    DRIVER,
    bisect,
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
from waiting import HANG_S, QUICK_S, wait_for

from rlcanary.system.processes import identify

pytestmark = pytest.mark.usefixtures("plain_git")


def slow_from_the_fourth_run(counter: Path) -> tuple[str, ...]:
    """Hangs, with a child, on its fourth run; later runs are quick."""
    hang = f"if [ $(wc -l < '{counter}') = 4 ]; then sleep 9999 & echo $! > '{counter}.child'; wait; fi"
    return counting(counter, f"{hang}; test $(cat value) -lt 63")


@pytest.mark.parametrize("to_group", [False, True])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_stops_the_search_saves_a_log_and_the_log_resumes(
    history: Path, tmp_path: Path, signum: signal.Signals, to_group: bool
) -> None:
    """B28-B31, B44, B45"""
    counter, child = tmp_path / "runs", tmp_path / "runs.child"
    command = slow_from_the_fourth_run(counter)
    with started_search(history, "--good", "c1", "--bad", "c100", "--", *command) as search:
        wait_for(lambda: child.exists() and child.read_text().strip())
        (os.killpg if to_group else os.kill)(search.pid, signum)
        _, errors = search.communicate(timeout=HANG_S)
    assert search.returncode == 128 + signum
    assert f"interrupted by {signum.name}" in errors
    assert identify(int(child.read_text())) is None
    assert len(git(history, "worktree", "list").splitlines()) == 1
    assert len(list((history / "bisect-logs").glob("*.log"))) == 1
    hint = errors.splitlines()[-1].split("resume with: ")[1]
    resumed = subprocess.run(hint, shell=True, cwd=history, capture_output=True, text=True, timeout=HANG_S)
    assert found(resumed) == "change 63 [wip]"
    before, after = values(counter)[:3], values(counter)[4:]
    assert values(counter)[3] == after[0]
    assert not set(before) & set(after)


def test_interruption_of_the_good_check_is_called_one(history: Path, tmp_path: Path) -> None:
    """B33"""
    with started_search(
        history, "--good", "c1", "--bad", "c100", "--", "sh", "-c", f"touch '{tmp_path}/on'; sleep 9999"
    ) as search:
        wait_for((tmp_path / "on").exists)
        search.send_signal(signal.SIGINT)
        _, errors = search.communicate(timeout=HANG_S)
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
    orphan = identify(int(child.read_text()))
    assert orphan is not None
    assert len(git(history, "worktree", "list").splitlines()) == 2
    result = bisect(history, "--good", "c1", "--bad", "c100", "--", *command)
    assert found(result) == "change 63 [wip]"
    assert "3 outcomes known" in result.stderr
    assert identify(orphan.pid) != orphan
    assert len(git(history, "worktree", "list").splitlines()) == 1
    assert not set(values(counter)[:3]) & set(values(counter)[4:])
    again = bisect(history, "--good", "c1", "--bad", "c100", "--", *command)
    assert "continuing" not in again.stderr


def test_same_replay_continues_after_sigkill(history: Path, tmp_path: Path) -> None:
    counter, child, log = tmp_path / "runs", tmp_path / "runs.child", tmp_path / "log"
    good, bad, known = (git(history, "rev-parse", name) for name in ("c1", "c100", "c30"))
    log.write_text(f"git bisect start {bad} {good}\ngit bisect good {known}\n")
    arguments = "--replay", str(log), "--", *slow_from_the_fourth_run(counter)
    with started_search(history, *arguments) as search:
        wait_for(lambda: child.exists() and child.read_text().strip())
        search.kill()
        search.communicate()
    result = bisect(history, *arguments)
    assert found(result) == "change 63 [wip]"
    assert "continuing" in result.stderr
    assert not set(values(counter)[:3]) & set(values(counter)[4:])
    log.write_text(log.read_text() + f"git bisect good {git(history, 'rev-parse', 'c50')}\n")
    assert "continuing" not in bisect(history, *arguments).stderr


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
        out, errors = first.communicate(timeout=HANG_S)
    assert first.returncode == 0, errors
    assert "change 63 [wip]" in out


def test_timeout_ends_the_whole_process_group_and_is_retried_as_infrastructure(history: Path, tmp_path: Path) -> None:
    """B51: the commit that hangs, c50, is tried three times and stepped around."""
    counter = tmp_path / "runs"
    hang = f"[ $(cat value) = 50 ] && {{ sleep 9999 & echo $! >> '{tmp_path}/children'; wait; }}"
    command = counting(counter, f"{hang}; test $(cat value) -lt 63")
    result = bisect(history, "--good", "c1", "--bad", "c100", "--timeout", str(QUICK_S), "--", *command)
    assert found(result) == "change 63 [wip]"
    assert values(counter).count(50) == 3
    assert "timed out after " in result.stdout
    assert " s, 3 times" in result.stdout
    children = [int(line) for line in (tmp_path / "children").read_text().split()]
    assert len(children) == 3
    assert not any(map(identify, children))


def test_run_that_the_machine_killed_is_tried_again(history: Path, tmp_path: Path) -> None:
    """B08"""
    once = f"[ $(cat value) = 50 ] && [ ! -e '{tmp_path}/once' ] && touch '{tmp_path}/once' && kill -9 $$"
    result = bisect(history, "--good", "c1", "--bad", "c100", "--", "sh", "-c", f"{once}; test $(cat value) -lt 63")
    assert found(result) == "change 63 [wip]"
    assert result.stderr.count("infra") == 1
    assert "killed by SIGKILL" in result.stderr


@pytest.mark.parametrize("retries", [0, 1])
def test_commit_is_tried_again_as_often_as_retries_says(history: Path, tmp_path: Path, retries: int) -> None:
    command = counting(tmp_path / "runs", "[ $(cat value) = 50 ] && kill -9 $$; test $(cat value) -lt 63")
    result = bisect(history, "--good", "c1", "--bad", "c100", "--retries", str(retries), "--", *command)
    assert found(result) == "change 63 [wip]"
    assert values(tmp_path / "runs").count(50) == 1 + retries


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
    """B46: verdicts turned into skip, one added at the end."""
    found(bisect(history, "--good", "c1", "--bad", "c100", "--", *BUG))
    log = log_of(history)
    sha = git(history, "rev-parse", "c63")
    text = log.read_text().replace(f"git bisect bad {sha}", f"git bisect skip {sha}")
    log.write_text(text + "git bisect skip c64\n")
    result = bisect(history, "--replay", str(log), "--", *BUG)
    assert result.returncode == 1
    assert "one of these" in result.stdout
    assert sha in result.stdout


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "git bisect bad 1234567890123456789012345678901234567890",
            "line 5: 1234567890.* is not a commit in this repository",
        ),
        ("git bisct bad c5", "line 5: 'git bisct bad c5' is not a `git bisect` command"),
        ("git bisect good c90\ngit bisect bad c30", "the runs contradict each other: .* is good, but"),
        ('# rlcanary {"outcome": "measured"}', "line 5: a measured outcome has a `commit` and a `value`"),
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
        timeout=HANG_S,
    )
    found(result)
    line = next(line for line in result.stderr.splitlines() if line.startswith("worktree kept"))
    kept = Path(git(history, "worktree", "list", "--porcelain").split("worktree ")[2].splitlines()[0])
    assert (kept / "value").read_text() == "63\n"
    subprocess.run(line.split("delete it with: ")[1], shell=True, cwd=history, check=True)
    kept.parent.rmdir()
