"""Reading what the processes of a run have written so far."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

UNESCAPED = {"\\\\": "\\", "\\t": "\t", "\\n": "\n"}


class Journals:
    """The journals of a run (see `rlcanary_recorder.core`), each read on from where it was read before."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.offsets: dict[Path, int] = {}

    def new_lines(self) -> Iterator[tuple[str, list[str]]]:
        """The process and the fields of every whole line that was not returned before.

        A line that is being written comes next time.
        """
        for path in sorted(self.folder.glob("*.journal")):
            offset = self.offsets.get(path, 0)
            if path.stat().st_size == offset:
                continue
            with path.open("rb") as stream:
                stream.seek(offset)
                text = stream.read()
            whole = text[: text.rfind(b"\n") + 1]
            self.offsets[path] = offset + len(whole)
            process = path.stem.replace("-", ":", 1)
            for line in whole.decode("utf-8", "surrogateescape").split("\n")[:-1]:
                yield process, [unescape(field) for field in line.split("\t")]


def unescape(field: str) -> str:
    if "\\" not in field:
        return field
    return re.sub(r"\\[\\tn]", lambda match: UNESCAPED[match[0]], field)
