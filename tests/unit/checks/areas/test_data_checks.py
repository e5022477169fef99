"""What the checks of data, rollouts and forward passes see, and what they leave alone."""

from collections.abc import Mapping
from typing import Any

import data_mutants as mutants
import memory_mutants
import pytest
from torch import Tensor

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.checks import Result, all_checks, run_check
from rlcanary.checks.observed import Observed
from rlcanary.checks.tally import Tally
from rlcanary.contract.adapter import Adapter, Item, NotProvided, provided
from rlcanary.contract.batch import CollatedBatch, Group

CHECKS = {check.id: check for check in all_checks()}


def run(check_id: str, adapter: Adapter) -> Result:
    return run_check(CHECKS[check_id], adapter, "reference")


class SeededEngine(ReferenceAdapter):
    """The engine has a seed of its own; requests carry none."""

    def rollout(self, engine: Any, items: list[Item], sampling: Mapping[str, Any]) -> list[Group]:
        return super().rollout(engine, items, {**sampling, "seed": None})


class RefusesSeeds(ReferenceAdapter):
    def rollout(self, engine: Any, items: list[Item], sampling: Mapping[str, Any]) -> list[Group]:
        if sampling["seed"] is not None:
            raise NotProvided("the engine has a seed of its own")
        return super().rollout(engine, items, sampling)


@pytest.mark.parametrize("adapter", [SeededEngine(), RefusesSeeds()])
def test_engine_with_a_seed_of_its_own_keeps_the_checks_of_sampling(adapter: Adapter) -> None:
    assert run("rollout.sampling_reaches_the_engine", adapter).status == "pass"
    assert run("rollout.seeds", adapter).status == "pass"
    assert run("rollout.seed_reaches_the_engine", adapter).status in ("not-compared", "not-provided")


def test_seed_of_zero_that_is_ignored_is_a_finding() -> None:
    assert run("rollout.seed_reaches_the_engine", ReferenceAdapter()).status == "pass"
    assert run("rollout.seed_reaches_the_engine", mutants.SeedOfZeroIgnored()).status == "fail"


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k", "max_new_tokens", "eos_token_ids"])
def test_each_sampling_parameter_that_does_not_arrive_is_a_finding(name: str) -> None:
    class Forgets(ReferenceAdapter):
        def rollout(self, engine: Any, items: list[Item], sampling: Mapping[str, Any]) -> list[Group]:
            return super().rollout(engine, items, {key: value for key, value in sampling.items() if key != name})

    assert run("rollout.sampling_reaches_the_engine", Forgets()).status == "fail"


def test_one_declined_sampling_parameter_leaves_the_others_judged() -> None:
    class NoTopK(ReferenceAdapter):
        def rollout(self, engine: Any, items: list[Item], sampling: Mapping[str, Any]) -> list[Group]:
            if sampling["top_k"]:
                raise NotProvided("no top-k")
            return super().rollout(engine, items, {**sampling, "temperature": sampling["temperature"] or 1.0})

    result = run("rollout.sampling_reaches_the_engine", NoTopK())
    assert result.status == "fail"
    assert "left out: no top-k" in result.message


def test_answers_of_two_tools_that_change_places_are_a_finding() -> None:
    assert run("rendering.tool_turns", mutants.ToolAnswersSwapped()).status == "fail"
    assert run("rendering.is_the_template", mutants.ToolAnswersSwapped()).status == "fail"


class AttendsToTheId2(ReferenceAdapter):
    def completion_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        is_padding_2 = bool((batch.input_ids[~batch.attention_mask] == 2).any())
        return super().completion_logprobs(model, batch, temperature) + 0.1 * is_padding_2


def test_padding_id_is_named_where_it_is_the_cause() -> None:
    result = run("forward.padding", AttendsToTheId2())
    assert result.status == "fail"
    assert "padding with the id 2" in result.message
    assert "also fails" not in result.message


UNUSUAL = {
    mutants.NewestVersionOfARow: "batch.optional_fields",
    mutants.RewardsInHalfPrecision: "batch.rewards_and_identity",
    mutants.TimeoutsScoreZero: "reward.failure_is_not_zero",
    mutants.TruncatedUnlessTheFirstEnd: "rollout.logprobs_and_finish_reasons",
    mutants.PacksLongestFirst: "forward.packing",
    **memory_mutants.CAUGHT_BY,
}


@pytest.mark.parametrize(("mutant", "check_id"), UNUSUAL.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_mistake_that_only_an_unusual_input_shows_is_a_finding(mutant: type[ReferenceAdapter], check_id: str) -> None:
    assert run(check_id, mutant()).status == "fail"


class RendersWithoutTools(Adapter):
    """Written before `render` took tools."""

    def render(self, messages: list[Mapping[str, Any]], tokenizer: Any) -> tuple[list[int], list[bool]]:
        return ReferenceAdapter().render(messages, tokenizer)


def test_an_adapter_that_renders_without_tools_is_told_how_to_move_and_judged_without_them() -> None:
    result = run("rendering.offered_tools", RendersWithoutTools())
    assert result.status == "not-provided"
    assert "def render(self, messages, tokenizer, tools=None)" in result.message
    assert run("rendering.tool_turns", RendersWithoutTools()).status == "pass"


@pytest.mark.parametrize("mutant", [mutants.ToolsLeftOut, mutants.MaskMadeWithoutTools])
def test_offered_tools_are_rendered_and_the_mask_moves_with_them(mutant: type[ReferenceAdapter]) -> None:
    assert run("rendering.offered_tools", mutant()).status == "fail"


def test_the_body_of_a_check_sees_which_capabilities_there_are() -> None:
    for adapter in (ReferenceAdapter(), RendersWithoutTools()):
        assert provided(Observed(adapter, Tally(), adapter.conventions)) == provided(adapter)
