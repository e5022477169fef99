import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlcanary.bisect.record.journal import Header, Journal, Lock, Observation, Record, open_idle, readable_records
from rlcanary.errors import UserError
from rlcanary.jobs.outcomes import EVIDENCE, Outcome
from rlcanary.system.files import write_whole

REQUEST = {"request": {"command": ["pytest"]}, "trusted": [], "table": ""}
HEADER = Header("r" * 40, "a" * 40, "b" * 40, ("pytest", "x"), ".", (("check.sh", "0" * 64),))


def test_header_and_observations_come_back_as_written(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path, HEADER, tmp_path)
    observation = Observation("c" * 40, Outcome.BAD, "exit 1", 1.5, "2026-01-01T00:00:00+00:00", "/x.log")
    journal.append("observation", **vars(observation))
    assert journal.header == HEADER
    assert journal.observations() == [observation]


def test_infrastructure_and_interrupted_runs_are_no_evidence(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path, HEADER, tmp_path)
    for outcome in Outcome:
        journal.append("observation", **vars(Observation("c" * 40, outcome, "")))
    assert {o.outcome for o in journal.observations()} == set(EVIDENCE)


def test_line_torn_by_a_power_cut_loses_nothing_before_or_after_it(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path, HEADER, tmp_path)
    folder = journal.folder
    journal.append("observation", **vars(Observation("c" * 40, Outcome.GOOD, "")))
    journal.close()
    with (folder / "journal.jsonl").open("a") as file:
        file.write('{"event": "observat')
    journal = Journal(folder)
    journal.append("observation", **vars(Observation("d" * 40, Outcome.BAD, "")))
    assert [o.commit[0] for o in journal.observations()] == ["c", "d"]


def test_idle_journals_are_those_without_a_writer_and_know_whether_they_reached_their_end(tmp_path: Path) -> None:
    finished, running, stopped = (Journal.create(tmp_path, HEADER, tmp_path) for _ in range(3))
    finished.append("end", status="found", reason="")
    stopped.append("interrupted", reason="interrupted by SIGINT")
    finished.close()
    stopped.close()
    idle = {journal.folder: journal.is_finished for journal in open_idle(tmp_path, print)}
    assert idle == {finished.folder: True, stopped.folder: False}
    running.close()


def test_lock_is_refused_while_held_and_free_after_its_holder_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "rlcanary" / "bisect.lock"
    code = (
        "import sys, time; from pathlib import Path; from rlcanary.bisect.record.journal import Lock;"
        "lock = Lock(Path(sys.argv[1])); print('held', flush=True); time.sleep(9999)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"already running in this checkout \\(process {holder.pid}"):
            Lock(path)
    finally:
        holder.kill()
        holder.communicate()
    Lock(path).release()


def test_file_that_cannot_be_written_whole_leaves_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    target.write_text("old")
    with pytest.raises(TypeError):
        write_whole(target, None)  # type: ignore[arg-type]
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_damaged_line_is_named_and_costs_no_other(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path, HEADER, tmp_path)
    for commit in "cde":
        journal.record(Observation(commit * 40, Outcome.GOOD, ""))
    journal.append("end", status="found", reason="", suspects=[])
    journal.close()
    lines = journal.path.read_text().splitlines(keepends=True)
    lines[3] = lines[3][:30] + "\n"
    lines.insert(5, '{"event": "observation", "commit": "f"}\n[1]\n')
    lines[-1] = lines[-1][:20]
    journal.path.write_text("".join(lines))
    record = Record(journal.path)
    assert [o.commit[0] for o in record.observations()] == ["c", "e"]
    assert [text.split(" (")[0].removeprefix(str(journal.path)) for text in record.damage] == [
        f" line {number} is damaged" for number in (4, 6, 7, 8)
    ]
    assert "(observation without outcome, reason, " in record.damage[1]
    assert not record.is_finished


@pytest.mark.parametrize(
    ("event", "name", "value"),
    [
        ("start", "pinned", 5),
        ("start", "pinned", [["check.sh"]]),
        ("start", "command", 5),
        ("start", "command", [5]),
        ("start", "variables", 5),
        ("start", "root", None),
        ("request", "request", 5),
        ("request", "trusted", 5),
        ("observation", "seconds", "x"),
        ("observation", "commit", 5),
        ("end", "reason", 5),
    ],
)
def test_field_of_another_type_is_damage_that_is_named(tmp_path: Path, event: str, name: str, value: object) -> None:
    journal = Journal.create(tmp_path, HEADER, tmp_path)
    journal.record_request({"command": ["pytest", "x"]}, ["a" * 40], "")
    journal.record(Observation("c" * 40, Outcome.GOOD, ""))
    journal.append("end", status="found", reason="", suspects=[])
    journal.close()
    head, *events = map(json.loads, journal.path.read_text().splitlines())
    events = [each | ({name: value} if each["event"] == event else {}) for each in events]
    journal.path.write_text("".join(f"{json.dumps(line)}\n" for line in (head, *events)))
    (damage,) = journal.damage
    assert f"({event} with another type of " in damage
    assert name in damage.rpartition("(")[2]
    assert [each["event"] for each in journal.events()] == [each["event"] for each in events if each["event"] != event]


@pytest.mark.parametrize(("event", "name", "value"), [("request", "request", {}), ("observation", "commit", "\x1b[2J")])
def test_field_that_no_reader_could_use_is_damage_that_is_named(
    tmp_path: Path, event: str, name: str, value: object
) -> None:
    journal = Journal.create(tmp_path, HEADER, tmp_path)
    journal.append(
        event, **(vars(Observation("c" * 40, Outcome.GOOD, "")) if event == "observation" else REQUEST) | {name: value}
    )
    journal.close()
    (damage,) = journal.damage
    assert "line 3 is damaged" in damage
    assert "\x1b" not in damage


def test_damaged_start_of_a_search_is_named_where_searches_are_listed(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path, HEADER, tmp_path)
    journal.close()
    journal.path.write_text(journal.path.read_text().replace('"pinned": [["check.sh",', '"pinned": [["check.sh"],['))
    told: list[str] = []
    (record,) = readable_records([journal.path], told.append)
    assert record.header is None
    assert told == [f"left out: {text}" for text in record.damage] != []


def test_journal_from_before_journals_had_a_header_is_read_and_goes_on(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path, HEADER, tmp_path)
    journal.record(Observation("c" * 40, Outcome.GOOD, ""))
    journal.close()
    journal.path.write_text(journal.path.read_text().split("\n", 1)[1] + '{"event": "obs')
    assert journal.header == HEADER
    assert [o.commit[0] for o in journal.observations()] == ["c"]
    assert len(journal.damage) == 1
    (again,) = open_idle(tmp_path, print)
    again.record(Observation("d" * 40, Outcome.BAD, ""))
    assert [o.commit[0] for o in again.observations()] == ["c", "d"]
    assert again.header == HEADER
    assert again.damage == []
    again.close()


@pytest.mark.parametrize(
    "text", ["{}\n", "[1]\n", '{"journal": "results", "version": 1}\n', '{"journal": "bisect", "version": 99}\n']
)
def test_foreign_journal_is_named_and_left_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "journal.jsonl").write_text(text)
    ours = Journal.create(tmp_path, HEADER, tmp_path)
    ours.close()
    told: list[str] = []
    assert [journal.folder for journal in open_idle(tmp_path, told.append)] == [ours.folder]
    assert len(told) == 1
    assert str(tmp_path / "strange" / "journal.jsonl") in told[0]
    assert (tmp_path / "strange" / "journal.jsonl").read_text() == text


def test_journal_that_another_start_has_open_for_a_moment_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Journal.create(tmp_path, HEADER, tmp_path)
    monkeypatch.setattr("time.sleep", lambda _: other.close())
    (journal,) = open_idle(tmp_path, print)
    assert journal.folder == other.folder
    journal.close()
