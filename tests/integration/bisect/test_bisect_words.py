"""What a search says before, while and after it runs, and what it keeps."""

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from bisect_repositories import BUG, bisect, found, git, make_history, numbered
from waiting import HANG_S

from rlcanary.bisect.record.journal import Header, Journal
from rlcanary.bisect.runs.outputs import KEPT_SEARCHES
from rlcanary.bisect.view.progress import duration

pytestmark = pytest.mark.usefixtures("plain_git")

ENDS = "--deterministic", "--good", "c1", "--bad", "c15"


@pytest.fixture
def short(tmp_path: Path) -> Path:
    return make_history(tmp_path / "r", 15, numbered)


HALF = "sh", "-c", "test $(cat value) -lt 8"


def test_dry_run_and_search_give_one_forecast_and_the_search_keeps_to_it(history: Path, tmp_path: Path) -> None:
    ends = "--good", "c1", "--bad", "c100"
    predicted = bisect(history, *ends, "--dry-run", "--", *BUG).stdout
    result = bisect(history, *ends, "--json", str(tmp_path / "r.json"), "--", *BUG)
    assert predicted.splitlines() == result.stderr.splitlines()[: len(predicted.splitlines())]
    runs = int(re.findall(r"about (\d+) runs in", predicted)[0])
    answer = json.loads((tmp_path / "r.json").read_text())
    assert abs(answer["runs"] - runs) <= 1
    (left,) = re.findall(r"^about (\d+) runs left, \d", result.stderr, re.MULTILINE)[:1]
    assert abs(int(left) - (runs - 1)) <= 1
    assert f"{answer['runs']} runs in {duration(answer['wall_seconds'])}" in result.stdout


def test_finished_search_whose_journal_was_damaged_names_the_lines(short: Path) -> None:
    found(bisect(short, *ENDS, "--", *HALF))
    (journal,) = (short / ".git/rlcanary/bisect").glob("*/journal.jsonl")
    lines = journal.read_text().splitlines(keepends=True)
    (first, *_) = [number for number, line in enumerate(lines) if '"observation"' in line]
    lines[first] = lines[first][:40] + "\n"
    lines[-1] = lines[-1][:50]
    journal.write_text("".join(lines))
    status = [sys.executable, "-m", "rlcanary", "bisect", "status"]
    shown = subprocess.run(status, cwd=short, capture_output=True, text=True, timeout=HANG_S)
    for number in (first + 1, len(lines)):
        assert f"warning: {journal} line {number} is damaged (" in shown.stderr
    again = bisect(short, *ENDS, "--", *HALF)
    assert found(again) == "change 8 [wip]"
    assert f"warning: {journal} line {first + 1} is damaged (" in again.stderr


def test_large_outputs_are_compressed_and_those_of_old_searches_deleted(short: Path, tmp_path: Path) -> None:
    store = short / ".git/rlcanary/bisect"
    sha = git(short, "rev-parse", "c1")
    header = Header(sha, sha, git(short, "rev-parse", "c15"), ("another",), ".", ())
    old: list[Path] = []
    for number in range(KEPT_SEARCHES + 1):
        journal = Journal.create(store, header, short)
        journal.close()
        old.append(journal.folder.rename(store / f"2020010{number:02d}-x"))
        (old[-1] / "1.log").touch()
    command = "sh", "-c", "yes | head -c 2000000; test $(cat value) -lt 8"
    found(bisect(short, *ENDS, "--json", str(tmp_path / "r.json"), "--", *command))
    answer = json.loads((tmp_path / "r.json").read_text())
    for run in answer["observations"]:
        assert run["output"].endswith(".log.gz")
        with gzip.open(run["output"]) as stream:
            assert len(stream.read()) == 2_000_000
    assert [(folder / "1.log").exists() for folder in old] == [False, *[True] * KEPT_SEARCHES]
    assert all((folder / "journal.jsonl").exists() for folder in old)
