"""Assemble a results file from the records that the processes of a run wrote."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from rlcanary.recording.json_text import JsonText, quoted
from rlcanary.recording.keys import metric_key
from rlcanary.recording.outcomes import Outcome
from rlcanary.recording.results_file import SCHEMA
from rlcanary.system.journal import Record

JOURNAL_KIND = "results"
JOURNAL_VERSION = 1
HEADER_TYPES: dict[str, Any] = {
    "git_commit": str | None,
    "start_time": str,
    "gpu_types": list,
    "start_time_utc": str,
    "run_id": str,
    "host": str,
    "dirty": bool | None,
    "versions": dict,
    "environment": str,
}


def problem_of(record: Record) -> str | None:
    """Explains why an object is not a record of a run; None if it is one."""
    match record:
        case {"record": "run"}:
            wrong = [name for name, kind in HEADER_TYPES.items() if not isinstance(record.get(name, ...), kind)]
            return (
                f"a header of a run without {', '.join(wrong)}" if wrong else _texts("gpu_types", record["gpu_types"])
            )
        case {"record": "keys", "keys": dict(keys)}:
            return _texts("keys", keys.values())
        case {"record": "gpus", "names": list(names)}:
            return _texts("names", names)
        case {"record": "begin", "nodeid": str()}:
            return None
        case {"record": "metric", "nodeid": str(), "name": str(), "value": _, "nonfinite": list(entries)}:
            return None if all(isinstance(entry, dict) for entry in entries) else "nonfinite holds no objects"
        case {"record": "outcome", "nodeid": str(), "outcome": str(), "duration_s": float(duration_s)}:
            return None if math.isfinite(duration_s) else "a duration out of range"
    return "not a record of a run"


def _texts(name: str, values: Iterable[object]) -> str | None:
    return None if all(isinstance(value, str) for value in values) else f"{name} has an item that is not text"


def assemble(
    header: Record,
    records: list[Record],
    exit_status: int | None,
    coverage: float | None,
    outcomes: Mapping[str, Outcome] = {},
) -> dict[str, Any]:
    """Assembles a run's results file from the records of its journals and the outcomes known without a record.

    A test that ran several times counts with its last time.
    """
    ended = dict(outcomes)
    qualified: dict[str, str] = {}
    tracked: dict[str, dict[str, Record]] = {}
    gpu_types = set(header["gpu_types"])
    for record in records:
        match record["record"]:
            case "keys":
                qualified |= record["keys"]
            case "gpus":
                gpu_types |= set(record["names"])
            case "begin":
                tracked[record["nodeid"]] = {}
            case "metric":
                tracked.setdefault(record["nodeid"], {})[record["name"]] = record
            case "outcome":
                ended[record["nodeid"]] = (record["outcome"], record["duration_s"])
    # By hand, because there may be thousands, and with an encoder each would take three times as long.
    tests: dict[str, JsonText | dict[str, str | None]] = {
        nodeid: JsonText(
            f'{{"outcome": {quoted(outcome)}, "duration": {duration_s:.6f}, "key": {quoted(metric_key(nodeid, qualified))}}}'
        )
        for nodeid, (outcome, duration_s) in ended.items()
    }
    keys = {nodeid: metric_key(nodeid, qualified) for nodeid in tracked}
    # A test without an outcome was running when the run was killed.
    for nodeid, key in keys.items():
        tests.setdefault(nodeid, {"outcome": None, "duration": None, "key": key})
    return {
        "exit_status": exit_status,
        "git_commit": header["git_commit"],
        "start_time": header["start_time"],
        "metrics": {
            keys[nodeid]: {name: record["value"] for name, record in metrics.items()}
            for nodeid, metrics in tracked.items()
        },
        "gpu_types": sorted(gpu_types),
        "coverage": coverage,
        "schema": SCHEMA,
        **{name: header[name] for name in ("start_time_utc", "run_id", "host", "dirty", "versions", "environment")},
        "nonfinite": [
            {"key": keys[nodeid], "metric": name, **entry}
            for nodeid, metrics in tracked.items()
            for name, record in metrics.items()
            for entry in record["nonfinite"]
        ],
        "tests": tests,
    }
