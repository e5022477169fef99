"""Writing files whole or not at all."""

import gzip
import os
from pathlib import Path

from rlcanary.errors import UserError


def temporary_pattern(name: str) -> str:
    """The glob pattern of files being written under this name; hidden, so that a `*` of the shell never meets one."""
    return f".{name}.*.tmp"


def write_whole(path: Path, content: str | bytes) -> None:
    """Write beside the file, flush to the disk and rename.

    Raises:
        OSError: the file could not be written; what stood there before is untouched.
    """
    temporary = path.with_name(temporary_pattern(path.name).replace("*", os.urandom(4).hex()))
    try:
        with temporary.open("wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def require_writable(path: Path) -> None:
    """Refuse a file that could not be written in the end, before the work that it is to hold.

    Raises:
        UserError: its folder is missing or closed to us, or it is a folder or a device itself.
    """
    if path.exists() and not path.is_file():
        raise UserError(f"cannot write {path}: it is there and not a file")
    if not os.access(path.absolute().parent, os.W_OK):
        raise UserError(f"cannot write {path}: its folder does not exist or is not writable")


def read_end(file: Path, limit: int) -> str:
    """The last `limit` bytes of an output, "" where there is none."""
    if not file.is_file():
        return ""
    if file.suffix == ".gz":
        end = b""
        with gzip.open(file, "rb") as lines:
            while part := lines.read(1 << 20):
                end = (end + part)[-limit:]
    else:
        with file.open("rb") as stream:
            stream.seek(max(0, file.stat().st_size - limit))
            end = stream.read()
    return end.decode("utf-8", errors="replace")
