"""Bugs in the batches of a run."""

from dataclasses import replace

from rlcanary.bugs.museum import Bug
from rlcanary.contract.records.building import PlanSettings, RunPlan


class LastBatchNeverTrained(Bug):
    id = "openrlhf.last-batch-never-trained"
    source = "OpenRLHF d37da139, #1300, survey O05"
    effect = "the batch that comes with the end of the data is thrown away: the last of every epoch is never trained"

    def run_plan(self, settings: PlanSettings) -> RunPlan:
        plan = super().run_plan(settings)
        per_epoch = len(plan.batches[0]) // settings.epochs or 1
        trained = [[batch for number, batch in enumerate(of_rank, 1) if number % per_epoch] for of_rank in plan.batches]
        return replace(plan, batches=trained)


class DropLastInTheSamplerAlone(Bug):
    id = "areal.drop-last-in-the-sampler-alone"
    source = "AReaL 2b96fd8e8, #665"
    effect = "drop_last reaches the sampler and not the loader: every epoch ends with an update on fewer rows"

    def run_plan(self, settings: PlanSettings) -> RunPlan:
        even = settings.n_items - settings.n_items % settings.ranks * settings.drop_last
        return super().run_plan(replace(settings, n_items=even, drop_last=False))


class RankCountedFromTheStart(Bug):
    id = "areal.rank-counted-from-the-start"
    source = "AReaL 9a07ab946"
    effect = "each call begins again at the first rank: its items are trained over and over, those of the others never"

    def run_plan(self, settings: PlanSettings) -> RunPlan:
        plan = super().run_plan(settings)
        return replace(plan, batches=[plan.batches[0]] * settings.ranks)
