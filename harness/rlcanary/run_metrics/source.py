"""The protocol of a metric source, a kind of file that holds the metrics of a run."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol


class Scalar(NamedTuple):
    tag: str
    step: int
    value: float


class MetricSource(Protocol):
    """A kind of file with metrics. A module in `sources/` that binds one to `SOURCE` is found by itself."""

    description: str
    """The plural name of the files, for messages."""
    pattern: str
    """A glob of the file names."""
    has_steps: bool
    """Whether the metrics are series. Otherwise each has one value, at step 0."""

    def files(self, folder: Path, directory: Path) -> Iterable[Path]:
        """List the files under `folder` that a run started in `directory` may have written."""
        return folder.rglob(self.pattern)

    def read(self, path: Path) -> Iterator[Scalar | str]:
        """Read a file. Yield a text for each part that cannot be read, which says why.

        Raises:
            UserError: The whole file cannot be read.
        """
        ...
