"""`rlcanary bisect` in histories with merges, of flaky commands too."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from bisect_repositories import bisect, found, git, make_history, numbered, refusal, started_search
from waiting import wait_for

pytestmark = pytest.mark.usefixtures("plain_git")

FLAKES = 20
"""Percent of the runs of a good commit that fail."""


def flaky(seed: int) -> tuple[str, ...]:
    """Fails where the file `bug` is, and elsewhere by chance, which the seed and the number of the run decide."""
    chance = "$((0x$(printf '%s' \"$1-$RLCANARY_BISECT_RUN\" | md5sum | cut -c 1-6)))"
    return "sh", "-c", f"test ! -e bug && test $(({chance} % 100)) -ge {FLAKES}", "sh", str(seed)


class Line:
    """Commits made with plumbing, the fastest way to a history with branches in branches."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        git(folder, "init", "--quiet", "--initial-branch=main")
        self.folder = folder
        self.files: dict[str, str] = {}

    def commit(self, name: str, *parents: str) -> str:
        (self.folder / "number").write_text(name)
        for path, text in self.files.items():
            (self.folder / path).write_text(text)
        git(self.folder, "add", "--all")
        before = [word for parent in parents for word in ("-p", parent)]
        sha = git(self.folder, "commit-tree", *before, "-m", name, git(self.folder, "write-tree"))
        git(self.folder, "tag", name.replace(" ", "-"), sha)
        return sha

    def run_of(self, name: str, count: int, parent: str) -> str:
        for number in range(count):
            parent = self.commit(f"{name}-{number}", parent)
        return parent


def nested(folder: Path, depth: int) -> Line:
    """main, with a merged branch that holds a merged branch and so on; the innermost one holds the bug."""
    line = Line(folder)

    def branch(name: str, parent: str, left: int) -> str:
        tip = line.run_of(name, 3, parent)
        if left == 0:
            line.files["bug"] = ""
            tip = line.commit("the bug", tip)
        else:
            side = line.commit(f"{name}-side", tip)
            tip = line.commit(f"merge {left}", side, branch(f"{name}i", tip, left - 1))
        return line.run_of(f"{name}-after", 2, tip)

    start = line.commit("start")
    tip = branch("main", line.run_of("before", 4, start), depth)
    git(folder, "update-ref", "refs/heads/main", tip)
    git(folder, "reset", "--hard", "--quiet", "main")
    return line


def answer_of(folder: Path, *arguments: str) -> dict[str, Any]:
    """The JSON result of a search."""
    document = folder.parent / "result.json"
    bisect(folder, "--json", str(document), *arguments)
    answer: dict[str, Any] = json.loads(document.read_text())
    return answer


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    """A history whose 6th merge fails though both of its sides pass."""
    line = Line(tmp_path / "evil")
    tip = line.commit("start")
    for number in range(1, 11):
        tip = line.run_of(f"m{number}", 2, tip)
        side = line.run_of(f"side{number}", 4, tip)
        if number == 6:
            line.files["bug"] = ""
        tip = line.commit(f"merge{number}", line.commit(f"between{number}", tip) if number < 6 else tip, side)
    git(line.folder, "update-ref", "refs/heads/main", tip)
    git(line.folder, "reset", "--hard", "--quiet", "main")
    return line.folder


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
    document = tmp_path / "result.json"
    result = bisect(repository, "--good", "c1", "--bad", "main", "--json", str(document), "--", *command)
    assert found(result) == "wip 13"
    assert json.loads(document.read_text())["probability"] >= 0.95
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
    assert "both parents pass" in result.stdout


@pytest.mark.parametrize("confidence", [0.6, 0.95])
def test_probability_of_a_commit_in_nested_merges_is_what_was_asked_for(tmp_path: Path, confidence: float) -> None:
    folder = nested(tmp_path / "r", 3).folder
    ends = "--good", "start", "--bad", "main"
    answer = answer_of(folder, *ends, "--confidence", str(confidence), "--", "sh", "-c", "test ! -e bug")
    assert answer["first_bad"]["subject"] == "the bug"
    assert answer["probability"] >= confidence
    assert len(answer["merges"]) == 3


@pytest.mark.parametrize("seed", [0, 2])
def test_status_of_a_flaky_search_into_merges_is_the_result(tmp_path: Path, seed: int) -> None:
    """Runs inside a merge count outside too, so that both follow from the same runs."""
    folder = nested(tmp_path / "r", 2).folder
    answer = answer_of(folder, "--good", "start", "--bad", "main", "--", *flaky(seed))
    assert answer["first_bad"]["subject"] == "the bug"
    assert answer["probability"] >= 0.95
    buggy = git(folder, "rev-list", "main", "--", "bug").split()
    buggy = git(folder, "rev-list", "main", "--ancestry-path", f"^{buggy[-1]}^").split()
    good = [o["outcome"] for o in answer["observations"] if o["commit"] not in buggy]
    assert answer["estimates"]["false_fail"] == pytest.approx(good.count("bad") / len(good), abs=0.08)
    status = bisect(folder, "status").stdout
    assert "about 0 runs left" in status
    assert f"hold {answer['probability']:.1%} of the probability" in status
    assert re.findall("inside the merge [0-9a-f]{10} (.*), which has", status) == ["merge 2", "merge 1"]
    shown = bisect(folder, "visualize").stdout
    assert shown.count("inside the merge") == 2
    assert f"{answer['probability']:.1%}" in shown


@pytest.mark.parametrize("seed", range(2))
def test_flaky_merge_of_two_sides_that_pass_is_itself_the_culprit(evil: Path, tmp_path: Path, seed: int) -> None:
    document = tmp_path / "result.json"
    result = bisect(evil, "--good", "start", "--bad", "main", "--json", str(document), "--", *flaky(seed))
    assert found(result) == "merge6"
    assert re.search("both parents pass|its branch is no worse", result.stdout)
    assert "cannot be told apart" not in result.stdout
    assert json.loads(document.read_text())["runs"] < 60


def test_budget_spent_inside_a_merge_leaves_the_probability_of_both_searches(tmp_path: Path) -> None:
    folder = nested(tmp_path / "r", 1).folder
    command = "sh", "-c", "test ! -e bug"
    ends = "--good", "start", "--bad", "main"
    complete = answer_of(folder, *ends, "--", *command)
    answer = answer_of(folder, *ends, "--fresh", "--budget-runs", str(complete["runs"] - 2), "--", *command)
    assert answer["status"] == "budget"
    assert answer["merges"] == complete["merges"]
    assert sum(answer["posterior"].values()) < 0.995
    assert answer["probability"] == pytest.approx(sum(answer["posterior"][c["sha"]] for c in answer["suspects"]))


def test_search_that_is_killed_inside_merges_goes_on_from_all_finished_runs(tmp_path: Path) -> None:
    folder = nested(tmp_path / "r", 2).folder
    # Which commit gets which number of run depends on time here, so a command that flakes would make the answer luck.
    arguments = "--good", "start", "--bad", "main", "--jobs", "2", "--", "test", "!", "-e", "bug"

    def finished_runs() -> int:
        journals = (folder / ".git/rlcanary/bisect").glob("*/journal.jsonl")
        return sum(journal.read_text().count('"event": "observation"') for journal in journals)

    for runs in range(3, 28, 3):
        with started_search(folder, *arguments) as search:
            # How many runs a search needs depends on which of two ends first.
            wait_for(lambda runs=runs, search=search: finished_runs() >= runs or search.poll() is not None)
            search.kill()
    known = finished_runs()
    answer = answer_of(folder, *arguments)
    assert answer["reused"] == known
    assert answer["first_bad"]["subject"] == "the bug"
    assert answer["probability"] >= 0.95
    assert f"hold {answer['probability']:.1%} of the probability" in bisect(folder, "status").stdout


@pytest.fixture
def merged(tmp_path: Path) -> Path:
    """A merged branch of five commits, the third of which breaks the command; each commit's name is in the file `number`."""
    line = Line(tmp_path / "merged")
    base = line.run_of("main", 4, line.commit("start"))
    side = line.commit("main-side", base)
    tip = line.run_of("branch", 2, base)
    line.files["bug"] = ""
    tip = line.run_of("broken", 3, tip)
    tip = line.run_of("after", 3, line.commit("merge", side, tip))
    git(line.folder, "update-ref", "refs/heads/main", tip)
    git(line.folder, "reset", "--hard", "--quiet", "main")
    return line.folder


def unless(*untestable: str) -> tuple[str, ...]:
    """Fails where the bug is; these commits cannot be tested."""
    return "sh", "-c", f"grep -q -x -e {' -e '.join(untestable)} number && exit 125; test ! -e bug"


def test_untestable_commit_that_the_branch_left_is_no_obstacle(merged: Path) -> None:
    answer = answer_of(merged, "--good", "start", "--bad", "main", "--", *unless("main-3"))
    assert answer["first_bad"]["subject"] == "broken-0"


def test_branch_whose_tip_is_untestable_is_suspect_as_a_whole(merged: Path) -> None:
    result = bisect(merged, "--good", "start", "--bad", "main", "--", *unless("broken-2"))
    assert result.returncode == 1
    assert "is the first bad commit" not in result.stdout
    suspects = ["branch-0", "branch-1", "broken-0", "broken-1", "broken-2", "merge"]
    listed = re.findall("^  .*[0-9a-f]{40}  (.*)$", result.stdout, re.MULTILINE)
    assert listed == suspects
    status = bisect(merged, "status").stdout
    assert all(name in status for name in suspects)


def test_search_inside_a_branch_that_holds_good_starts_at_good(merged: Path) -> None:
    """What lies before GOOD is no suspect."""
    result = bisect(merged, "--good", "branch-1", "--bad", "main", "--", "sh", "-c", "test ! -e bug")
    assert found(result) == "broken-0"
    assert "searching the 3 commits" in result.stderr


def forked_before_good(folder: Path) -> Line:
    """main is a topic that forked at `old` and then merged `fixed`, which lies after a fix on the line that it left."""
    line = Line(folder)
    line.files["state"] = "broken"
    old = line.commit("old", line.commit("start"))
    topic = line.run_of("topic", 2, old)
    line.files["state"] = "works"
    fixed = line.commit("fixed", old)
    tip = line.run_of("after", 3, line.commit("merge", topic, fixed))
    line.files["state"] = "broken"
    tip = line.run_of("broken", 3, tip)
    git(folder, "update-ref", "refs/heads/main", tip)
    git(folder, "reset", "--hard", "--quiet", "main")
    return line


def test_good_that_a_merge_brought_in_starts_the_search_where_the_line_forked(tmp_path: Path) -> None:
    """Else the first commit of the topic, which changed nothing, would be named with certainty."""
    folder = forked_before_good(tmp_path / "r").folder
    fork = git(folder, "rev-parse", "--short=10", "old")
    result = bisect(folder, "--good", "fixed", "--bad", "topic-1", "--", "grep", "works", "state")
    assert f"not an ancestor of BAD: the search starts at their merge base {fork}" in result.stderr
    result = bisect(folder, "--good", "fixed", "--bad", "main", "--", "grep", "works", "state")
    assert f"is not on BAD's first-parent line: the search starts at {fork}, where it forked" in result.stderr
    refused = refusal(result)
    assert f"first-parent line forked from GOOD ({fork} old) already fails" in refused
    assert "give an older GOOD on BAD's first-parent line" in refused
    assert found(bisect(folder, "--good", "merge", "--bad", "main", "--", "grep", "works", "state")) == "broken-0"


def test_good_of_another_root_has_no_place_to_start_on_the_line_of_bad(tmp_path: Path) -> None:
    line = Line(tmp_path / "r")
    other = line.commit("other root")
    line.commit("merge", line.commit("root"), other)
    refused = refusal(bisect(line.folder, "--good", "other-root", "--bad", "merge", "--", "true"))
    assert "give a GOOD on that line" in refused


def test_branch_that_merged_the_line_is_searched_from_where_it_forked(tmp_path: Path) -> None:
    line = Line(tmp_path / "r")
    fork = line.run_of("before", 3, line.commit("start"))
    side = line.run_of("side", 2, fork)
    ahead = line.commit("ahead", side)
    topic = line.commit("update", line.run_of("topic", 2, fork), side)
    line.files["bug"] = ""
    line.run_of("after", 2, line.commit("merge", ahead, line.run_of("broken", 2, topic)))
    result = bisect(line.folder, "--good", "start", "--bad", "after-1", "--", "sh", "-c", "test ! -e bug")
    assert found(result) == "broken-0"


def test_status_knows_the_options_of_the_search_that_went_on(merged: Path) -> None:
    ends = "--good", "start", "--bad", "main"
    command = "sh", "-c", "test ! -e bug"
    bisect(merged, *ends, "--first-parent", "--deterministic", "--budget-runs", "4", "--", *command)
    answer = answer_of(merged, *ends, "--confidence", "0.999", "--", *command)
    assert answer["first_bad"]["subject"] == "broken-0"
    status = bisect(merged, "status").stdout
    assert "inside the merge" in status
    assert f"hold {answer['probability']:.1%} of the probability" in status


def test_octopus_merge_says_what_it_brought_in_and_was_not_searched(tmp_path: Path) -> None:
    line = Line(tmp_path / "r")
    start = line.commit("start")
    tip = line.run_of("before", 3, start)
    sides = [line.run_of(f"side{number}", 2, tip) for number in (1, 2)]
    line.files["bug"] = ""
    tip = line.run_of("after", 2, line.commit("octopus", tip, *sides))
    git(line.folder, "update-ref", "refs/heads/main", tip)
    git(line.folder, "reset", "--hard", "--quiet", "main")
    base = git(line.folder, "merge-base", *sides)[:10]
    result = bisect(line.folder, "--deterministic", "--good", start, "--bad", "main", "--", "test", "!", "-e", "bug")
    assert found(result) == "octopus"
    ways = [f"--good {base} --bad {side[:10]}" for side in sides]
    assert f"of the 2 branches were not searched; search it with {', and with '.join(ways)}" in result.stdout


def test_guilty_merge_of_a_first_parent_search_says_what_was_not_searched(evil: Path) -> None:
    ends = "--good", "start", "--bad", "main"
    result = bisect(evil, "--deterministic", "--first-parent", *ends, "--", "test", "!", "-e", "bug")
    assert "search it with --good " in result.stdout
