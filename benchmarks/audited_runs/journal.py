"""The runs that were done, a JSON line each, so that an interrupted benchmark goes on where it stopped."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Journal:
    """Results of runs by what they were asked for."""

    def __init__(self, path: Path | None) -> None:
        """Read what was done; None keeps nothing."""
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []
        self._done = {json.dumps(each["run"]): each["result"] for each in map(json.loads, lines)}

    def result(self, run: list[Any], make: Callable[[], Any]) -> Any:
        """Return the result of a run, which is made now if it was not before."""
        name = json.dumps(run)
        if name not in self._done:
            self._done[name] = make()
            if self._path is not None:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"run": run, "result": self._done[name]}) + "\n")
        return self._done[name]
