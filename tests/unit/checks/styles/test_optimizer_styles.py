"""Trainers with a constant learning rate, or with an optimizer of their own, are green where they are right."""

from typing import Any

import torch

from rlcanary import TrainState
from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.checks import all_checks, run_check

CHECKS = {check.id: check for check in all_checks()}


class Switched(torch.optim.AdamW):
    """An optimizer that reads an attribute of its own when it steps."""

    enabled = None

    def __init__(self, parameters: Any, enabled: bool, **options: Any) -> None:
        super().__init__(parameters, **options)
        self.enabled = enabled

    def step(self, closure: Any = None) -> Any:
        if self.enabled is None:
            raise AttributeError("the optimizer has lost its own attribute")
        return super().step(closure)


class ConstantRate(ReferenceAdapter):
    """A codebase without a schedule, whose update steps none."""

    def new_state(self, model: Any, ref_model: Any, learning_rate: float) -> Any:
        optimizer = Switched(model.parameters(), True, lr=learning_rate, weight_decay=0.0)
        return TrainState(model, optimizer, None, ref_model)

    def train_step(self, state: Any, batch: Any) -> dict[str, float]:
        return super().train_step(_steppable(state), batch)

    def rl_step(self, state: Any, groups: Any, pad_token_id: int) -> dict[str, float]:
        return super().rl_step(_steppable(state), groups, pad_token_id)


def _steppable(state: Any) -> TrainState:
    constant = torch.optim.lr_scheduler.LambdaLR(state.optimizer, lambda _: 1.0)
    return TrainState(state.model, state.optimizer, constant, state.ref_model)


class Drifting(ConstantRate):
    """The same codebase, whose learning rate changes all the same."""

    def train_step(self, state: Any, batch: Any) -> dict[str, float]:
        metrics = super().train_step(state, batch)
        for group in state.optimizer.param_groups:
            group["lr"] = group["initial_lr"] = group["lr"] / 2
        return metrics


class OwnMasters(torch.optim.AdamW):
    """AdamW over float32 copies of the parameters, whose step takes their gradients and hands their values back."""

    def __init__(self, parameters: Any, start: Any = None, **options: Any) -> None:
        self.live = list(parameters)
        copies = [parameter.detach().float().clone() for parameter in self.live]
        super().__init__([copy if start is None else start(copy) for copy in copies], **options)
        self.copies = list(self.param_groups[0]["params"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.live:
            parameter.grad = None

    def step(self, closure: Any = None) -> Any:
        for parameter, copy in zip(self.live, self.copies, strict=True):
            copy.grad = None if parameter.grad is None else parameter.grad.float()
        done = super().step(closure)
        with torch.no_grad():
            for parameter, copy in zip(self.live, self.copies, strict=True):
                parameter.copy_(copy)
        return done


class WithMasters(ReferenceAdapter):
    """A codebase whose optimizer keeps masters of its own."""

    start: Any = None

    def new_state(self, model: Any, ref_model: Any, learning_rate: float) -> Any:
        optimizer = OwnMasters(model.parameters(), self.start, lr=learning_rate, weight_decay=0.0)
        return TrainState(model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0), ref_model)

    def build(self, settings: Any, model: Any) -> Any:
        state = super().build(settings, model)
        options = {"lr": settings.learning_rate, "betas": settings.betas, "eps": settings.eps, "weight_decay": 0.0}
        moved = [each for group in state.optimizer.param_groups for each in group["params"]]
        optimizer = OwnMasters(moved, self.start, **options)
        constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        return TrainState(state.model, optimizer, constant, state.ref_model)


class LateMasters(WithMasters):
    """The same codebase, whose masters are made before the weights are loaded (NeMo RL #2372)."""

    start = staticmethod(torch.zeros_like)


def statuses(adapter: ReferenceAdapter, *names: str) -> dict[str, str]:
    return {name: run_check(CHECKS[name], adapter, "unused").status for name in names}


STEPPED = (
    "step.learning_rate_schedule",
    "step.small_learning_rate",
    "step.only_the_optimizer_moves",
    "metrics.recomputed",
)


def test_a_constant_learning_rate_needs_no_scheduler() -> None:
    # Once there is a plain AdamW in the process, torch announces its step within that of a subclass too.
    torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
    assert statuses(ConstantRate(), *STEPPED) == dict.fromkeys(STEPPED, "pass")
    assert statuses(ConstantRate(), "rl_step.weights_move", "rl_step.learning_rates") == {
        "rl_step.weights_move": "pass",
        "rl_step.learning_rates": "not-provided",
    }


def test_a_learning_rate_that_changes_without_a_scheduler_is_red() -> None:
    assert statuses(Drifting(), "step.learning_rate_schedule") == {"step.learning_rate_schedule": "fail"}


def test_an_optimizer_that_fills_the_gradients_of_its_masters_itself_is_right() -> None:
    names = [
        "building.optimizer",
        "building.small_updates_are_kept",
        "building.starts_as_the_model",
        "rl_step.declared_gradients",
        "rl_step.weights_move",
        "step.declared_gradient",
        "step.off_policy_gradient",
        "step.only_the_optimizer_moves",
        "step.small_learning_rate",
    ]
    assert statuses(WithMasters(), *names) == dict.fromkeys(names, "pass")


def test_an_optimizer_that_empties_the_gradients_of_its_masters_is_right_too() -> None:
    class Emptied(OwnMasters):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.register_step_pre_hook(lambda *_: self.fill())
            self.register_step_post_hook(lambda *_: self.empty())

        def fill(self) -> None:
            for parameter, copy in zip(self.live, self.copies, strict=True):
                copy.grad = None if parameter.grad is None else parameter.grad.float()

        def empty(self) -> None:
            for parameter, copy in zip(self.live, self.copies, strict=True):
                parameter.data.copy_(copy)
                copy.grad = None

        def step(self, closure: Any = None) -> Any:
            return torch.optim.AdamW.step(self, closure)

    class WithEmptied(WithMasters):
        def new_state(self, model: Any, ref_model: Any, learning_rate: float) -> Any:
            optimizer = Emptied(model.parameters(), lr=learning_rate, weight_decay=0.0)
            return TrainState(model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0), ref_model)

    names = "step.declared_gradient", "step.only_the_optimizer_moves"
    assert statuses(WithEmptied(), *names) == dict.fromkeys(names, "pass")


def test_masters_that_are_made_before_the_weights_are_loaded_are_found_where_they_are_built() -> None:
    names = "building.starts_as_the_model", "step.same_policy"
    assert statuses(LateMasters(), *names) == dict.fromkeys(names, "fail")
