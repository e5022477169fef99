"""Bugs in the data order."""

import torch

from rlcanary.bugs.museum import Bug
from rlcanary.reference import ordering


class SamplerStateNotSaved(Bug):
    id = "verl.sampler-state-not-saved"
    source = "verl ef44dcc72, #4156, survey V46"
    effect = "a resumed run repeats prompts and never reaches others"

    def data_order(self, n_items: int, epoch: int, rank: int, world_size: int) -> list[int]:
        return ordering.data_order(n_items, epoch, rank, world_size, seed=torch.initial_seed())
