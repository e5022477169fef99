"""SIGKILL at random points of a search: the same command goes on, and no finished run is lost."""

import json
import random
import re
import time
from pathlib import Path

import psutil
import pytest
from bisect_repositories import bisect, contents, counting, found, git, started_search, values

pytestmark = pytest.mark.usefixtures("plain_git")

KILLS = 32


def journals(repository: Path) -> set[Path]:
    return set((repository / ".git" / "rlcanary" / "bisect").glob("*/journal.jsonl"))


def finished_runs(journal: Path) -> list[dict[str, object]]:
    events = []
    for line in journal.read_text().split("\n"):
        try:
            events.append(json.loads(line))
        except ValueError:
            continue  # The line that the kill cut short.
    return [event for event in events if event.get("event") == "observation"]


def test_search_that_is_killed_again_and_again_loses_no_finished_run(history: Path, tmp_path: Path) -> None:
    """B32: 32 kills, with one probe and with two at once."""
    draw = random.Random(8)
    before = {name: digest for name, digest in contents(history).items() if not name.startswith(".git/worktrees")}
    kills = searches = 0
    while kills < KILLS:
        searches += 1
        culprit, jobs = draw.randint(2, 100), searches % 2 + 1
        counter = tmp_path / f"runs{searches}"
        command = counting(counter, f"sleep 0.03; test $(cat value) -lt {culprit}")
        arguments = "--good", "c1", "--bad", "c100", "--jobs", str(jobs), "--", *command
        earlier = journals(history)
        known: list[dict[str, object]] = []
        while kills < KILLS:
            with started_search(history, *arguments) as search:
                time.sleep(draw.uniform(0.1, 0.9))
                if search.poll() is not None:
                    break
                search.kill()
                _, errors = search.communicate()
            kills += 1
            told = re.search(r"continuing the interrupted search, (\d+) outcomes known", errors)
            assert told is None or int(told[1]) == len(known)
            journal = max(journals(history) - earlier, default=None)
            known = [] if journal is None else finished_runs(journal)
            if journal is not None and '"event": "end"' in journal.read_text():
                break  # Killed on its way out.
        result = bisect(history, *arguments)
        assert found(result) == f"change {culprit} [wip]"
        recorded = [run for journal in journals(history) - earlier for run in finished_runs(journal)]
        assert len(values(counter)) <= len(recorded) + jobs * kills
        assert len({(run["output"], run["run"]) for run in recorded}) == len(recorded)
    assert len(git(history, "worktree", "list").splitlines()) == 1
    after = {name: digest for name, digest in contents(history).items() if not name.startswith(".git/worktrees")}
    assert after == before
    mine = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"]]
    assert not [words for words in mine if any(str(tmp_path) in word for word in words)]
