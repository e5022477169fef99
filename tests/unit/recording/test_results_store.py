"""Results files: written whole or not at all, read without trust."""

import json
import os
from pathlib import Path

import pytest

from rlcanary.errors import UserError
from rlcanary.history.run_result import RunResult, UnreadableFile, read_run
from rlcanary.recording.assembly import HEADER_TYPES, JOURNAL_KIND, JOURNAL_VERSION, assemble
from rlcanary.recording.recovery import read_run_folder
from rlcanary.recording.results_file import default_results_file, history_folder, results_text
from rlcanary.system.files import write_whole
from rlcanary.system.journal import Journal

FOREIGN = {
    "exit_status": 0,
    "git_commit": "f1062bd",
    "start_time": "2025-03-24 23:34:12",
    "metrics": {"m::f": {"x": 1.0}},
}


def test_text_of_a_results_file_is_its_document() -> None:
    document = {"a": None, "b": {}, "c": {"d::e[\u2028\n]": {"x": [1, 2.5e-300], "y": {"z": "µ"}}, "f": []}, "g": [{}]}
    assert json.loads(results_text(document)) == document
    assert len(results_text(document).splitlines()) == 9


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object()])
def test_what_json_cannot_hold_is_refused(value: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        results_text({"metrics": {"a": {"b": value}}})


def test_failed_write_leaves_the_previous_file_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "unit_results.json"
    write_whole(path, results_text({"before": 1}))

    def disk_full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, results_text({"after": 2}))
    assert json.loads(path.read_text()) == {"before": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_results_lie_beside_the_unit_tests_then_the_tests_then_at_the_root(tmp_path: Path) -> None:
    assert default_results_file(tmp_path, []) == tmp_path / "unit_results.json"
    (tmp_path / "checks").mkdir()
    assert default_results_file(tmp_path, ["checks"]) == tmp_path / "checks" / "unit_results.json"
    (tmp_path / "tests" / "unit").mkdir(parents=True)
    assert default_results_file(tmp_path, ["checks"]) == tmp_path / "tests" / "unit" / "unit_results.json"


def test_results_file_must_end_in_json() -> None:
    with pytest.raises(UserError, match=r"must end in \.json"):
        history_folder(Path("results"))


def test_file_of_another_tool_with_the_same_shape_is_read(tmp_path: Path) -> None:
    path = tmp_path / "20250324_233412.json"
    path.write_text(json.dumps(FOREIGN))
    run = read_run(path)
    assert isinstance(run, RunResult)
    assert run.run_id == "20250324_233412"
    assert run.start.astimezone().strftime("%Y-%m-%d %H:%M:%S") == FOREIGN["start_time"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty file"),
        (json.dumps(FOREIGN)[:60], "perhaps truncated"),
        ("[]", "not an object"),
        ("{}", "no 'metrics'"),
        ('{"metrics": {}}', "can be read as a time"),
        (json.dumps({**FOREIGN, "schema": 99}), "schema 99 is newer"),
    ],
    ids=["empty", "truncated", "list", "foreign", "no time", "newer schema"],
)
def test_unreadable_file_says_why(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    read = read_run(path)
    assert isinstance(read, UnreadableFile)
    assert reason in str(read)
    assert str(path) in str(read)


def test_the_last_attempt_counts_whatever_the_names_of_its_worker(tmp_path: Path) -> None:
    for worker, attempt in (("gw9", 1), ("gw10", 2)):  # the first crashed, and another took its place
        journal = Journal(tmp_path / f"{worker}.jsonl", JOURNAL_KIND, JOURNAL_VERSION)
        journal.append({"record": "begin", "nodeid": "t.py::t"})
        journal.append({"record": "metric", "nodeid": "t.py::t", "name": "attempt", "value": attempt, "nonfinite": []})
        journal.close()
        os.utime(journal.path, ns=(attempt, attempt))
    header = dict.fromkeys(HEADER_TYPES) | {"gpu_types": []}
    document = assemble(header, read_run_folder(tmp_path).records, 0, None)
    assert document["metrics"] == {"t::t": {"attempt": 2}}
