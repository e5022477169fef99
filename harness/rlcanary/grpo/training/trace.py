"""Trace the time of a run, as one JSON object per span and line."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Trace:
    """Spans of a run, written as they end, so that a killed run loses only the open ones.

    A line has `name`, `start_s` since the epoch, `seconds`, `outcome` ("ok", or the exception's type) and the fields that
    the caller gave.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: dict[str, float] = {}

    @contextmanager
    def span(self, name: str, **given: Any) -> Iterator[None]:
        """Time the code inside."""
        started, start_s, outcome = time.perf_counter(), time.time(), "ok"
        try:
            yield
        except BaseException as error:
            outcome = type(error).__name__
            raise
        finally:
            self.add(name, start_s, time.perf_counter() - started, outcome, **given)

    def add(self, name: str, start_s: float, seconds: float, outcome: str, **given: Any) -> None:
        """Write a span that other code timed."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        line = {"name": name, "start_s": start_s, "seconds": seconds, "outcome": outcome, **given}
        with self._path.open("a") as stream:
            stream.write(json.dumps(line) + "\n")

    def take_seconds(self) -> dict[str, float]:
        """Return seconds per name since the last call."""
        seconds, self._seconds = self._seconds, {}
        return seconds
