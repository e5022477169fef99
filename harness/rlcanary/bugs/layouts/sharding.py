"""Bugs in rows that are cut for the ranks of a context-parallel group."""

from dataclasses import replace

from rlcanary.bugs.museum import Bug
from rlcanary.contract.batch import CollatedBatch
from rlcanary.contract.records.layouts import Layout, RowShard


class ShiftedTwice(Bug):
    id = "ms-swift.labels-shifted-twice"
    source = "ms-swift #9977"
    effect = "labels that were shifted before the split are shifted again on each rank"

    def shard_rows(self, batch: CollatedBatch, layout: Layout, rank: int) -> list[RowShard]:
        shards = super().shard_rows(batch, layout, rank)
        return [replace(shard, labels=shard.labels.roll(-1)) for shard in shards]
