"""Trainers of low-rank adapters and in bfloat16 are green where they are right and red where they are wrong.

RLCANARY_STYLE_SEEDS says how many sets of weights the tiny model is tried with.
"""

import os
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from first_failure import first_failure
from styles import lora, low_precision

import rlcanary.tiny_models
from rlcanary.adapters.grpo import GrpoAdapter
from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.checks import all_checks, run_check

CHECKS = {check.id: check for check in all_checks()}
AREAS = ("step", "metrics", "evaluation", "sync")


class GrpoInBfloat(GrpoAdapter):
    """The bundled trainer on a model in bfloat16, for which it keeps float32 masters."""

    def new_state(self, model: Any, ref_model: Any, learning_rate: float) -> Any:
        reference_in_bfloat = None if ref_model is None else ref_model.to(torch.bfloat16)
        return super().new_state(model.to(torch.bfloat16), reference_in_bfloat, learning_rate)


def red(adapter: ReferenceAdapter, areas: tuple[str, ...] = AREAS, *, on_one_model: bool = False) -> dict[str, str]:
    checks = [check for check in CHECKS.values() if check.area in areas]
    results = [run_check(replace(each, worlds=()) if on_one_model else each, adapter, "unused") for each in checks]
    return {result.id: result.message for result in results if result.status not in ("pass", "not-provided")}


@pytest.fixture(params=range(int(os.environ.get("RLCANARY_STYLE_SEEDS", "1"))))
def other_weights(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks' tiny model from other random weights."""
    seeded = partial(rlcanary.tiny_models.tiny_llama, seed=request.param)
    monkeypatch.setattr(rlcanary.tiny_models, "tiny_llama", seeded)


@pytest.mark.usefixtures("other_weights")
def test_correct_trainer_of_adapters_is_green_everywhere() -> None:
    assert red(lora.Lora()) == {}


@pytest.mark.usefixtures("other_weights")
def test_sync_of_adapters_alone_is_green_where_it_is_declared() -> None:
    assert red(lora.AdaptersAlone(), ("sync",)) == {}
    assert "sync.same_policy" in red(lora.AdaptersAlone(lora.Lora().conventions), ("sync",))


@pytest.mark.usefixtures("other_weights")
def test_correct_float_masters_of_a_bfloat_model_are_green_everywhere() -> None:
    assert red(low_precision.FloatMasters()) == {}


def test_bfloat_parameters_without_masters_are_told_only_that_small_updates_are_lost() -> None:
    assert list(red(low_precision.BfloatParameters())) == ["step.small_learning_rate"]


def test_bundled_trainer_is_green_in_bfloat() -> None:
    assert red(GrpoInBfloat(), ("step", "rl_step", "metrics"), on_one_model=True) == {}


def test_declared_bound_of_the_norm_accuses_no_correct_trainer() -> None:
    bounded = ReferenceAdapter().conventions.replace(max_grad_norm=1.0, kl_coef=0.1)
    for trainer in (lora.Lora, low_precision.FloatMasters):
        assert red(trainer(bounded), ("step",), on_one_model=True) == {}


@pytest.mark.parametrize(
    ("trainer", "check_id"),
    [
        (lora.GradientsTimesMinusThree, "step.declared_gradient"),
        (lora.GradientsTimesMinusThree, "step.off_policy_gradient"),
        (lora.GradientsTimesMinusThree, "step.gradient_norm_is_clipped"),
        (lora.GradientsHalvedBelowTheirBound, "step.declared_gradient"),
        (lora.AdapterNeverSent, "sync.every_time"),
        (lora.AdapterNeverSent, "sync.every_parameter"),
        (lora.OneKindOfAdapterNeverSent, "sync.every_parameter"),
        (lora.MergeNeverUndone, "sync.trainer_untouched"),
        (lora.NoiseAfterTheFirstUpdate, "step.same_policy"),
        (lora.NoiseAfterTheFirstUpdate, "step.only_the_optimizer_moves"),
        (low_precision.GradientsTimes82, "step.declared_gradient"),
        (low_precision.GradientsTimesMinusThree, "step.declared_gradient"),
        (low_precision.GradientsHalvedBelowTheirBound, "step.declared_gradient"),
        (low_precision.MastersNeverWrittenBack, "step.only_the_optimizer_moves"),
    ],
    ids=lambda value: getattr(value, "__qualname__", value),
)
def test_wrong_variant_is_red_and_its_snippet_reproduces_it(trainer: type[ReferenceAdapter], check_id: str) -> None:
    right = lora.Lora if trainer.__module__ == lora.__name__ else low_precision.FloatMasters
    right = lora.AdaptersAlone if issubclass(trainer, lora.AdaptersAlone) else right
    result = first_failure(CHECKS[check_id], trainer(), f"{trainer.__module__}:{trainer.__name__}")
    assert result.status == "fail", result.message
    with pytest.raises(AssertionError):
        exec(result.snippet, {})
    exec(result.snippet.replace(f":{trainer.__name__}", f":{right.__name__}"), {})
