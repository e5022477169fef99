"""The start of a run: the state that it trains, and the batches and updates that it plans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlcanary.contract.declining import NotProvided

if TYPE_CHECKING:
    from rlcanary.contract.records.building import PlanSettings, RunPlan, RunSettings


class Building:
    """The state and the plan that a run builds before its first update."""

    def build(self, settings: RunSettings, model: Any) -> Any:
        """Build the `TrainState` of a new run as the team's trainer does: model, optimizer, schedule, reference model.

        `model` is the loaded one, in evaluation mode; it may be trained itself or a copy. The state has a `ref_model` where
        `Conventions.kl_coef` is above zero, unless `train_step` has another way to score with the start of the run. Its
        scheduler is stepped once per step of the schedule (`Conventions.schedule_advances`). Code without one of the
        settings declines it with `NotProvided` where it is not the default.
        """
        raise NotProvided

    def run_plan(self, settings: PlanSettings) -> RunPlan:
        """Plan the batches, the updates and the length of the learning-rate schedule of a whole run.

        Each rollout batch is trained in `Conventions.epochs_per_rollout` passes of `mini_batches` updates. Code that cannot
        divide these numbers so declines with `NotProvided`.
        """
        raise NotProvided
