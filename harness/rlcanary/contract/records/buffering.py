"""The records of the buffer in which groups wait between sampler and trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlcanary.contract.batch import Group


@dataclass(frozen=True)
class BufferSettings:
    """The settings of a buffer.

    Attributes:
        groups_per_batch: groups that an update trains on.
        max_staleness: policy versions that the oldest token of a group may be behind the trainer when it is taken.
        capacity: groups that wait at most; None is no bound.
        dynamic_sampling: groups whose rewards are all equal are left out where they are put.
        first_version: the trainer's version when the run starts, or goes on from a checkpoint without its old buffer.
    """

    groups_per_batch: int = 1
    max_staleness: int = 0
    capacity: int | None = None
    dynamic_sampling: bool = False
    first_version: int = 0


@dataclass(frozen=True)
class Taken:
    """The result of taking a batch from a buffer.

    Attributes:
        groups: the groups of one update, or none where too few wait that are fresh enough.
        stale: the groups that were found too old, each once, whose items can be sampled again; None where the code does
            not tell.
    """

    groups: Sequence[Group]
    stale: Sequence[Group] | None = None
