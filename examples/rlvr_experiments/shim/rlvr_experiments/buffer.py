"""The buffer: `rlcanary.grpo.rollout.buffer.GroupBuffer`, in this process."""

import sys
from dataclasses import dataclass
from typing import Any

from rlcanary.contract.batch import Completion, Group
from rlcanary.grpo.rollout.buffer import GroupBuffer

# Their consumer judges staleness itself: no version is too old, and none is newer than the trainer.
LATEST = sys.maxsize
DONE = object()


@dataclass
class Entry:
    """An item as it is popped."""

    item: Any
    version: int
    reads_remaining: int
    item_id: str


class DataBuffer:
    """A buffer of groups, each of which carries an item. A group is read once."""

    def __init__(self, maxsize=0, max_reads=1):
        if max_reads != 1:
            raise ValueError(f"max_reads={max_reads}: a group leaves the buffer when it is read")
        self._max_reads = max_reads
        self._buffer = GroupBuffer(maxsize or sys.maxsize, max_staleness=LATEST)

    async def put(self, item, version, item_id):
        """Add an item, as soon as there is room."""
        await self._buffer.put(Group((), [Completion((), text=item)], (), item_id=item_id, policy_version=version))

    async def mark_done(self):
        """Add the mark of the end."""
        await self.put(DONE, 0, "")

    async def pop(self):
        """Take the next item; None at the mark of the end."""
        (group,) = (await self._buffer.take(1, trainer_version=LATEST)).groups
        item = group.completions[0].text
        return None if item is DONE else Entry(item, group.policy_version, 0, group.item_id)

    def size(self):
        """Count the items that wait."""
        return _result(self._buffer.account()).waiting

    def reset(self):
        """Drop what waits."""
        _result(self._buffer.reset())

    def get_stats(self):
        """Count the items that came, went and wait."""
        account = _result(self._buffer.account())
        return {"put": account.entered, "popped": account.fates["used"], "current_size": account.waiting}

    @property
    def stats(self):
        """Return the holder of the counts by version, which is the buffer."""
        return self

    def get_by_version(self):
        """Count the items that wait by version."""
        return _result(self._buffer.account()).waiting_by_version


def _result(coroutine):
    """Return the result of a call that has nothing to wait for."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise RuntimeError("another call holds the buffer")
