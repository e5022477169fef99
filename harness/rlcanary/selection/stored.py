"""Store the data that `rlcanary selection` shows of a test, in a table in testmon's database."""

from __future__ import annotations

import json
import sqlite3
import zlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlcanary.selection.dependencies import Dependencies

TABLE = "rlcanary_dependencies"


def packed(found: Dependencies) -> bytes:
    entries = [[file, name, sorted(ways)] for (file, name), ways in sorted(found.through.items())]
    return zlib.compress(json.dumps({"through": entries, "unrecorded": sorted(found.unrecorded)}).encode(), 1)


def unpacked(blob: bytes) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(zlib.decompress(blob))
    return value


def stored(connection: sqlite3.Connection) -> dict[str, dict[str, Any]]:
    """Return the stored data by test; empty if nothing was recorded yet."""
    tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name = ?", (TABLE,)).fetchall()
    if not tables:
        return {}
    return {test: unpacked(blob) for test, blob in connection.execute(f"SELECT test_name, dependencies FROM {TABLE}")}
