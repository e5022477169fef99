"""A mutant is in place while a capability runs, and the checks that run its line kill it."""

from collections import Counter

import mutable
import pytest
import torch
from mutable import MutableAdapter, Owner, centred

from rlcanary.checks import all_checks
from rlcanary.contract.conventions import Conventions
from rlcanary.mutants.functions import FunctionMutant, functions_of, functions_reached, mutants_of
from rlcanary.mutants.gather import drawn, function_mutants, trials
from rlcanary.mutants.installed import InstalledMutant
from rlcanary.mutants.killing import Fate, Trial, kill
from rlcanary.mutants.mutant import Run
from rlcanary.mutants.reach import runs_on_original
from rlcanary.mutants.score import score, scores

REWARDS, GROUPS = torch.tensor([1.0, 0.0]), torch.tensor([0, 0])


class UnscaledAdapter(MutableAdapter):
    conventions = Conventions(advantage_scale="none")


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    checks = [check for check in all_checks() if check.area == "advantage"]
    return list(runs_on_original(UnscaledAdapter(), "mutable:MutableAdapter", checks, ("mutable",)))


def mutant(mistake: str) -> FunctionMutant:
    return next(each for each in mutants_of(centred) if each.diff.endswith(f"+ {mistake}"))


def fates(mistakes: list[str], runs: list[Run]) -> dict[str, Fate]:
    found = trials("mutable", UnscaledAdapter(), [mutant(mistake) for mistake in mistakes], runs)
    return {trial.mutant.diff.partition("+ ")[2]: fate for trial, fate in kill(found, workers=2)}


def test_mutant_is_in_place_only_while_a_capability_runs() -> None:
    adapter = mutant("result_B[inside_B] = rewards_B[inside_B] + rewards_B[inside_B].mean()").planted_in(
        MutableAdapter()
    )
    assert adapter.advantages(REWARDS, GROUPS).tolist() == [1.5, 0.5]
    assert centred(REWARDS, GROUPS).tolist() == [0.5, -0.5]
    assert MutableAdapter().advantages(REWARDS, GROUPS).tolist() == [0.5, -0.5]


def test_mutant_of_installed_code_stays_and_the_adapter_is_loaded_again() -> None:
    found = mutant("result_B[inside_B] = rewards_B[inside_B] + rewards_B[inside_B].mean()")
    adapter, before = MutableAdapter(), centred.__code__
    try:
        loaded = InstalledMutant(**vars(found), spec="mutable:MutableAdapter").planted_in(adapter)
        assert loaded is not adapter
        assert loaded.advantages(REWARDS, GROUPS).tolist() == centred(REWARDS, GROUPS).tolist() == [1.5, 0.5]
    finally:
        centred.__code__ = before


def test_mutant_is_taken_out_when_the_capability_raises() -> None:
    adapter = mutant("inside_B = group_ids_B != group").planted_in(MutableAdapter())
    with pytest.raises(AttributeError):
        adapter.advantages(REWARDS, None)
    assert centred(REWARDS, GROUPS).tolist() == [0.5, -0.5]


def test_methods_with_private_names_and_super_are_mutated() -> None:
    (quotient,) = (each for each in mutants_of(Owner.scaled) if "/" in each.diff)
    with quotient.planted():
        assert Owner(2.0).scaled(4.0) == 0.5
    assert Owner(2.0).scaled(4.0) == 8.0
    (dropped,) = mutants_of(Owner.__init__)
    with dropped.planted(), pytest.raises(AttributeError):
        Owner(2.0).scaled(4.0)


def test_decorated_functions_are_mutated_and_imported_ones_are_not() -> None:
    from rlcanary.reference import step

    names = {function.__qualname__ for function in functions_of(step)}
    assert "forward_mode" in names
    assert "policy_loss" not in names


def test_ids_are_distinct() -> None:
    ids = [each.id for function in functions_of(mutable) for each in mutants_of(function)]
    assert len(set(ids)) == len(ids) > 10


def test_functions_that_the_checks_run_are_mutated(runs: list[Run]) -> None:
    assert list(functions_reached(runs, ("mutable",))) == [centred, MutableAdapter.__dict__["advantages"]]
    assert "mutable:centred" in {each.where for each in function_mutants(runs, ("mutable",))}
    assert function_mutants(runs, ("mutable",), ["another"]) == []


def test_each_mutant_gets_its_verdict(runs: list[Run]) -> None:
    verdicts = fates(
        [
            "result_B[inside_B] = rewards_B[inside_B] + rewards_B[inside_B].mean()",
            "inside_B = group_ids_B != group",
            "result_B = result_B * 3",
        ],
        runs,
    )
    assert verdicts["result_B[inside_B] = rewards_B[inside_B] + rewards_B[inside_B].mean()"].verdict == "killed"
    assert verdicts["inside_B = group_ids_B != group"].verdict == "killed"
    assert verdicts["result_B = result_B * 3"].verdict == "unreached"


class Planted:
    """A mutant that does this when a capability is called."""

    where, diff, id = "mutable:centred", "", "planted"

    def __init__(self, effect: object) -> None:
        self.effect = effect

    def planted_in(self, adapter: MutableAdapter) -> MutableAdapter:
        changed = UnscaledAdapter()
        changed.advantages = self.effect  # type: ignore[method-assign]
        return changed

    def reached_by(self, run: Run) -> frozenset[str]:
        return frozenset({"advantages"})


def test_mutant_that_only_raises_or_ends_its_process_crashes(runs: list[Run]) -> None:
    def raise_error(*_: object) -> None:
        raise RuntimeError("mutated")

    def end_process(*_: object) -> None:
        import os

        os._exit(1)

    found = trials("mutable", UnscaledAdapter(), [Planted(raise_error), Planted(end_process), Planted(centred)], runs)
    told = {id(trial.mutant): fate.verdict for trial, fate in kill(found, workers=1)}
    assert list(told.values()) == ["crashed", "crashed", "survived"]


def test_mutant_that_never_ends_is_ended(runs: list[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: object) -> None:
        import time

        while True:
            time.sleep(0.01)

    monkeypatch.setattr("rlcanary.mutants.killing.TIME_LIMIT_SECONDS", 0.0)
    monkeypatch.setattr("rlcanary.mutants.killing.TIME_LIMIT_FACTOR", 0.0)
    ((_, fate),) = kill(trials("mutable", UnscaledAdapter(), [Planted(hang)], runs), workers=1)
    assert fate.verdict == "hung"


def test_finding_of_the_original_kills_no_mutant() -> None:
    checks = [check for check in all_checks() if check.area == "advantage"]
    # It declares a scale and has none.
    runs = list(runs_on_original(MutableAdapter(), "mutable:MutableAdapter", checks, ("mutable",)))
    assert any(run.known for run in runs)
    ((_, fate),) = kill(trials("mutable", MutableAdapter(), [Planted(centred)], runs), workers=1)
    assert fate.verdict == "survived"


def test_sample_depends_on_the_seed_alone(runs: list[Run]) -> None:
    found = trials("mutable", UnscaledAdapter(), list(mutants_of(centred)), runs)
    assert drawn(found, 5, seed=1) == drawn(found, 5, seed=1) != drawn(found, 5, seed=2)
    assert drawn(found, None, seed=1) == drawn(found, 10**6, seed=1) == found


def test_score_counts_mutants_that_run_without_an_error() -> None:
    trial = Trial("mutable", UnscaledAdapter(), mutant("inside_B = group_ids_B != group"), [])
    verdicts = ["killed", "killed", "killed", "survived", "unreached", "crashed", "hung"]
    found = [(trial, Fate(verdict)) for verdict in verdicts]  # type: ignore[arg-type]
    assert score(found).share == 0.6
    assert scores(found)["module"]["mutable"].counts == Counter(verdicts)
    assert score([]).share is None
