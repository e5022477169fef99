"""Bugs in the table of samples."""

from dataclasses import replace

from rlcanary.bugs.museum import Bug
from rlcanary.contract.records.reporting import LoggedSample, RolloutBatch


class SamplesOfTheLastMicroBatch(Bug):
    id = "trl.samples-of-the-last-micro-batch"
    source = "TRL, #3217"
    effect = "each accumulation step replaces the table: it holds the prompts of the last one only"

    def logged_samples(self, batch: RolloutBatch, n_samples: int) -> list[LoggedSample]:
        return super().logged_samples(replace(batch, groups=batch.groups[-1:]), n_samples)
