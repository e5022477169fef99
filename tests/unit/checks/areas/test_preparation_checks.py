"""Checks of verifiers, data preparation and settings: what they accept, and what is no pass."""

import pytest

from rlcanary.adapters.grpo import GrpoAdapter
from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.checks import all_checks, run_check
from rlcanary.contract.adapter import Adapter, NotProvided
from rlcanary.contract.presets import GRPO

CHECKS = [each for each in all_checks() if each.area in ("verifying", "preparing", "settings")]


def statuses(adapter, *areas):
    return {each.id: run_check(each, adapter, "unused").status for each in CHECKS if each.area in areas}


@pytest.mark.parametrize("side", ["drop", "left", "right", "raise"])
@pytest.mark.parametrize("equal", ["keep", "drop"])
def test_every_declared_treatment_of_rows_passes_where_it_is_done(side, equal):
    adapter = ReferenceAdapter(GRPO.replace(long_prompt=side, equal_prompts=equal, answer_taken="first"))
    assert set(statuses(adapter, "preparing", "verifying").values()) == {"pass"}


def test_plans_and_verifiers_of_the_bundled_trainer_pass():
    assert set(statuses(GrpoAdapter(), "verifying", "settings").values()) == {"pass"}


class RefusesEverything(ReferenceAdapter):
    def effective(self, written):
        raise ValueError("no")


def test_configuration_that_is_always_refused_is_no_pass():
    assert set(statuses(RefusesEverything(), "settings").values()) == {"error"}


class TrlAccuracy(Adapter):
    """The reward of TRL, whose references are LaTeX."""

    def verify(self, answer):
        from trl.rewards import accuracy_reward

        if (answer.kind, answer.format) != ("math", "boxed"):
            raise NotProvided("there is no such verifier")
        completion = [{"role": "assistant", "content": answer.text}]
        return accuracy_reward([completion], [rf"\boxed{{{answer.reference}}}"]) == [1.0]


class VerlRewards(Adapter):
    """Three rewards of verl, one of which takes the last line that begins with Answer."""

    def verify(self, answer):
        from verl.utils.reward_score import gsm8k, math_dapo, math_reward

        match answer.kind, answer.format:
            case "number", "hash":
                return gsm8k.compute_score(answer.text, answer.reference) == 1
            case "math", "boxed":
                return math_reward.compute_score(answer.text, answer.reference) == 1
            case "math", "line":
                return math_dapo.compute_score(answer.text, answer.reference)["acc"]
        raise NotProvided("there is no such verifier")


def test_rewards_of_trl_pass():
    assert set(statuses(TrlAccuracy(), "verifying").values()) == {"pass"}


def test_rewards_of_verl_pass_but_for_references_that_are_empty():
    found = statuses(VerlRewards(), "verifying")
    assert found.pop("verifying.empty_reference") == "fail"
    assert set(found.values()) == {"pass"}
