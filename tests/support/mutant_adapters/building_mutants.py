"""Mistakes in the start of a run that no shipped bug in the museum has."""

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.contract.records.building import PlanSettings, RunPlan, RunSettings


class Asked(ReferenceAdapter):
    """Builds from other settings than those that were asked for."""

    def other(self, settings: RunSettings) -> RunSettings:
        raise NotImplementedError

    def build(self, settings: RunSettings, model: Any) -> Any:
        return super().build(self.other(settings), model)


class ScheduleInSamples(Asked):
    """Eight samples an update: the warm-up and the fall are eight times as long."""

    def other(self, settings: RunSettings) -> RunSettings:
        return replace(settings, warmup_updates=8 * settings.warmup_updates, total_updates=8 * settings.total_updates)


class FinalRateIsZero(Asked):
    def other(self, settings: RunSettings) -> RunSettings:
        return replace(settings, final_share=0.0)


class FirstUpdateAtRateZero(ReferenceAdapter):
    def build(self, settings: RunSettings, model: Any) -> Any:
        state = super().build(settings, model)
        shares = state.scheduler.lr_lambdas[0]
        state.scheduler = torch.optim.lr_scheduler.LambdaLR(state.optimizer, lambda step: min(1, step) * shares(step))
        return state


class NoDecayMeansTheDefault(Asked):
    def other(self, settings: RunSettings) -> RunSettings:
        return replace(settings, weight_decay=settings.weight_decay or 0.01)


class DecayInTheGradient(ReferenceAdapter):
    def build(self, settings: RunSettings, model: Any) -> Any:
        state = super().build(settings, model)
        for group in state.optimizer.param_groups:
            group["decoupled_weight_decay"] = False
        return state


class EpsNotPassedOn(Asked):
    def other(self, settings: RunSettings) -> RunSettings:
        return replace(settings, eps=1e-8)


class BetasNotPassedOn(Asked):
    def other(self, settings: RunSettings) -> RunSettings:
        return replace(settings, betas=(0.9, 0.999))


class PatternsAreWholeNames(ReferenceAdapter):
    def build(self, settings: RunSettings, model: Any) -> Any:
        names = [name for name, _ in model.named_parameters() if name in settings.frozen]
        return super().build(replace(settings, frozen=names), model)


class HeadOfItsOwn(ReferenceAdapter):
    """The output layer is made anew from its weights, so that tied weights part."""

    def build(self, settings: RunSettings, model: Any) -> Any:
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
        return super().build(settings, model)


class LayersInNoOptimizer(ReferenceAdapter):
    """The optimizer has the parameters of the last layer and of all that is behind it."""

    def build(self, settings: RunSettings, model: Any) -> Any:
        state = super().build(settings, model)
        for group in state.optimizer.param_groups:
            group["params"] = group["params"][-3:]
        return state


class BothMatricesRandom(ReferenceAdapter):
    def build(self, settings: RunSettings, model: Any) -> Any:
        state = super().build(settings, model)
        for name, parameter in state.model.named_parameters():
            if name.endswith("lora_B"):
                torch.nn.init.normal_(parameter, std=0.05)
        return state


class RoundedOnTheWay(ReferenceAdapter):
    def build(self, settings: RunSettings, model: Any) -> Any:
        return super().build(settings, model.bfloat16())


class NormsTrainedBesideAdapters(ReferenceAdapter):
    def build(self, settings: RunSettings, model: Any) -> Any:
        state = super().build(settings, model)
        norms = [each for name, each in state.model.named_parameters() if "norm" in name and not each.requires_grad]
        state.optimizer.add_param_group({"params": norms, "lr": settings.learning_rate, "weight_decay": 0.0})
        for norm in norms:
            norm.requires_grad_(True)
        return state


def _adapters(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "lora_A")]


class AlphaWithoutTheRank(ReferenceAdapter):
    def build(self, settings: RunSettings, model: Any) -> Any:
        state = super().build(settings, model)
        for each in _adapters(state.model):
            each.scale *= len(each.lora_A)
        return state


class HalfPrecisionWithoutMasters(ReferenceAdapter):
    def build(self, settings: RunSettings, model: Any) -> Any:
        state = super().build(settings, model)
        state.model.bfloat16()
        return state


class ReentrantCheckpoints(ReferenceAdapter):
    """Layers whose inputs need no gradient get none."""

    def build(self, settings: RunSettings, model: Any) -> Any:
        state = super().build(replace(settings, gradient_checkpointing=False), model)
        if settings.gradient_checkpointing:
            state.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
            state.model.disable_input_require_grads()
        return state


class ReferenceIsThePolicy(ReferenceAdapter):
    def build(self, settings: RunSettings, model: Any) -> Any:
        state = super().build(settings, model)
        state.ref_model = state.ref_model and state.model
        return state


class ReferenceSharesItsHead(ReferenceAdapter):
    def build(self, settings: RunSettings, model: Any) -> Any:
        state = super().build(settings, model)
        if state.ref_model is not None:
            state.ref_model.lm_head = state.model.lm_head
        return state


class Dropping(torch.nn.Module):
    """A model that is in training mode whenever it is called."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Any:
        self.model.train()
        return self.model(**inputs)


class ReferenceKeepsItsDropout(ReferenceAdapter):
    def build(self, settings: RunSettings, model: Any) -> Any:
        state = super().build(settings, model)
        state.ref_model = state.ref_model and Dropping(state.ref_model)
        return state


class RatesOfTheUpdatesThatAreLeft(ReferenceAdapter):
    """A resumed run goes through the whole schedule in the updates that are left."""

    def load_checkpoint(self, state: Any, folder: Any) -> Any:
        resumed = super().load_checkpoint(state, folder)
        done, (shares, *_) = resumed.scheduler.last_epoch, copy.deepcopy(resumed.scheduler.lr_lambdas)
        resumed.scheduler = torch.optim.lr_scheduler.LambdaLR(
            resumed.optimizer, lambda step: shares(max(0, step - done))
        )
        return resumed


class Planned(ReferenceAdapter):
    """Changes a plan."""

    def other(self, plan: RunPlan, settings: PlanSettings) -> RunPlan:
        raise NotImplementedError

    def run_plan(self, settings: PlanSettings) -> RunPlan:
        return self.other(super().run_plan(settings), settings)


class PassesNotCounted(Planned):
    def other(self, plan: RunPlan, settings: PlanSettings) -> RunPlan:
        return replace(plan, updates=plan.updates // self.conventions.epochs_per_rollout)


class ScheduleInBatches(Planned):
    def other(self, plan: RunPlan, settings: PlanSettings) -> RunPlan:
        return replace(plan, schedule_updates=len(plan.batches[0]))


class ScheduleOfOneEpoch(Planned):
    def other(self, plan: RunPlan, settings: PlanSettings) -> RunPlan:
        return replace(plan, schedule_updates=plan.schedule_updates // settings.epochs)


class ScheduleOfAllEpochs(Planned):
    """A limit ends the run and not the schedule."""

    def other(self, plan: RunPlan, settings: PlanSettings) -> RunPlan:
        whole = ReferenceAdapter.run_plan(self, replace(settings, max_batches=None))
        return replace(plan, schedule_updates=whole.schedule_updates)


class BatchSizeOfEachRank(ReferenceAdapter):
    def run_plan(self, settings: PlanSettings) -> RunPlan:
        size = settings.prompts_per_batch * settings.ranks
        return super().run_plan(replace(settings, prompts_per_batch=min(size, settings.n_items)))


class EpochNeverTold(Planned):
    def other(self, plan: RunPlan, settings: PlanSettings) -> RunPlan:
        size = len(plan.batches[0]) // settings.epochs
        return replace(plan, batches=[[*of_rank[:size]] * settings.epochs for of_rank in plan.batches])


CAUGHT_BY = {
    ScheduleInSamples: "building.learning_rates",
    FinalRateIsZero: "building.learning_rates",
    FirstUpdateAtRateZero: "building.learning_rates",
    RatesOfTheUpdatesThatAreLeft: "building.resumed_rates",
    NoDecayMeansTheDefault: "building.weight_decay",
    DecayInTheGradient: "building.weight_decay",
    EpsNotPassedOn: "building.optimizer",
    BetasNotPassedOn: "building.optimizer",
    PatternsAreWholeNames: "building.trained_parts",
    HeadOfItsOwn: "building.trained_parts",
    LayersInNoOptimizer: "building.trained_parts",
    BothMatricesRandom: "building.starts_as_the_model",
    RoundedOnTheWay: "building.starts_as_the_model",
    NormsTrainedBesideAdapters: "building.adapters_are_trained_alone",
    AlphaWithoutTheRank: "building.adapter_scale",
    HalfPrecisionWithoutMasters: "building.small_updates_are_kept",
    ReentrantCheckpoints: "building.gradient_checkpointing",
    ReferenceIsThePolicy: "building.reference_model",
    ReferenceSharesItsHead: "building.reference_model",
    ReferenceKeepsItsDropout: "building.kl_starts_at_zero",
    PassesNotCounted: "plan.updates",
    ScheduleInBatches: "plan.schedule_length",
    ScheduleOfOneEpoch: "plan.schedule_length",
    ScheduleOfAllEpochs: "plan.limit",
    BatchSizeOfEachRank: "plan.batches",
    EpochNeverTold: "plan.order",
}
BUILDING_MUTANTS = list(CAUGHT_BY)
