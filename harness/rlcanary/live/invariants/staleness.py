"""No row was sampled by weights that do not exist yet, or by older ones than the run allows."""

from __future__ import annotations

from collections.abc import Iterator

from rlcanary.live.findings import Finding
from rlcanary.live.record import Record


def judge(record: Record) -> Iterator[Finding]:
    """Compare the versions of the rows with the trainer's."""
    if record.versions is None or record.trainer_version is None:
        return
    newest = int(record.versions.max())
    if newest > record.trainer_version:
        told = f"a row was sampled by version {newest}, and the update starts from version {record.trainer_version}"
        yield Finding("staleness.from_the_future", told, newest - record.trainer_version)
    age = record.trainer_version - int(record.versions.min())
    if record.max_staleness is not None and age > record.max_staleness:
        told = f"a row is {age} versions old, and at most {record.max_staleness} are allowed"
        yield Finding("staleness.too_old", told, age)
