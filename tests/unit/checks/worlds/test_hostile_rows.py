"""Each axis of the worlds shows a mistake that nothing else shows."""

import pytest
import world_mutants as mutants

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.checks import all_checks, run_check

CHECKS = {check.id: check for check in all_checks()}


@pytest.mark.parametrize(
    ("mutant", "check_id", "case"),
    [
        (mutants.ToolTokensUnattended, "forward.scores_each_token_at_its_place", ""),
        (mutants.RewardOfToolTokens, "step.declared_gradient", "tool tokens"),
        (mutants.RewardOfToolTokens, "metrics.recomputed", "tool tokens"),
        (mutants.FirstTemperatureStays, "parity.whenever_asked", ""),
        (mutants.NeverEndsAtOnce, "parity.ends_as_often_as_probable", ""),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_only_the_hostile_case_finds_the_mistake(mutant: type[ReferenceAdapter], check_id: str, case: str) -> None:
    result = run_check(CHECKS[check_id], mutant(), f"world_mutants:{mutant.__name__}")
    # Changed conventions, and the model that it runs on, are named after the case.
    told = [found.fingerprint.case.partition("model ")[0].rstrip("; ") for found in result.findings]
    cases = {case.partition(", ")[0].removesuffix(" of an older policy") for case in told}
    assert cases == {case}, result.message
    with pytest.raises(AssertionError):
        exec(result.snippet, {})
    exec(result.snippet.replace(f"world_mutants:{mutant.__name__}", "reference"), {})


def test_order_of_arrival_is_drawn() -> None:
    def status(examples: int) -> str:
        check = CHECKS["rollout.groups_follow_items"]
        return run_check(check, mutants.GroupsAsTheyArrive(), "unused", examples=examples).status

    assert (status(0), status(20)) == ("pass", "fail")
