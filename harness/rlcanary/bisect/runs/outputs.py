"""The outputs of runs: large ones are compressed, those of old searches deleted."""

import gzip
import shutil
from pathlib import Path

COMPRESSED_FROM = 1_000_000
"""Bytes."""
KEPT_SEARCHES = 10
"""Outputs of the newest searches are kept; of older ones only the journal."""


def compress_large(output: Path) -> Path:
    """The file that holds the output from now on. It stays as it is where the disk has no room for a compressed copy."""
    if output.stat().st_size < COMPRESSED_FROM:
        return output
    compressed = output.with_name(f"{output.name}.gz")
    try:
        with output.open("rb") as source, gzip.open(compressed, "wb", compresslevel=1) as target:
            shutil.copyfileobj(source, target, 1 << 20)
    except OSError:
        compressed.unlink(missing_ok=True)
        return output
    output.unlink()
    return compressed




def delete_outputs(folder: Path) -> None:
    """Delete the outputs of the runs and environment builds of one search, and leave its journal."""
    for pattern in ("*.log", "*.log.gz"):
        for output in folder.glob(pattern):
            output.unlink()
