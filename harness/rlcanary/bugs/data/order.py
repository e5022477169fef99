"""Bugs in the data order."""

import torch

from rlcanary.bugs.museum import Bug
from rlcanary.reference.data import ordering


class SamplerStateNotSaved(Bug):
    id = "verl.sampler-state-not-saved"
    source = "verl ef44dcc72, #4156, survey V46"
    effect = "a resumed run repeats prompts and never reaches others"

    def data_order(self, n_items: int, epoch: int, rank: int, world_size: int) -> list[int]:
        return ordering.data_order(n_items, epoch, rank, world_size, seed=torch.initial_seed())


class EpochNeverSet(Bug):
    id = "areal.epoch-never-set"
    source = "AReaL e5ae305a6, #632"
    effect = "the sampler never learns the epoch: every epoch has the same order"

    def data_order(self, n_items: int, epoch: int, rank: int, world_size: int) -> list[int]:
        return super().data_order(n_items, 0, rank, world_size)


class RepeatedToFillTheBatch(Bug):
    id = "areal.repeated-to-fill-the-batch"
    source = "AReaL 2b96fd8e8, #665"
    effect = "each rank's items are repeated up to a whole batch of 8: some are trained twice an epoch"

    def data_order(self, n_items: int, epoch: int, rank: int, world_size: int) -> list[int]:
        order = super().data_order(n_items, epoch, rank, world_size)
        return [*order, *order[: -len(order) % 8]]


class DataStartsAgain(Bug):
    id = "open-instruct.data-starts-again"
    source = "open-instruct 1b6d913ef, #910, and 9e24c1c45, #1589; slime c497f630c, #1577; survey I16, I17, L40"
    effect = "a resumed run visits the data from its start"

    def resumed_order(self, n_items: int, consumed: int, count: int, rank: int, world_size: int) -> list[int]:
        return super().resumed_order(n_items, 0, count, rank, world_size)


class SkippedInEveryEpoch(Bug):
    id = "open-instruct.skipped-in-every-epoch"
    source = "open-instruct cd0a38128, #681"
    effect = (
        "what was visited before the stop is skipped in every later epoch too: part of the data is never seen again"
    )

    def resumed_order(self, n_items: int, consumed: int, count: int, rank: int, world_size: int) -> list[int]:
        per_epoch = len(self.data_order(n_items, 0, rank, world_size))
        epoch, skipped = divmod(consumed, per_epoch)
        visited: list[int] = []
        while len(visited) < count:
            visited += self.data_order(n_items, epoch, rank, world_size)[skipped:]
            epoch += 1
        return visited[:count]


class CountedOneEarly(Bug):
    id = "open-instruct.counted-one-early"
    source = "open-instruct 82cc80e9a, survey I20"
    effect = "what is skipped at a resume is counted one too early: from there on all data is misaligned"

    def resumed_order(self, n_items: int, consumed: int, count: int, rank: int, world_size: int) -> list[int]:
        return super().resumed_order(n_items, max(consumed - 1, 0), count, rank, world_size)


class FirstShardAtEveryCall(Bug):
    id = "areal.first-shard-at-every-call"
    source = "AReaL 9a07ab946, survey A30"
    effect = "each call for data begins at the first of two shards, and finds enough there: the second is never read"

    def data_order(self, n_items: int, epoch: int, rank: int, world_size: int) -> list[int]:
        order = super().data_order(n_items, epoch, rank, world_size)
        first = order[: -(-len(order) // 2)]
        return [*first, *first][: len(order)]
