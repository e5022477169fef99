"""The tracker, with which a test records measurements."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rlcanary.recording.encoding import EncodingError, encode
from rlcanary.recording.memory import MemorySampler
from rlcanary.recording.records import Records

ELAPSED = "_elapsed"


class TrackingError(ValueError):
    """A call of the tracker that cannot be recorded.

    It fails the test that made it; measurements before it are kept.
    """


class Tracker:
    """The `tracker` fixture: records measurements of one test.

    Each is in the journal when the call returns, or in memory until the run ends if the disk is full.
    """

    def __init__(self, nodeid: str, records: Records, sampler: MemorySampler) -> None:
        self._nodeid = nodeid
        self._records = records
        self._sampler = sampler
        self._names: set[str] = set()

    def track(self, metric_name: str, metric_value: object) -> None:
        """Records a measurement under a name that is new in this test.

        Accepts the types of `encoding.encode`: numbers, strings, small tensors and arrays, lists, dicts, dataclasses,
        paths, dates.

        Raises:
            TrackingError: if the name is empty, taken or `_elapsed`, or the value has no JSON form.
        """
        __tracebackhide__ = True
        if not isinstance(metric_name, str) or not metric_name:
            raise TrackingError(f"a metric's name must be a string that is not empty, got {metric_name!r}")
        if metric_name == ELAPSED:
            raise TrackingError(f"{ELAPSED!r} is the time of the test and is recorded by itself; choose another name")
        if metric_name in self._names:
            raise TrackingError(
                f"metric {metric_name!r} was already tracked in this test; a second value would replace the first. "
                "Give each its own name, or track a list"
            )
        try:
            value, nonfinite = encode(metric_value)
        except EncodingError as error:
            raise TrackingError(f"metric {metric_name!r} cannot be recorded: {error}") from None
        self._names.add(metric_name)
        self._records.append(
            {
                "record": "metric",
                "nodeid": self._nodeid,
                "name": metric_name,
                "value": value,
                "nonfinite": [entry._asdict() for entry in nonfinite],
            }
        )

    def get_max_mem(self) -> float:
        """Returns the peak memory in use since the test began, in GB of 2**30 bytes.

        This is the fullest GPU of the Ray cluster and of this machine. Without GPUs it is the resident memory of the
        test's process and its descendants.

        Raises:
            UserError: if the memory of some GPU is not known.
        """
        return self._sampler.max_gb()

    def log_max_mem(self, metric_name: str) -> None:
        """Tracks `get_max_mem()` under a name."""
        __tracebackhide__ = True
        self.track(metric_name, self.get_max_mem())


@contextmanager
def tracking(nodeid: str, records: Records, sampler: MemorySampler) -> Iterator[Tracker]:
    """Yields a tracker for one test, from its set-up to its tear-down.

    Records the time between the two as `_elapsed`, in seconds.
    """
    records.append({"record": "begin", "nodeid": nodeid})
    sampler.start()
    began = time.perf_counter()
    try:
        yield Tracker(nodeid, records, sampler)
    finally:
        elapsed = time.perf_counter() - began
        sampler.stop()
        records.append({"record": "metric", "nodeid": nodeid, "name": ELAPSED, "value": elapsed, "nonfinite": []})
        if names := sampler.gpu_names():
            records.append({"record": "gpus", "names": names})
        records.sync()
