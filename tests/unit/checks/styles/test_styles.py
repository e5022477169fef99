"""Trainers and losses that are correct by construction are never accused, whatever their style.

The styles are complete adapters in `styles/`, written without the reference. Every check runs on each of them once; those
that draw random cases run again under further seeds: RLCANARY_STYLE_SEEDS says how many in all. Odd settings get half.
"""

import inspect
import os

import pytest
import torch
from styles.cispo import Cispo
from styles.dapo_packed import DapoPacked
from styles.data_pipeline import DataPipeline
from styles.dr_grpo import DrGrpo
from styles.fine_tuning import FineTuning
from styles.gspo import Gspo
from styles.padding_left import PaddingLeft
from styles.ppo import Ppo, ReinforcePlusPlus
from styles.rloo import Rloo

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.checks import all_checks, run_check
from rlcanary.contract.adapter import CAPABILITIES, Adapter, TrainState, provided
from rlcanary.contract.presets import GRPO

STYLES = (DrGrpo, Gspo, Rloo, DapoPacked, Cispo, PaddingLeft, FineTuning, DataPipeline, Ppo, ReinforcePlusPlus)
SEEDS = int(os.environ.get("RLCANARY_STYLE_SEEDS", "2"))
CHECKS = all_checks()
DRAWING = [check for check in CHECKS if "rng" in inspect.signature(check.cases).parameters]


def accusations(adapter, checks, seed=0):
    """What the checks have against an adapter; a check that compared nothing is none."""
    results = [run_check(check, adapter, adapter.name, seed) for check in checks]
    return {result.id: result.message for result in results if result.status in ("fail", "error")}


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)
def test_no_check_accuses_a_correct_style(style):
    assert accusations(style(), CHECKS) == {}


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)
@pytest.mark.parametrize("seed", range(1, SEEDS))
def test_no_random_case_accuses_a_correct_style(style, seed):
    assert accusations(style(), DRAWING, seed) == {}


def test_most_checks_of_numbers_draw_some_at_random():
    assert {"logprob", "advantage", "loss", "kl", "importance", "gradient", "split", "config"} <= {
        check.area for check in DRAWING
    }


def test_no_drawn_padding_accuses_a_model_in_half_precision():
    (padding,) = (check for check in CHECKS if check.id == "forward.padding")
    assert run_check(padding, Rloo(), Rloo.name, seed=1, examples=3).status == "pass"


def test_the_styles_have_every_capability_between_them():
    assert set().union(*(provided(style()) for style in STYLES)) == set(CAPABILITIES)


ODD = {
    "tight clip, as in PipelineRL": {"clip_low": 0.02, "clip_high": 0.02},
    "clip of GSPO on token ratios": {"clip_low": 3e-4, "clip_high": 3e-4},
    "clamped KL": {"kl_coef": 0.1, "kl_output_clamp": 0.1},
    "clamped log-ratio of a strong KL": {"kl_coef": 0.5, "kl_input_clamp": 0.3},
    "clamped KL with its score part": {"kl_coef": 0.5, "kl_score_term": True, "kl_output_clamp": 0.1},
}


@pytest.mark.parametrize("changes", ODD.values(), ids=ODD)
@pytest.mark.parametrize("seed", range((SEEDS + 1) // 2))
def test_odd_but_correct_settings_are_not_accused(changes, seed):
    adapter = ReferenceAdapter(GRPO.replace(**changes))
    areas = ("loss", "kl", "gradient", "split", "config")
    assert accusations(adapter, [check for check in DRAWING if check.area in areas], seed) == {}


class DividesItsOwnLogits(Adapter):
    """Scores logits that nothing else reads, dividing them where they are."""

    conventions = GRPO.replace(logprobs_upcast=False)

    def token_logprobs(self, logits, token_ids, temperature):
        logits.div_(temperature)
        return logits.log_softmax(-1).gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)


def test_code_that_divides_its_own_logits_in_place_is_only_told_so():
    assert set(accusations(DividesItsOwnLogits(), CHECKS)) == {"logprob.inputs_untouched"}


class EngineWithItsOwnSeed(PaddingLeft):
    """The engine was seeded when it started; requests carry no seed."""

    def rollout(self, engine, items, sampling):
        return super().rollout(engine, items, {**sampling, "seed": None})


def test_an_engine_with_a_seed_of_its_own_is_not_accused_of_other_sampling():
    found = accusations(EngineWithItsOwnSeed(), [check for check in CHECKS if check.area == "rollout"])
    assert found == {}


class PlainSgd(DrGrpo):
    """At a learning rate of 1e-6 most of its steps are below the resolution of float32."""

    def new_state(self, model, ref_model, learning_rate):
        optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        return TrainState(model, optimizer, schedule, ref_model)


def test_plain_sgd_is_not_accused_of_rounding():
    assert accusations(PlainSgd(), [check for check in CHECKS if check.area == "step"]) == {}
