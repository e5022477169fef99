"""No correct implementation is accused: the reference passes under the conventions of every paper and codebase."""

import inspect
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from functools import cache
from typing import Any, ClassVar, Self

import pytest

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.checks import Check, all_checks, run_check
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.presets import GRPO, PAPERS, PRESETS

VARIANTS = {
    **PRESETS,
    "batch-scaled": PAPERS["grpo"].replace(advantage_scale="batch", entropy_coef=0.01),
    "kl-in-reward": PAPERS["grpo"].replace(kl_coef=0.5, kl_placement="reward", kl_estimator="k1"),
    "ratio-weighted-kl": PAPERS["dapo"].replace(kl_coef=0.5, kl_ratio_weighted=True),
    "score-term": PAPERS["dapo"].replace(kl_coef=0.5, kl_score_term=True, kl_estimator="k2"),
    "truncated-importance": PAPERS["dapo"].replace(importance_level="token", importance_high=1.2),
    "masked-sequence-importance": PAPERS["grpo"].replace(
        importance_level="sequence", importance_mode="mask", importance_low=0.5
    ),
    "nonempty-sequences": PAPERS["grpo"].replace(aggregation="sequence_mean_nonempty"),
    "group-token-mean": PAPERS["grpo"].replace(aggregation="group_token_mean"),
    "reinforce": PAPERS["grpo"].replace(objective="reinforce", off_policy_mask=0.1),
    "gae-of-two-lambdas": PRESETS["ppo"].replace(discount=0.9, critic_lambda=1.0, whitening_ddof=0),
    "turn-returns": PAPERS["grpo"].replace(token_credit="turn_returns", discount=0.5),
    "sequential-data": PAPERS["grpo"].replace(data_order="sequential", decayed="matrices"),
    "numbers-of-scored-rows": PAPERS["grpo"].replace(
        logged_std="group", logged_length="sampled", unscored="exclude", pass_threshold=0.5, overall_score="datasets"
    ),
    "numbers-of-all-rows": PAPERS["grpo"].replace(
        logged_std_ddof=0, length_counts_eos=False, unscored="zero", best_at_k="resampled", vote_tie="shared"
    ),
    "simpo": PAPERS["grpo"].replace(
        preference_beta=2.0, preference_reference=False, preference_length_normalised=True, preference_margin=1.0
    ),
    "averaged-ipo": PAPERS["grpo"].replace(preference_kind="ipo", preference_length_normalised=True),
    "hinge": PAPERS["grpo"].replace(preference_kind="hinge", preference_supervised_coef=1.0),
    "conservative-dpo": PAPERS["grpo"].replace(preference_label_smoothing=0.1, supervised_aggregation="token_sum"),
    "gkd": PAPERS["grpo"].replace(distillation_divergence="jsd", distillation_beta=0.1, supervised_label_smoothing=0.1),
    "hinton": PAPERS["grpo"].replace(
        distillation_divergence="forward_kl",
        distillation_temperature_squared=True,
        distillation_label_weight=0.5,
        distillation_aggregation="sequence_mean_nonempty",
        supervised_aggregation="sequence_mean",
    ),
    "newest-first": PAPERS["grpo"].replace(buffer_order="newest_first", sync_buffers=True),
    "pool-in-no-order": PAPERS["grpo"].replace(buffer_order=None, buffer_full="drop_oldest"),
}


@contextmanager
def unwatched() -> Iterator[None]:
    """Count no reads inside: to copy and to validate conventions reads all fields, whatever the check does."""
    before = set(Watched.read)
    yield
    Watched.read.intersection_update(before)


class Watched(Conventions):
    """Conventions that note which of their fields are read."""

    names: ClassVar[frozenset[str]] = frozenset(field.name for field in fields(Conventions))
    read: ClassVar[set[str]] = set()

    def __post_init__(self) -> None:
        with unwatched():
            super().__post_init__()

    def replace(self, **changes: Any) -> Self:
        with unwatched():
            return super().replace(**changes)

    def __getattribute__(self, name: str) -> Any:
        if name in Watched.names:
            Watched.read.add(name)
        return super().__getattribute__(name)


RUNS: dict[str, list[dict[str, Any]]] = defaultdict(list)
"""For each check, the fields that each of its runs read, with their values."""


def accusation(check: Check, conventions: Conventions) -> str | None:
    """What a check has against the reference under these conventions.

    None where an earlier run read the same values: what a check does follows from what it reads.
    """
    if any(all(getattr(conventions, name) == value for name, value in run.items()) for run in RUNS[check.id]):
        return None
    adapter = ReferenceAdapter(Watched(**asdict(conventions)))
    Watched.read.clear()
    result = run_check(check, adapter, "reference")
    RUNS[check.id].append({name: getattr(conventions, name) for name in frozenset(Watched.read)})
    return f"{result.id}: {result.message}" if result.status in ("fail", "error") else None


# Checks that compare code with itself: a formula is the same on both sides. These fields are more than a formula.
OF_THEMSELVES = ("building", "checkpoint", "evaluation", "layout_scale", "metrics", "rl_step", "step", "sync")
OF_THE_FORMULA = ("step.off_policy_gradient",)
MORE_THAN_A_FORMULA = (
    "data_order",
    "decayed",
    "evaluation_temperature",
    "kl_placement",
    "max_grad_norm",
    "old_logprobs",
    "temperature",
    "training_dropout",
)


@cache
def differ_in_more_than_a_formula() -> set[str]:
    """The variants with a value of those fields, or a KL term, that none before them has."""
    found, seen = set(), set()
    for name, each in VARIANTS.items():
        values = {(field, getattr(each, field)) for field in MORE_THAN_A_FORMULA} | {("kl_coef", bool(each.kl_coef))}
        if not values <= seen:
            found.add(name)
        seen |= values
    return found


def concerned(name: str) -> Iterator[Check]:
    """The checks that a variant can differ in from those before it: all for the first, then those of the formula."""
    for check in all_checks():
        if check.area not in OF_THEMSELVES or name == next(iter(VARIANTS)):
            yield check
        elif check.id in OF_THE_FORMULA:
            yield replace(check, worlds=())


@pytest.mark.parametrize("name", VARIANTS)
def test_correct_implementation_is_never_accused(name: str) -> None:
    assert Conventions() == GRPO
    assert [told for check in concerned(name) if (told := accusation(check, VARIANTS[name]))] == []


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(differ_in_more_than_a_formula()))
def test_correct_trainer_is_never_accused(name: str) -> None:
    checks = [replace(check, worlds=()) for check in all_checks() if check.area in OF_THEMSELVES]
    assert [told for check in checks if (told := accusation(check, VARIANTS[name]))] == []


def test_correct_implementation_is_never_accused_under_another_seed() -> None:
    drawing = [check for check in all_checks() if "rng" in inspect.signature(check.cases).parameters]
    results = [run_check(check, ReferenceAdapter(), "reference", seed=1) for check in drawing]
    assert [(result.id, result.message) for result in results if result.status in ("fail", "error")] == []
