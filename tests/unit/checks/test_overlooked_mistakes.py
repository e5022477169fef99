"""Mistakes that checks overlooked are caught, and correct code that they accused is not accused."""

from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from overlooked_mutants import OVERLOOKED_MUTANTS
from torch import Tensor

from rlcanary import reference
from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.checks import all_checks, run_check
from rlcanary.contract import engine
from rlcanary.contract.batch import CollatedBatch, Completion, Group
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.engine import InProcessEngine
from rlcanary.contract.presets import GRPO
from rlcanary.contract.sampling import Sampling

CHECKS = {check.id: check for check in all_checks()}


@pytest.mark.parametrize(("mistake", "check_id"), OVERLOOKED_MUTANTS.items())
def test_overlooked_mistake_is_caught(mistake: type[ReferenceAdapter], check_id: str) -> None:
    assert run_check(CHECKS[check_id], mistake(), "mistaken").status == "fail"


def test_filters_before_the_temperature_are_caught() -> None:
    exact = engine.processed_logprobs

    def filtered_first(logits: Tensor, sampling: Sampling, **given: Any) -> Tensor:
        at_one = {**vars(sampling), "temperature": 1.0}
        return (exact(logits, Sampling(**at_one), **given) / sampling.temperature).log_softmax(-1)

    with mock.patch.object(engine, "processed_logprobs", filtered_first):
        assert run_check(CHECKS["parity.distribution"], ReferenceAdapter(), "mistaken").status == "fail"


class TakesNoGreedyRequestForTwo(ReferenceAdapter):
    def generate(self, engine: Any, prompts: list[list[int]], sampling: Mapping[str, Any]) -> list[list[Completion]]:
        return super().generate(engine, prompts, Sampling.of(sampling).__dict__)


class NoisyEngine(InProcessEngine):
    noise = (torch.rand(1, 64, generator=torch.Generator().manual_seed(1)) * 2 - 1) * 0.1

    def next_logits(self, *given: Any, **named: Any) -> Tensor:
        return super().next_logits(*given, **named) + self.noise


class LessExact(ReferenceAdapter):
    """An engine that is off by a tenth of a nat, where half a nat is declared."""

    def __init__(self, conventions: Conventions = GRPO) -> None:
        super().__init__(conventions.replace(engine_tolerance=0.5))

    def new_engine(self, model: Any) -> Any:
        return NoisyEngine(model)


class PadsToBuckets(ReferenceAdapter):
    def make_batch(self, groups: list[Group], pad_token_id: int) -> CollatedBatch:
        return reference.make_batch(groups, pad_token_id, completion_len_buckets=[8, 16, 512])[0]


@pytest.mark.parametrize(
    ("adapter", "check_id"),
    [
        (TakesNoGreedyRequestForTwo, "parity.logprobs_are_logprobs"),
        (LessExact, "parity.distribution"),
        (PadsToBuckets, "eos.masks_agree"),
    ],
)
def test_correct_code_is_not_accused(adapter: type[ReferenceAdapter], check_id: str) -> None:
    result = run_check(CHECKS[check_id], adapter(), "correct")
    assert result.status == "pass", result.message


UNUSUAL = {
    "terms that are aggregated otherwise": GRPO.replace(
        kl_coef=0.3, kl_aggregation="sequence_mean", entropy_coef=0.1, aggregation="token_mean"
    ),
    "tokens of high entropy": GRPO.replace(top_entropy=0.4, entropy_coef=0.05),
    "a tight clamp": GRPO.replace(log_ratio_clamp=0.3),
}


@pytest.mark.parametrize("told", UNUSUAL)
def test_unusual_declarations_are_not_accused(told: str) -> None:
    adapter = ReferenceAdapter(UNUSUAL[told])
    areas = [each for each in CHECKS.values() if each.area == "rl_step"]
    for check in (*areas, CHECKS["loss.on_policy_sign"], CHECKS["metrics.move"]):
        result = run_check(check, adapter, "reference")
        assert result.status not in ("fail", "error"), result.message
