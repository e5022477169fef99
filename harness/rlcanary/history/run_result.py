"""Read results files without trusting them."""

import datetime
import json
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rlcanary.recording.results_file import SCHEMA

MOST_BYTES = 2**30
MOST_EXIT_STATUS = 2**31
FILE_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
PASSED = ("passed", "xpassed")
CUT_SHORT = (2, 3)  # exit statuses of pytest: interrupted, internal error
# Fields that a reader relies on, if a file has them.
KINDS: dict[str, Any] = {
    "run_id": str | None,
    "git_commit": str | None,
    "dirty": bool | None,
    "exit_status": int | None,
    "environment": str | None,
    "host": str | None,
}


@dataclass(frozen=True)
class RunResult:
    """One results file.

    Attributes:
        metrics: maps a test's key to its metrics, as tracked.
        nodeids: maps the key to the node id of the test that measured it; empty for files that other tools wrote.
        outcomes: maps the node ids of tests to their outcomes, None for one that was running when the run was killed.
        start: in UTC.
        cut_short: whether the run was killed or interrupted before its tests were over.
    """

    path: Path
    run_id: str
    start: datetime.datetime
    git_commit: str | None
    dirty: bool | None
    exit_status: int | None
    metrics: dict[str, dict[str, Any]]
    nodeids: dict[str, str]
    outcomes: dict[str, str | None]
    environment: str | None
    host: str | None
    cut_short: bool

    def counts(self, key: str) -> bool:
        """Tells if the numbers of the test with this key count: it passed, at the first attempt, in a run that ended.

        True if the file does not say.
        """
        nodeid = self.nodeids.get(key)
        return not self.cut_short and (nodeid not in self.outcomes or self.outcomes[nodeid] in PASSED)


@dataclass(frozen=True)
class UnreadableFile:
    """An unusable file among the results, and the reason."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class JsonFile(NamedTuple):
    document: Any
    text: str


def read_json(path: Path, pipes: bool = False) -> JsonFile | str:
    """Reads a JSON file, or returns the reason why it cannot be read.

    A pipe, which may never end, is read only with `pipes`.
    """
    try:
        status = path.stat()
        if not (stat.S_ISREG(status.st_mode) or (pipes and stat.S_ISFIFO(status.st_mode))):
            return f"{FILE_KINDS.get(stat.S_IFMT(status.st_mode), 'something else')} and not a file"
        # A file of /proc has no size either; some of them never end.
        if stat.S_ISREG(status.st_mode) and status.st_size == 0:
            return "empty file"
        if status.st_size > MOST_BYTES:
            return f"larger than {MOST_BYTES // 2**30} GiB"
        text = path.read_text(encoding="utf-8")
        return JsonFile(json.loads(text), text)
    except OSError as error:
        return error.strerror or str(error)
    except UnicodeDecodeError:
        return "not text"
    except RecursionError:
        return "nested too deep"
    except json.JSONDecodeError as error:
        return f"not valid JSON, perhaps truncated ({error})" if text.strip() else "empty file"
    except ValueError:
        return "a number has too many digits"


def read_run(path: Path) -> RunResult | UnreadableFile:
    """Reads a results file of rlcanary or of the same shape (exit_status, git_commit, start_time, metrics)."""
    read = read_json(path)
    return UnreadableFile(path, read) if isinstance(read, str) else parse_run(path, read.document)


def parse_run(path: Path, document: object) -> RunResult | UnreadableFile:
    if not isinstance(document, dict):
        return UnreadableFile(path, "not a results file: the top level is not an object")
    schema = document.get("schema", SCHEMA)
    if not isinstance(schema, int) or schema > SCHEMA:
        return UnreadableFile(
            path, f"schema {_glimpse(schema)} is newer than this rlcanary reads (up to {SCHEMA}); upgrade rlcanary"
        )
    metrics = document.get("metrics")
    if not isinstance(metrics, dict) or not all(isinstance(values, dict) for values in metrics.values()):
        return UnreadableFile(path, "not a results file: no 'metrics' object of objects")
    start = _start(document)
    if start is None:
        return UnreadableFile(
            path, "not a results file: neither 'start_time_utc' nor 'start_time' can be read as a time"
        )
    for name, kinds in KINDS.items():
        if not isinstance(document.get(name), kinds):
            return UnreadableFile(path, f"not a results file: {name!r} is {_glimpse(document[name])}")
    if abs(document.get("exit_status") or 0) > MOST_EXIT_STATUS:
        return UnreadableFile(path, "not a results file: 'exit_status' is no exit status")
    tests = document.get("tests")
    tests = {
        nodeid: test
        for nodeid, test in (tests if isinstance(tests, dict) else {}).items()
        if isinstance(test, dict) and isinstance(test.get("outcome"), str | None)
    }
    return RunResult(
        path=path,
        run_id=document.get("run_id") or path.stem,
        start=start,
        git_commit=document.get("git_commit"),
        dirty=document.get("dirty"),
        exit_status=document.get("exit_status"),
        metrics=metrics,
        nodeids={test["key"]: nodeid for nodeid, test in tests.items() if isinstance(test.get("key"), str)},
        outcomes={nodeid: test["outcome"] for nodeid, test in tests.items() if "outcome" in test},
        environment=document.get("environment"),
        host=document.get("host"),
        # Only files that name their tests were written by rlcanary, for which no exit status means killed.
        cut_short=document.get("exit_status") in (CUT_SHORT if not tests else (None, *CUT_SHORT)),
    )


def _glimpse(value: object) -> str:
    return f"{value!r:.40}" if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


def _start(document: dict[str, Any]) -> datetime.datetime | None:
    try:
        if "start_time_utc" in document:
            start = datetime.datetime.fromisoformat(document["start_time_utc"])
        else:  # files that other tools wrote carry local time without a zone only
            start = datetime.datetime.fromisoformat(document["start_time"])
        seconds = start.astimezone(datetime.UTC).timestamp()
        return datetime.datetime.fromtimestamp(seconds, datetime.UTC)  # as it is read back: not beyond the year 9999
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
