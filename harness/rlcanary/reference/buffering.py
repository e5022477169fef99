"""The buffer in which groups wait between sampler and trainer, and the seeds of the sampler."""

import hashlib
from collections.abc import Sequence

import torch

from rlcanary.contract.batch import Group
from rlcanary.contract.conventions import BufferFull, BufferOrder
from rlcanary.contract.records.buffering import BufferSettings, Taken
from rlcanary.reference.data.filters import has_signal, is_stale


class Buffer:
    """Groups that wait to be trained, in the order in which they were put.

    Attributes:
        settings: its settings.
        waiting: the groups in it.
        trained: the version of the trainer that took the last batch; None before the first.
    """

    def __init__(self, settings: BufferSettings, order: BufferOrder | None, when_full: BufferFull) -> None:
        """Start empty.

        Args:
            settings: its settings.
            order: which groups are taken next; None is any, here those put first.
            when_full: what happens to a group that is put into a full buffer.

        Raises:
            ValueError: a number is out of range.
        """
        if settings.groups_per_batch < 1 or settings.max_staleness < 0:
            raise ValueError(f"{settings} has no batch or a staleness below 0")
        if settings.capacity is not None and settings.capacity < settings.groups_per_batch:
            raise ValueError(f"{settings.capacity} groups are less than a batch of {settings.groups_per_batch}")
        self.settings, self.waiting = settings, list[Group]()
        self.trained: int | None = None
        self._order, self._when_full = order, when_full

    def put(self, groups: Sequence[Group]) -> int:
        """Put groups into the buffer -> how many it took, from the first on."""
        for taken, group in enumerate(groups):
            if self.settings.dynamic_sampling and not has_signal(torch.tensor(group.rewards)):
                continue
            if len(self.waiting) == self.settings.capacity:
                if self._when_full == "refuse":
                    return taken
                del self.waiting[0]
            self.waiting.append(group)
        return len(groups)

    def take(self, trainer_version: int) -> Taken:
        """Take the groups of one update, after all that are too old for it have left.

        The age of a group is the trainer's version at the time of training minus that of its oldest token (AReaL, arXiv
        2505.24298, section 5.1).
        """
        marked = [(is_stale(group, trainer_version, self.settings.max_staleness), group) for group in self.waiting]
        stale = [group for is_old, group in marked if is_old]
        self.waiting = [group for is_old, group in marked if not is_old]
        count = self.settings.groups_per_batch
        if len(self.waiting) < count:
            return Taken([], stale)
        self.trained = trainer_version
        if self._order == "newest_first":
            groups, self.waiting = self.waiting[-count:], self.waiting[:-count]
        else:
            groups, self.waiting = self.waiting[:count], self.waiting[count:]
        return Taken(groups, stale)

    def room(self, trainer_version: int, running: int) -> int:
        """Return how many groups the sampler may start besides the running ones, so that none of them grows too old.

        Of the groups on their way, n for each update, the last of k × n is trained with the k-th batch from now, which may
        be max_staleness versions away: AReaL's bound (arXiv 2505.24298, eq. 3) without the updates behind it.
        """
        has_taken = self.trained == trainer_version
        most = (self.settings.max_staleness + (not has_taken)) * self.settings.groups_per_batch
        if self.settings.capacity is not None:
            most = min(most, self.settings.capacity)
        return max(0, most - len(self.waiting) - running)


def rollout_seed(seed: int, rank: int, step: int, request: int) -> int:
    """Return a seed of 63 bits, which no other rank, step or request of the run has, and no run with another seed."""
    digest = hashlib.blake2b(f"{seed} {rank} {step} {request}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
