"""Mutants of the contract: every field, argument, sampling parameter and convention is ignored once."""

from dataclasses import fields

import pytest
import torch

from rlcanary.adapters.grpo import GrpoAdapter
from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.checks import all_checks
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.batch import CollatedBatch, Completion, Group
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.sampling import Sampling
from rlcanary.mutants.contract import contract_mutants
from rlcanary.mutants.killing import Fate, Trial, judge
from rlcanary.mutants.mutant import Mutant, Run
from rlcanary.mutants.unread import NOT_GIVEN, UNREAD

MUTANTS = list(contract_mutants(ReferenceAdapter()))
GROUPS = [Group([5, 6], [Completion([7, 2], [-0.5, -0.25]), Completion([8], [-1.0])], [1.0, 0.0])]


def mutant(where: str, mistake: str) -> Mutant:
    (found,) = (each for each in MUTANTS if each.where.endswith(f":{where}") and each.diff.endswith(f"\n+ {mistake}"))
    return found


def planted(where: str, mistake: str) -> Adapter:
    return mutant(where, mistake).planted_in(ReferenceAdapter())


def fate(where: str, mistake: str, check_id: str) -> Fate:
    (check,) = (each for each in all_checks() if each.id == check_id)
    run = Run(check, 0.0, dict.fromkeys(check.needs, frozenset()))
    return judge(Trial("reference", ReferenceAdapter(), mutant(where, mistake), [run]))


def ignored(where: str) -> set[str]:
    """The parts that the mutants of this capability ignore."""
    return {each.diff.splitlines()[0].removeprefix("- ") for each in MUTANTS if each.where.endswith(f":{where}")}


def test_ids_are_distinct() -> None:
    assert len({each.id for each in MUTANTS}) == len(MUTANTS) > 500


def test_every_field_that_a_capability_reads_is_mutated() -> None:
    named = {f"CollatedBatch.{field.name}" for field in fields(CollatedBatch)}
    assert ignored("train_step") >= named - {f"CollatedBatch.{name}" for name in UNREAD["train_step"]}
    assert ignored("make_batch") >= {f"returned {name}" for name in named}
    assert ignored("generate") >= {f"sampling.{field.name}" for field in fields(Sampling)} - {
        f"sampling.{name}" for name in NOT_GIVEN
    }
    assert {each.where.partition(":")[2] for each in MUTANTS} >= {field.name for field in fields(Conventions)}


def test_fields_that_a_capability_has_no_reason_to_read_are_left_alone() -> None:
    assert "CollatedBatch.rewards" not in ignored("completion_logprobs")
    assert "CollatedBatch.rewards" in ignored("train_step")


@pytest.mark.parametrize(
    ("mistake", "rewards"),
    [
        ("Group.rewards is shifted by one", [0.0, 1.0]),
        ("returned CollatedBatch.rewards is blank", [0.0, 0.0]),
        ("returned CollatedBatch.item_ids lacks the last", [1.0, 0.0]),
    ],
)
def test_capability_sees_or_returns_something_else(mistake: str, rewards: list[float]) -> None:
    adapter = planted("make_batch", mistake)
    assert adapter.make_batch(GROUPS, 0).rewards.tolist() == rewards
    assert adapter.configured(kl_coef=0.5).make_batch(GROUPS, 0).rewards.tolist() == rewards
    assert ReferenceAdapter().make_batch(GROUPS, 0).rewards.tolist() == [1.0, 0.0]


def test_a_mutant_leaves_the_callers_records_alone() -> None:
    planted("make_batch", "Completion.logprobs is None").make_batch(GROUPS, 0)
    assert GROUPS[0].completions[0].logprobs == [-0.5, -0.25]


def test_a_convention_is_declared_and_another_computed() -> None:
    adapter = planted("advantage_scale", "advantage_scale='none'")
    assert adapter.conventions.advantage_scale == "group"
    rewards, group_ids = torch.tensor([1.0, 0.0]), torch.tensor([0, 0])
    assert adapter.advantages(rewards, group_ids).tolist() == [0.5, -0.5]


def test_conventions_are_mutated_behind_the_reference_alone() -> None:
    mutated = {each.where for each in contract_mutants(GrpoAdapter())}
    assert "rlcanary.contract.adapter:train_step" in mutated
    assert "rlcanary.contract.adapter:kl" not in mutated
    assert "rlcanary.contract.conventions:kl_coef" not in mutated


@pytest.mark.parametrize(
    ("where", "mistake", "check"),
    [
        ("make_batch", "Group.rewards is shifted by one", "batch.rewards_and_identity"),
        ("policy_loss", "metric clip_fraction is scaled", "loss.metrics"),
        ("kl_coef", "kl_coef=0.0", "config.kl_options"),
    ],
)
def test_a_check_kills_what_ignores_a_part(where: str, mistake: str, check: str) -> None:
    assert fate(where, mistake, check).verdict == "killed"


def test_check_that_does_not_look_at_the_part_kills_nothing() -> None:
    assert fate("make_batch", "Group.rewards is shifted by one", "batch.positions").verdict == "survived"
