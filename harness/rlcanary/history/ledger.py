"""The ledger of alarms: when a metric's change was first seen, became known, was acknowledged, and was over.

It is a journal in the folder of results (`.alarms.jsonl`), so a change is announced once, however long it lasts and
however often it is looked for. A step is the same one while the runs between which it may lie overlap with those that
were recorded, also after it seemed to be over; these are kept as times, which outlive the removal of single runs.
"""

import datetime
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rlcanary.errors import UserError
from rlcanary.system.journal import Journal, Record, file_lock, read_journal

NAME = ".alarms.jsonl"
LOCK_NAME = ".alarms.lock"
KIND, VERSION = "alarms", 1
EVENTS = ("seen", "known", "acknowledged", "over", "back")


@dataclass
class Alarm:
    """A lasting change of a metric for the worse.

    Attributes:
        kind: "step", "drift" or "not finite".
        earliest_s: start of the last run that is surely before the change, in seconds since the epoch.
        latest_s: start of the first run that is surely after it.
        events: by event, the newest run of the history at that time (its id), and that run's start. "back" takes "over"
            away.
    """

    number: int
    metric: str
    kind: str
    rises: bool
    earliest_s: float
    latest_s: float
    events: dict[str, tuple[str, float]] = field(default_factory=dict)
    note: str = ""

    def is_same(self, metric: str, kind: str, rises: bool, earliest_s: float, latest_s: float) -> bool:
        """Tells if the alarm is of this change: an open one, or a step in the same place that seemed to be over."""
        if (self.metric, self.kind, self.rises) != (metric, kind, rises):
            return False
        if kind != "step":
            return self.is_open
        place = (earliest_s, latest_s)
        return (self.earliest_s, self.latest_s) == place or (self.earliest_s < latest_s and earliest_s < self.latest_s)

    @property
    def is_open(self) -> bool:
        return "over" not in self.events

    def happened(self, event: str, run_id: str, started_s: float) -> None:
        """Takes in what happened to the change."""
        self.events[event] = (run_id, started_s)
        if event == "back":
            del self.events["over"]


class Ledger:
    """The alarms of a folder of results, and the metrics that have been looked at.

    Without `journal` nothing is kept: a folder that cannot be written, or the questions of a report.
    """

    def __init__(self, records: Iterable[Record] = (), journal: Journal | None = None) -> None:
        self.alarms: list[Alarm] = []
        self.watched: set[str] = set()
        self._journal = journal
        for record in records:
            self._read(record)

    def open_alarms(self) -> list[Alarm]:
        return [alarm for alarm in self.alarms if alarm.is_open]

    def find(self, metric: str, kind: str, rises: bool, earliest_s: float, latest_s: float) -> Alarm | None:
        """Returns the alarm of a change, an open one first; None for one that has not been seen."""
        change = (metric, kind, rises, earliest_s, latest_s)
        same = [alarm for alarm in self.alarms if alarm.is_same(*change)]
        return max(same, key=lambda alarm: alarm.is_open, default=None)

    def add(self, metric: str, kind: str, rises: bool, earliest_s: float, latest_s: float) -> Alarm:
        """Opens an alarm for a change, in which nothing has happened yet."""
        alarm = Alarm(len(self.alarms), metric, kind, rises, earliest_s, latest_s)
        self.alarms.append(alarm)
        change = {"metric": metric, "kind": kind, "rises": rises, "earliest_s": earliest_s, "latest_s": latest_s}
        self._write({"record": "alarm", "number": alarm.number, **change})
        return alarm

    def note_event(self, alarm: Alarm, event: str, run_id: str, started_s: float, note: str = "") -> None:
        """Records what happened to an alarm, with the newest run at that time."""
        alarm.happened(event, run_id, started_s)
        alarm.note = note or alarm.note
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        facts = {"number": alarm.number, "run_id": run_id, "started_s": started_s, "time_utc": now}
        self._write({"record": event, **facts, **({"note": note} if note else {})})

    def watch(self, metrics: Iterable[str]) -> None:
        """Records that metrics are looked at from now on."""
        if new := sorted(set(metrics) - self.watched):
            self.watched.update(new)
            self._write({"record": "watched", "metrics": new})

    def _write(self, record: Record) -> None:
        if self._journal is not None:
            self._journal.append(record)

    def _read(self, record: Record) -> None:
        match record["record"]:
            case "watched":
                self.watched.update(record["metrics"])
            case "alarm":
                fields = ("metric", "kind", "rises", "earliest_s", "latest_s")
                self.alarms.append(Alarm(record["number"], *(record[name] for name in fields)))
            case event:
                alarm = self.alarms[record["number"]]
                alarm.happened(event, record["run_id"], record["started_s"])
                alarm.note = record.get("note", alarm.note)


@contextmanager
def open_ledger(folder: Path) -> Iterator[Ledger]:
    """Opens the ledger of a folder of results for writing; other processes wait.

    Raises:
        OSError: The folder cannot be written.
        UserError: It is no ledger of this version.
    """
    with file_lock(folder / LOCK_NAME):
        records = read_records(folder)
        journal = Journal(folder / NAME, KIND, VERSION)
        try:
            yield Ledger(records, journal)
            journal.sync()
        finally:
            journal.close()


def read_ledger(folder: Path) -> Ledger:
    """Reads the ledger of a folder, empty if there is none. What is added to it is not kept."""
    return Ledger(read_records(folder))


def read_records(folder: Path) -> list[Record]:
    """Reads the records of a folder's ledger that follow each other without a gap.

    Raises:
        UserError: It is no ledger of this version, or a line is damaged.
    """
    path = folder / NAME
    if not path.exists():
        return []
    contents = read_journal(path, KIND, VERSION, _problem_of)
    for damage in contents.damage:
        if not damage.unfinished:
            raise UserError(f"{damage}; repair the line, or delete the file: alarms that last are then announced again")
    return contents.records


def _problem_of(record: Record) -> str | None:
    match record:
        case {"record": "watched", "metrics": list()}:
            return None
        case {
            "record": "alarm",
            "number": int(),
            "metric": str(),
            "kind": str(),
            "rises": bool(),
            "earliest_s": float(),
            "latest_s": float(),
        }:
            return None
        case {"record": event, "number": int(), "run_id": str(), "started_s": float()} if event in EVENTS:
            return None
    return "not a record of alarms"
