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
    source = "open-instruct 1b6d913ef, #910"
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
