"""The output files of runs: compress large ones, and delete those of old searches."""

import gzip
import shutil
from pathlib import Path

COMPRESSED_FROM = 1_000_000
"""Smallest size in bytes that is compressed."""
KEPT_SEARCHES = 10
"""Number of newest searches whose outputs are kept. Older searches keep only the journal."""


def compress_large(output: Path) -> Path:
    """Compress a large output file.

    Returns:
        The file that now holds the output: `output` itself if it is small or if the disk has no room for a copy.
    """
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
    """Delete the outputs of one search's runs and environment builds. The journal is kept."""
    for pattern in ("*.log", "*.log.gz"):
        for output in folder.glob(pattern):
            output.unlink()
