"""The results files of a folder: their present names, and stamps that change with their content."""

import hashlib
import os
from array import array
from pathlib import Path
from typing import NamedTuple


class Stamp(NamedTuple):
    """A stamp of a file that differs if it is not the one that was indexed."""

    name: str
    modified_ns: int
    bytes: int
    inode: str


class Listing:
    """The present `*.json` of a folder, except hidden ones."""

    def __init__(self, folder: Path) -> None:
        self.names: list[str] = []
        self._numbers = array("Q")  # of each file: time of change, bytes, inode
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for name in os.listdir(descriptor):  # noqa: PTH208 - a descriptor has no Path
                if name.endswith(".json") and not name.startswith("."):
                    try:
                        status = os.stat(name, dir_fd=descriptor)
                    except OSError:  # removed since the folder was listed, or a link to nowhere or to itself
                        numbers = (0, 0, 0)
                    else:
                        numbers = (status.st_mtime_ns % 2**64, status.st_size, status.st_ino)
                    self.names.append(name)
                    self._numbers.extend(numbers)
        finally:
            os.close(descriptor)

    @property
    def digest(self) -> bytes:
        """Computes a digest of the names and stamps of the files, in the order of the folder."""
        names = "\0".join(self.names).encode("utf-8", "surrogateescape")
        return hashlib.blake2b(names + b"\0" + self._numbers.tobytes(), digest_size=16).digest()

    def stamps(self) -> set[Stamp]:
        numbers = iter(self._numbers)
        return {
            Stamp(storable(name), modified_ns % 2**63, size, str(inode))
            for name, modified_ns, size, inode in zip(self.names, numbers, numbers, numbers, strict=True)
        }


def storable(text: str) -> str:
    """Makes a text storable: JSON and names of files may hold halves of surrogate pairs, which UTF-8 cannot encode."""
    return text.encode("utf-8", "backslashreplace").decode()
