"""Write files whole or not at all."""

import gzip
import os
from pathlib import Path

from rlcanary.errors import UserError


def temporary_pattern(name: str) -> str:
    """Return the glob pattern of temporary files for this name. They are hidden, so that a `*` of the shell skips them."""
    return f".{name}.*.tmp"


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a temporary file beside the target, flush it to the disk and rename it.

    Raises:
        OSError: The file could not be written. An existing file is unchanged.
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
    """Check before long work that a file can be written.

    Raises:
        UserError: The folder is missing or not writable, or the path is a folder or a device.
    """
    if path.exists() and not path.is_file():
        raise UserError(f"cannot write {path}: it exists and is not a file")
    if not os.access(path.absolute().parent, os.W_OK):
        raise UserError(f"cannot write {path}: its folder does not exist or is not writable")


def make_folder(path: Path) -> None:
    """Make a folder and those above it, if they are missing.

    Raises:
        UserError: It cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {path}: {error.strerror}") from error


def read_end(file: Path, limit: int) -> str:
    """Read the last `limit` bytes of an output file. Empty if there is none."""
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
