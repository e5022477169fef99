"""Noise, probes at once, budgets, --in-place and corrections by hand, on real git repositories."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from bisect_repositories import (
    BUG,
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
from waiting import HANG_S, QUICK_S, wait_for

from rlcanary.system.processes import identify

pytestmark = pytest.mark.usefixtures("plain_git")

ENDS = "--good", "c1", "--bad", "c100"


def flaky(counter: Path, false_fail: int, false_pass: int, culprit: int = 63) -> tuple[str, ...]:
    """Lies this many per cent of the time, by a sequence of its own."""
    script = (
        f"echo x >> '{counter}'; n=$(wc -l < '{counter}'); r=$((0x$(echo $n | md5sum | cut -c1-6) % 100));"
        f"if [ $(cat value) -lt {culprit} ]; then [ $r -ge {false_fail} ]; else [ $r -lt {false_pass} ]; fi"
    )
    return "sh", "-c", script


def test_command_that_lies_one_time_in_five_does_not_lead_astray(history: Path, tmp_path: Path) -> None:
    lying = flaky(tmp_path / "runs", 20, 20)
    result = bisect(history, *ENDS, "--json", str(tmp_path / "r.json"), "--confidence", "0.9", "--", *lying)
    assert found(result) == "change 63 [wip]"
    answer = json.loads((tmp_path / "r.json").read_text())
    assert answer["probability"] >= 0.9
    assert answer["posterior"][answer["first_bad"]["sha"]] == pytest.approx(answer["probability"])
    assert 0.05 < answer["estimates"]["false_fail"] < 0.45
    assert "The command is flaky" in result.stdout
    assert "next best: " in result.stdout
    assert re.search(r"\d good, \d bad|\d bad, good|good, \d bad|\d good, bad|\d bad, \d good", result.stdout)


def test_higher_confidence_takes_more_runs(history: Path, tmp_path: Path) -> None:
    runs = []
    for confidence in ("0.8", "0.999"):
        arguments = "--confidence", confidence, "--fresh", "--json", str(tmp_path / "r.json")
        found(bisect(history, *ENDS, *arguments, "--", *BUG))
        answer = json.loads((tmp_path / "r.json").read_text())
        assert answer["probability"] >= float(confidence)
        runs.append(answer["runs"])
    assert runs[0] < runs[1]


def test_deterministic_search_is_plain_halving(history: Path, tmp_path: Path) -> None:
    counter = tmp_path / "runs"
    command = counting(counter, "test $(cat value) -lt 63")
    assert found(bisect(history, *ENDS, "--deterministic", "--", *command)) == "change 63 [wip]"
    assert values(counter) == [1, 100, 50, 75, 62, 68, 65, 63]


def test_ends_that_fail_alike_are_refused(history: Path, tmp_path: Path) -> None:
    refused = refusal(bisect(history, *ENDS, "--", *flaky(tmp_path / "runs", 50, 50)))
    assert re.search("GOOD and BAD cannot be told apart: GOOD passed |GOOD .* fails|BAD .* passes", refused)


def test_flaky_failure_of_good_does_not_refuse_it(history: Path, tmp_path: Path) -> None:
    once = f"[ $(cat value) = 1 ] && [ ! -e '{tmp_path}/once' ] && touch '{tmp_path}/once' && exit 1"
    result = bisect(history, *ENDS, "--", "sh", "-c", f"{once}; test $(cat value) -lt 63")
    assert found(result) == "change 63 [wip]"


def test_end_that_the_result_rests_on_runs_again(history: Path, tmp_path: Path) -> None:
    """BAD failed by chance once, and every other commit passes: it is not named the culprit for that."""
    once = f"[ $(cat value) = 100 ] && [ ! -e '{tmp_path}/once' ] && touch '{tmp_path}/once' && exit 1"
    result = bisect(history, *ENDS, "--", "sh", "-c", f"{once}; true")
    assert "BAD (" in refusal(result)
    assert " passes (exit 0, passed " in refusal(result)


def test_history_that_breaks_is_mended_and_breaks_again_is_called_so(history: Path, tmp_path: Path) -> None:
    script = "v=$(cat value); [ $v -ge 30 ] && [ $v -lt 60 ] && exit 1; test $v -lt 80"
    log = tmp_path / "earlier.log"
    seen = [f"git bisect {'bad' if value < 60 else 'good'} c{value}" for value in (40, 45, 50, 55, 62, 66, 70, 74)]
    log.write_text("\n".join(["git bisect start c100 c1", *seen]) + "\n")
    result = bisect(history, "--replay", str(log), "--json", str(tmp_path / "r.json"), "--", "sh", "-c", script)
    assert "breaks more than once" in result.stdout
    answer = json.loads((tmp_path / "r.json").read_text())
    bad, good = (int(git(history, "show", f"{sha}:value")) for sha in answer["relapse"])
    assert 30 <= bad < 60 <= good < 80
    suspects = {git(history, "show", f"{suspect['sha']}:value") for suspect in answer["suspects"]}
    assert suspects & {"30", "80"}


def test_two_commits_that_break_a_part_each_are_both_named(history: Path, tmp_path: Path) -> None:
    half = flaky(tmp_path / "runs", 50, 50, culprit=0)[-1]
    script = f"v=$(cat value); [ $v -lt 40 ] && exit 0; [ $v -ge 70 ] && exit 1; {half}"
    result = bisect(history, *ENDS, "--json", str(tmp_path / "r.json"), "--", "sh", "-c", script)
    assert result.returncode == 1
    assert "two commits break it, each a part of the runs" in result.stdout
    assert re.search(r"change 40 \[wip\]\n  from here on \d+% of the runs fail, probability 9[5-9]", result.stdout)
    answer = json.loads((tmp_path / "r.json").read_text())
    assert answer["status"] == "steps"
    assert answer["first_bad"] is None
    named = [[git(history, "show", f"{sha}:value") for sha in step["suspects"]] for step in answer["steps"]]
    assert named == [["40"], ["70"]]
    assert [step["failure_rate"] for step in answer["steps"]] == pytest.approx([0.5, 1.0], abs=0.15)
    assert min(step["probability"] for step in answer["steps"]) >= 0.95
    assert "two commits break it, each a part of the runs:" in bisect(history, "status").stdout
    again = bisect(history, *ENDS, "--", "sh", "-c", script)
    assert "two commits break it" in again.stdout
    assert "outcomes reused" in again.stdout or "already" in again.stderr + again.stdout


def test_history_of_the_tracker_tells_how_flaky_the_test_is(history: Path) -> None:
    from rlcanary.bisect.line.past_runs import past_runs
    from rlcanary.bisect.search.pass_fail_noise import History
    from rlcanary.system.git import Repository

    folder = history / "tests" / "unit" / "unit_results"
    folder.mkdir(parents=True)
    outcomes = ["passed"] * 5 + ["failed"] + ["passed"] * 4 + ["failed", "failed", "failed"] + ["passed"] * 3
    nodeid = "tests/unit/test_x.py::test_y"
    for number, outcome in enumerate([*outcomes, "failed", "failed"]):
        tag = "c100" if number >= len(outcomes) else "c3"
        when = f"2026-01-01T00:00:{number:02d}+00:00"
        commit = git(history, "rev-parse", tag)
        document = {
            "start_time_utc": when,
            "metrics": {},
            "git_commit": commit,
            "tests": {nodeid: {"outcome": outcome}},
        }
        (folder / f"run{number:03d}.json").write_text(json.dumps(document))
    ends = git(history, "rev-parse", "c10"), git(history, "rev-parse", "c90")
    repository = Repository.around(history)
    # The three failures in a row were a breakage of another time.
    assert past_runs(("pytest", nodeid), repository, *ends) == History(12, 1, 0, 2)
    assert past_runs(("pytest", "tests/unit/test_x.py"), repository, *ends) is None


def test_probes_run_at_once_and_find_the_same_commit(history: Path, tmp_path: Path) -> None:
    counter = tmp_path / "at once"
    # Probes between the ends wait until three have met, once.
    n_running = f"$(($(grep -c + '{counter}') - $(grep -c - '{counter}')))"
    meet = f"until [ -e '{tmp_path}/met' ]; do [ {n_running} -ge 3 ] && touch '{tmp_path}/met'; sleep 0.02; done"
    is_between = "[ $(cat value) -gt 1 ] && [ $(cat value) -lt 100 ]"
    script = f"echo + >> '{counter}'; {is_between} && {meet}; echo - >> '{counter}'; test $(cat value) -lt 63"
    result = bisect(history, *ENDS, "--jobs", "4", "--", "sh", "-c", script)
    assert found(result) == "change 63 [wip]"
    level = most = 0
    for line in counter.read_text().split():
        level += 1 if line == "+" else -1
        most = max(most, level)
    assert 3 <= most <= 4
    assert len(git(history, "worktree", "list").splitlines()) == 1


def test_probe_that_has_become_worthless_is_ended_with_its_children(history: Path, tmp_path: Path) -> None:
    """BAD and GOOD are quick; of the four in between the oldest hangs, and the answers of the others make it worthless.

    These wait until it hangs.
    """
    child = tmp_path / "child"
    hang = (
        f"[ $v -lt 45 ] && {{ sleep 9999 & echo $! >> '{child}'; wait; }}; until [ -e '{child}' ]; do sleep 0.1; done"
    )
    script = f"v=$(cat value); [ $v -gt 1 ] && [ $v -lt 100 ] && {{ {hang}; }}; test $v -lt 63"
    result = bisect(history, *ENDS, "--jobs", "4", "--", "sh", "-c", script)
    assert found(result) == "change 63 [wip]"
    assert "cancelled: its outcome" in result.stderr
    children = [int(line) for line in child.read_text().split()]
    assert not any(map(identify, children))


def test_journal_of_probes_at_once_is_right_after_sigkill(history: Path, tmp_path: Path) -> None:
    counter, children = tmp_path / "runs", tmp_path / "children"
    is_late = f"[ $(wc -l < '{counter}') -ge 5 ] && [ ! -e '{tmp_path}/free' ]"
    hang = f"if {is_late}; then sleep 9999 & echo $! >> '{children}'; wait; fi"
    command = counting(counter, f"{hang}; test $(cat value) -lt 63")
    with started_search(history, *ENDS, "--jobs", "3", "--", *command) as search:
        wait_for(lambda: children.exists() and len(children.read_text().split()) >= 2)
        search.kill()
        search.communicate()
    (tmp_path / "free").touch()
    (journal,) = (history / ".git" / "rlcanary" / "bisect").glob("*/journal.jsonl")
    known = [json.loads(line) for line in journal.read_text().splitlines()[1:]]
    finished = {event["run"] for event in known if event["event"] == "observation"}
    result = bisect(history, *ENDS, "--jobs", "3", "--", *command)
    assert found(result) == "change 63 [wip]"
    assert f"continuing the interrupted search, {len(finished)} outcomes known" in result.stderr
    pids = [int(line) for line in children.read_text().split()]
    assert not any(map(identify, pids))
    assert len(git(history, "worktree", "list").splitlines()) == 1


def test_budget_of_runs_stops_with_the_posterior_and_the_same_command_goes_on(history: Path, tmp_path: Path) -> None:
    counter = tmp_path / "runs"
    command = counting(counter, "test $(cat value) -lt 63")
    first = bisect(history, *ENDS, "--budget-runs", "5", "--json", str(tmp_path / "r.json"), "--", *command)
    assert first.returncode == 1
    assert len(values(counter)) == 5
    answer = json.loads((tmp_path / "r.json").read_text())
    assert (answer["status"], answer["runs"]) == ("budget", 5)
    assert answer["first_bad"] is None
    assert git(history, "rev-parse", "c63") in [suspect["sha"] for suspect in answer["suspects"]]
    assert "budget of 5 runs is spent" in first.stdout
    second = bisect(history, *ENDS, "--", *command)
    assert found(second) == "change 63 [wip]"
    assert "5 outcomes known" in second.stderr


def test_budget_of_minutes_ends_what_runs(history: Path) -> None:
    script = "v=$(cat value); [ $v -gt 1 ] && [ $v -lt 100 ] && sleep 9999; test $v -lt 63"
    result = bisect(history, *ENDS, "--budget-minutes", "0.05", "--", "sh", "-c", script)
    assert result.returncode == 1
    assert "budget of 0.05 minutes" in result.stdout
    assert "one of these " in result.stdout


def test_dry_run_predicts_runs_and_time_and_starts_nothing(history: Path, tmp_path: Path) -> None:
    counter = tmp_path / "runs"
    command = counting(counter, "sleep 0.1; test $(cat value) -lt 63")
    before = bisect(history, *ENDS, "--dry-run", "--", *command)
    assert before.returncode == 0
    assert not counter.exists()
    assert "duration of a run is unknown" in before.stdout
    found(bisect(history, *ENDS, "--", *command))
    after = bisect(history, *ENDS, "--dry-run", "--jobs", "4", "--", *command)
    runs, rounds = map(int, re.findall(r"about (\d+) runs in (\d+) rounds", after.stdout)[0])
    assert 9 <= runs <= 30
    assert rounds <= 7
    assert "a run as in earlier searches" in after.stdout


def test_in_place_search_leaves_branch_untracked_and_ignored_files(tmp_path: Path) -> None:
    def files(i: int) -> dict[str, str]:
        tracked = {"model.bin": "tracked\n", "data/x": "tracked\n"} if i == 50 else {}
        return {"value": f"{i}\n", ".gitignore": "model.bin\n", **tracked}

    repository = make_history(tmp_path / "r", 100, files)
    for name in ("model.bin", "notes", "data"):
        (repository / name).write_text("mine\n")
    before = contents(repository)
    where = f"[ \"$PWD\" = '{repository}' ] || exit 99; echo dirty > value.new; cp value x; echo 0 > value"
    result = bisect(repository, *ENDS, "--in-place", "--", "sh", "-c", f"{where}; test $(cat x) -lt 63")
    assert found(result) == "change 63 [wip]"
    assert "in the way of this commit: data, model.bin: " in result.stderr
    assert git(repository, "symbolic-ref", "HEAD") == "refs/heads/main"
    assert {"model.bin", "notes", "data"} <= {
        line[3:] for line in git(repository, "status", "--short", "--ignored").splitlines()
    }
    after = contents(repository)
    assert {name: digest for name, digest in after.items() if name in before and ".git/" not in name} == {
        name: digest for name, digest in before.items() if ".git/" not in name
    }
    (repository / "value").write_text("edited\n")
    assert "uncommitted changes" in refusal(bisect(repository, *ENDS, "--in-place", "--", "true"))


@pytest.mark.parametrize("mark", ["--assume-unchanged", "--skip-worktree"])
def test_in_place_search_is_refused_where_git_is_told_not_to_look_at_an_edited_file(history: Path, mark: str) -> None:
    git(history, "update-index", mark, "value")
    (history / "value").write_text("mine\n")
    assert "git does not show changes of value" in refusal(bisect(history, *ENDS, "--in-place", "--", "true"))
    assert (history / "value").read_text() == "mine\n"


def test_killed_in_place_search_that_ends_at_head_continues_at_the_same_command(history: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    script = f"[ $(cat value) = 50 ] && [ ! -e '{gate}' ] && {{ touch '{gate}'; sleep 87; }}; test $(cat value) -lt 63"
    command = ("--good", "c1", "--bad", "HEAD", "--in-place", "--", "sh", "-c", script)
    with started_search(history, *command) as search:
        wait_for(gate.exists)
        search.kill()
        search.communicate()
    assert git(history, "rev-parse", "HEAD") == git(history, "rev-parse", "c50")
    result = bisect(history, *command)
    assert "continuing the interrupted search" in result.stderr
    assert found(result) == "change 63 [wip]"
    assert git(history, "symbolic-ref", "HEAD") == "refs/heads/main"


def test_pinned_file_that_older_commits_lack_is_in_no_commits_way(tmp_path: Path) -> None:
    def files(i: int) -> dict[str, str]:
        return numbered(i) | ({"tests/check.sh": "test $(cat value) -lt 11\n"} if i >= 8 else {})

    repository = make_history(tmp_path / "r", 16, files)
    options = ("--in-place", "--deterministic", "--good", "c1", "--bad", "c16")
    assert found(bisect(repository, *options, "--", "sh", "tests/check.sh")) == "change 11 [wip]"
    assert git(repository, "status", "--short", "--untracked-files=all") == ""
    assert git(repository, "symbolic-ref", "HEAD") == "refs/heads/main"


def test_log_of_an_in_place_search_is_in_no_branchs_way(tmp_path: Path) -> None:
    repository = make_history(
        tmp_path / "r", 16, lambda i: numbered(i) | ({"bisect-logs/.gitignore": "*\n"} if i == 16 else {})
    )
    options = ("--in-place", "--deterministic", "--good", "c1", "--bad", "c16")
    assert found(bisect(repository, *options, "--", "sh", "-c", "test $(cat value) -lt 15")) == "change 15 [wip]"
    assert git(repository, "symbolic-ref", "HEAD") == "refs/heads/main"
    assert git(repository, "status", "--short") == ""


def test_in_place_search_returns_to_a_branch_that_shares_its_name_with_a_tag(history: Path) -> None:
    git(history, "tag", "main", "c20")
    found(bisect(history, *ENDS, "--in-place", "--", "sh", "-c", "test $(cat value) -lt 63"))
    assert git(history, "symbolic-ref", "HEAD") == "refs/heads/main"


def kill_at_c50(history: Path, gate: Path) -> str:
    """Kill an in-place search in its run of c50, and return its script, which does not hang again."""
    script = f"[ $(cat value) = 50 ] && [ ! -e '{gate}' ] && {{ touch '{gate}'; sleep 87; }}; test $(cat value) -lt 63"
    with started_search(history, *ENDS, "--in-place", "--", "sh", "-c", script) as search:
        wait_for(gate.exists)
        search.kill()
        search.communicate()
    return script


@pytest.fixture
def killed_in_place(history: Path, tmp_path: Path) -> Path:
    """A checkout that a killed search left at c50."""
    kill_at_c50(history, tmp_path / "killed")
    return history


def test_later_search_leaves_a_checkout_that_the_user_has_moved_since_the_kill(killed_in_place: Path) -> None:
    git(killed_in_place, "checkout", "--quiet", "-b", "work")
    found(bisect(killed_in_place, *ENDS, "--", "sh", "-c", "test $(cat value) -lt 63"))
    assert git(killed_in_place, "symbolic-ref", "HEAD") == "refs/heads/work"
    git(killed_in_place, "checkout", "--quiet", "--detach", "c51")
    found(bisect(killed_in_place, *ENDS, "--fresh", "--", "sh", "-c", "test $(cat value) -lt 63"))
    assert git(killed_in_place, "rev-parse", "HEAD") == git(killed_in_place, "rev-parse", "c51")


def test_search_in_another_checkout_does_not_move_to_the_branch_of_the_killed_one(
    killed_in_place: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    git(killed_in_place, "worktree", "add", "--quiet", "--detach", str(other), "c50")
    found(bisect(other, *ENDS, "--", "sh", "-c", "test $(cat value) -lt 63"))
    assert git(other, "rev-parse", "HEAD") == git(other, "rev-parse", "c50")
    found(bisect(killed_in_place, *ENDS, "--", "sh", "-c", "test $(cat value) -lt 63"))
    assert git(killed_in_place, "symbolic-ref", "HEAD") == "refs/heads/main"


def test_checkout_of_a_killed_in_place_search_goes_home_at_the_next_start(history: Path, tmp_path: Path) -> None:
    script = kill_at_c50(history, tmp_path / "gate")
    assert git(history, "rev-parse", "HEAD") == git(history, "rev-parse", "c50")
    result = bisect(history, *ENDS, "--in-place", "--", "sh", "-c", script)
    assert found(result) == "change 63 [wip]"
    assert git(history, "symbolic-ref", "HEAD") == "refs/heads/main"


def test_options_have_defaults_in_pyproject_and_the_outcome_table_counts(tmp_path: Path) -> None:
    settings = "[tool.rlcanary.bisect]\ndeterministic = true\n"
    repository = make_history(tmp_path / "r", 16, lambda i: numbered(i) | {"pyproject.toml": settings})
    ends = "--good", "c1", "--bad", "c16"
    assert "has no entry 'deterministic'" in refusal(bisect(repository, *ends, "--", "true"))
    (repository / "pyproject.toml").write_text(
        f'[tool.rlcanary.bisect]\ntimeout = {QUICK_S}\non-timeout = "bad"\nenv = "none"\n'
        '[tool.rlcanary.bisect.outcomes]\n3 = "untestable"\n4 = "abort"\n'
        '[tool.rlcanary.bisect.patterns]\n"lost the node" = "infra"\n'
    )
    hang = "[ $v -ge 9 ] && exec sleep 9999"
    once = f"[ $v = 8 ] && [ ! -e '{tmp_path}/once' ] && touch '{tmp_path}/once' && echo lost the node && exit 1"
    result = bisect(repository, *ends, "--", "sh", "-c", f"v=$(cat value); {once}; [ $v = 4 ] && exit 3; {hang}; true")
    assert found(result) == "change 9 [wip]"
    assert "printed 'lost the node'" in result.stderr
    aborted = refusal(bisect(repository, *ends, "--", "sh", "-c", "exit 4"))
    assert "stopped: exit 4" in aborted
    assert "rlcanary bisect --replay" in aborted


def rlcanary(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["rlcanary", "bisect", *arguments], cwd=repository, capture_output=True, text=True, timeout=HANG_S, check=False
    )


def test_outcomes_are_shown_taken_back_and_given_by_hand(history: Path, tmp_path: Path) -> None:
    """B46"""
    counter = tmp_path / "runs"
    command = counting(counter, "test $(cat value) -lt 63")
    bisect(history, *ENDS, "--budget-runs", "4", "--", *command)
    status = rlcanary(history, "status").stdout
    assert "search cut short: sh -c" in status
    assert "4 outcomes known, about " in status
    shown = rlcanary(history, "visualize").stdout
    assert shown.startswith("GOOD ")
    assert len([line for line in shown.splitlines() if " change " in line]) == 100
    assert "bad      change 75" in re.sub(" +", "      ", shown).replace(
        "bad      change      75", "bad      change 75"
    )
    assert rlcanary(history, "undo", "2").stdout.count("taken back: ") == 2
    marked = rlcanary(history, "mark", "c70", "bad").stdout
    assert "marked bad" in marked
    log = rlcanary(history, "log").stdout
    assert f"git bisect bad {git(history, 'rev-parse', 'c70')}" in log
    assert git(history, "rev-parse", "c75") not in log
    line = marked.split("go on with: ")[1]
    result = subprocess.run(line, shell=True, cwd=history, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert found(result) == "change 63 [wip]"
    assert "3 outcomes known" in result.stderr
    assert not [value for value in values(counter)[4:] if value > 70]
    assert "search finished" in rlcanary(history, "status").stdout
    assert "taken back: " in rlcanary(history, "undo").stdout
    assert "search cut short" in rlcanary(history, "status").stdout


def test_contradiction_loses_no_run_and_can_be_taken_back(history: Path) -> None:
    believed = *ENDS, "--deterministic"
    bisect(history, *believed, "--budget-runs", "4", "--", *BUG)
    rlcanary(history, "mark", "c2", "bad")
    assert "contradict each other" in refusal(bisect(history, *believed, "--", *BUG))
    for look in ("status", "visualize"):
        shown = rlcanary(history, look)
        assert (shown.returncode, len(shown.stderr.splitlines())) == (2, 1)
        assert "`rlcanary bisect undo`" in shown.stderr
    assert "git bisect bad" in rlcanary(history, "log").stdout
    assert "taken back: bad" in rlcanary(history, "undo").stdout
    result = bisect(history, *believed, "--", *BUG)
    assert found(result) == "change 63 [wip]"
    assert "4 outcomes known" in result.stderr


def test_refused_start_does_not_take_the_place_of_the_last_search(history: Path) -> None:
    bisect(history, *ENDS, "--budget-runs", "4", "--", *BUG)
    refusal(bisect(history, *ENDS, "--", "true"))
    status = rlcanary(history, "status").stdout
    assert status.startswith("the last start was refused: ")
    assert "4 outcomes known" in status
    assert "marked bad" in rlcanary(history, "mark", "c90", "bad").stdout
    assert "4 outcomes known" not in rlcanary(history, "status").stdout
    assert "5 outcomes known" in bisect(history, *ENDS, "--", *BUG).stderr


def test_fresh_start_gives_up_the_search_that_was_cut_short(history: Path) -> None:
    bisect(history, *ENDS, "--budget-runs", "4", "--", *BUG)
    rlcanary(history, "mark", "c20", "bad")
    assert found(bisect(history, *ENDS, "--fresh", "--", *BUG)) == "change 63 [wip]"
    again = bisect(history, *ENDS, "--", *BUG)
    assert found(again) == "change 63 [wip]"
    assert "cut short" not in again.stderr


def test_likeliest_of_many_suspects_are_the_ones_that_are_listed(history: Path) -> None:
    result = bisect(history, *ENDS, "--budget-runs", "7", "--", *BUG)
    for shown in (result.stdout, rlcanary(history, "status").stdout):
        assert "change 63 [wip]" in shown
        assert "and " in shown
        assert "change 3 [wip]" not in shown


def test_corrections_that_cannot_be_made_cost_one_line(history: Path, tmp_path: Path) -> None:
    assert "there was no search here yet" in rlcanary(history, "status").stderr
    bisect(history, "--good", "c10", "--bad", "c20", "--", "true")
    assert "only 5 outcomes to undo" in rlcanary(history, "undo", "9").stderr
    assert "not in the range" in rlcanary(history, "mark", "c30", "bad").stderr
    assert "does not name a commit" in rlcanary(history, "mark", "c3x", "bad").stderr
    gate = tmp_path / "gate"
    with started_search(history, *ENDS, "--", "sh", "-c", f"touch '{gate}'; sleep 9999") as search:
        wait_for(gate.exists)
        for subcommand in (["undo"], ["mark", "c50", "bad"]):
            refused = rlcanary(history, *subcommand)
            assert refused.returncode == 2
            assert "already running" in refused.stderr
        assert f"search running, process {search.pid}" in rlcanary(history, "status").stdout
        search.send_signal(signal.SIGINT)
        search.communicate(timeout=HANG_S)


def test_log_printed_by_the_subcommand_is_the_one_that_was_saved(history: Path) -> None:
    found(bisect(history, *ENDS, "--", *BUG))
    assert rlcanary(history, "log").stdout == log_of(history).read_text()


def test_terminal_shows_the_posterior_and_a_pipe_gets_plain_lines(history: Path, tmp_path: Path) -> None:
    import pty

    command = ["rlcanary", "bisect", *ENDS, "--", "sh", "-c", "sleep 0.1; test $(cat value) -lt 63"]
    main, other = pty.openpty()
    process = subprocess.Popen(
        command, cwd=history, stdout=other, stderr=other, env=os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    )
    os.close(other)
    seen = b""
    while True:
        try:
            chunk = os.read(main, 65536)
        except OSError:
            break
        if not chunk:
            break
        seen += chunk
    os.close(main)
    assert process.wait(timeout=HANG_S) == 0
    text = seen.decode()
    for part in ("█", "likeliest culprit: ", "run 3 of about ", " left"):
        assert part in text
    plain = bisect(history, *ENDS, "--fresh", "--", *BUG, env={"NO_COLOR": "1"})
    assert "\x1b" not in plain.stdout + plain.stderr
    assert "likeliest culprit" not in plain.stderr


def test_folder_of_the_logs_that_a_run_deletes_is_made_again(history: Path) -> None:
    script = f"rm -rf '{history}/bisect-logs'; test $(cat value) -lt 63"
    assert found(bisect(history, *ENDS, "--", "sh", "-c", script)) == "change 63 [wip]"
    assert len(list((history / "bisect-logs").glob("*.log"))) == 1
    assert git(history, "status", "--short") == ""


def test_signatures_that_git_log_shows_do_not_confuse_the_search(history: Path, tmp_path: Path) -> None:
    verifier = tmp_path / "gpg"
    verifier.write_text("#!/bin/sh\necho 'gpg: Good signature' >&2\necho '[GNUPG:] GOODSIG 0 me'\n")
    verifier.chmod(0o755)
    git(history, "config", "gpg.program", str(verifier))
    git(history, "config", "log.showSignature", "true")
    facts, message = git(history, "cat-file", "commit", "c100").split("\n\n", 1)
    signature = "gpgsig -----BEGIN PGP SIGNATURE-----\n \n AAAA\n -----END PGP SIGNATURE-----"
    (tmp_path / "signed").write_text(f"{facts}\n{signature}\n\n{message}\n")
    signed = git(history, "hash-object", "-t", "commit", "-w", str(tmp_path / "signed"))
    assert "Good signature" in git(history, "log", "-1", signed)
    result = bisect(history, *ENDS[:-1], signed, "--", "sh", "-c", "test $(cat value) -lt 63")
    assert found(result) == "change 63 [wip]"
