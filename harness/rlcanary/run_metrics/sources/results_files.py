"""Metrics of tests, from the results files that the tracker writes."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from rlcanary.errors import UserError
from rlcanary.history.run_result import UnreadableFile, read_run
from rlcanary.recording.results_file import RESULTS_NAME
from rlcanary.run_metrics.source import MetricSource, Scalar
from rlcanary.system.pytest_settings import pytest_settings


class ResultsFiles(MetricSource):
    """Results files, whose tags are `<test>.<metric>`."""

    description = f"results files ({RESULTS_NAME})"
    pattern = RESULTS_NAME
    has_steps = False

    def files(self, folder: Path, directory: Path) -> Iterable[Path]:
        yield from super().files(folder, directory)
        try:
            configured = pytest_settings(directory)
        except UserError:
            return  # pytest has reported the error in the run.
        if setting := configured.text("rlcanary_results"):
            yield configured.root / setting

    def read(self, path: Path) -> Iterator[Scalar | str]:
        result = read_run(path)
        if isinstance(result, UnreadableFile):
            raise UserError(str(result))
        for key, metrics in result.metrics.items():
            for name, value in metrics.items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    yield Scalar(f"{key}.{name}", 0, value)
                else:
                    yield f"{key}.{name} is {'not finite' if value is None else repr(value)}, not a number"


SOURCE = ResultsFiles()
