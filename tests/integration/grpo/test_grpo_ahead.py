"""Sampling ahead of the trainer: it goes on meanwhile, nothing stale is trained on, every group has one fate."""

import json
import threading
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from test_grpo_train import a_plan, log_of, stop_at
from waiting import HANG_S

from rlcanary.grpo.plan.plan import Plan
from rlcanary.grpo.plan.reading import read_plan
from rlcanary.grpo.rewards import by_name
from rlcanary.grpo.rewards.exact import ExactVerifier
from rlcanary.grpo.rewards.verifier import Score
from rlcanary.grpo.train import Outcome, train
from rlcanary.grpo.training.rollout import NothingSampled

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

LEARNS = Path(__file__).parents[2] / "functional/grpo.yaml"
# Four groups of four per step, twelve items per epoch.
STEP, EPOCH = 4, 12


def ahead(folder: Path, steps: int = 6, **changes: Any) -> Plan:
    return a_plan(folder, steps, **{"schedule__max_staleness": 1} | changes)


def groups_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "groups.ndjson").read_text().splitlines()]


def require_balance(folder: Path, outcome: Outcome) -> Counter[str]:
    """The log has each group of the account once -> how many came to each end."""
    groups, account = groups_of(folder), outcome.account
    fates = Counter(group["fate"] for group in groups)
    assert account.waiting == 0
    assert sorted(group["number"] for group in groups) == list(range(account.entered))
    assert fates == {fate: count for fate, count in account.fates.items() if count}
    return fates


def used(folder: Path) -> list[str]:
    return [group["item_id"] for group in groups_of(folder) if group["fate"] == "used"]


def test_sampling_goes_on_while_the_trainer_trains(tmp_path: Path) -> None:
    outcome = train(ahead(tmp_path))
    first, *later = [line["staleness"] for line in log_of(tmp_path)]
    assert first == 0
    assert max(later) == 1
    assert fmean(later) > 0.5
    assert require_balance(tmp_path, outcome)["used"] == 6 * STEP
    assert set(Counter(used(tmp_path)).values()) == {2}


def test_without_staleness_sampling_and_training_take_turns(tmp_path: Path) -> None:
    outcome = train(a_plan(tmp_path))
    assert [line["staleness"] for line in log_of(tmp_path)] == [0, 0, 0, 0]
    assert require_balance(tmp_path, outcome) == {"used": 4 * STEP}


def test_the_ratio_is_taken_against_the_policy_that_sampled(tmp_path: Path) -> None:
    """At this learning rate one update moves the policy far: with the trainer's own logprobs the ratio would be 1."""
    train(ahead(tmp_path, 3, optimizer__learning_rate=1e-2))
    first, *later = log_of(tmp_path)
    assert abs(first["ratio_max"] - 1) < 1e-4
    assert max(line["ratio_max"] for line in later) > 1.1


def test_a_run_that_is_resumed_trains_on_each_item_once_per_epoch_and_its_books_balance(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(ahead(tmp_path, run__checkpoint_every=2), on_step=stop_at(4))
    stopped = groups_of(tmp_path)
    assert sorted(group["number"] for group in stopped) == list(range(len(stopped)))
    outcome = train(ahead(tmp_path, run__checkpoint_every=2), resume=True)
    assert [line["step"] for line in log_of(tmp_path)] == list(range(6))
    require_balance(tmp_path, outcome)
    assert len(used(tmp_path)) == 2 * EPOCH
    assert len(set(used(tmp_path)[:EPOCH])) == len(set(used(tmp_path)[EPOCH:])) == EPOCH


class Held(ExactVerifier):
    """Takes its time over the first completion of all."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go_on = threading.Event()
        self.is_first = iter([True])

    def verify(self, completion: str, target: Any) -> Score:
        if next(self.is_first, False):
            assert self.may_go_on.wait(HANG_S)
        return super().verify(completion, target)


def test_a_group_that_grew_stale_is_evicted_and_its_item_sampled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was drawn before the first sync, and is scored behind the second."""
    verifier = Held()
    monkeypatch.setitem(by_name.VERIFIERS, "exact", lambda: verifier)

    def go_on(step: int, metrics: Any) -> None:
        if step == 1:
            verifier.may_go_on.set()

    outcome = train(ahead(tmp_path, 3), on_step=go_on)
    assert require_balance(tmp_path, outcome)["stale"] == 1
    (stale,) = [group for group in groups_of(tmp_path) if group["fate"] == "stale"]
    assert (stale["version"], stale["step"]) == (0, 2)
    assert len(used(tmp_path)) == len(set(used(tmp_path))) == EPOCH
    assert stale["item_id"] in used(tmp_path)
    assert max(line["staleness"] for line in log_of(tmp_path)) <= 1


class Fickle(ExactVerifier):
    """Raises for some targets."""

    def verify(self, completion: str, target: Any) -> Score:
        if int(target) < 2:
            raise LookupError(target)
        return super().verify(completion, target)


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_groups_that_cannot_be_scored_are_on_the_books(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_staleness: int
) -> None:
    monkeypatch.setitem(by_name.VERIFIERS, "exact", Fickle)
    outcome = train(ahead(tmp_path, schedule__max_staleness=max_staleness))
    fates = require_balance(tmp_path, outcome)
    assert fates["used"] == 6 * STEP
    unscored = Counter(group["item_id"] for group in groups_of(tmp_path) if group["fate"] == "unscored")
    assert unscored
    assert not set(unscored) & set(used(tmp_path))
    assert sum(line["groups/unscored"] for line in log_of(tmp_path)) <= fates["unscored"]


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_dynamic_sampling_trains_on_groups_whose_rewards_differ(tmp_path: Path, max_staleness: int) -> None:
    """One in 14 first characters is right, so that about six in ten groups of twelve differ: neither do all in the 24 that
    are trained on, nor none in an epoch, more often than once in 10^4 times."""
    options = {"roles__verifier": {"options": {"exact": {"partial": True}}}}
    schedule = {"prompts_per_step": 4, "group_size": 12, "dynamic_sampling": True, "max_staleness": max_staleness}
    outcome = train(a_plan(tmp_path, 6, schedule=schedule, **options))
    assert require_balance(tmp_path, outcome)["filtered"] > 0
    assert all(line["groups_all_wrong"] == 0 for line in log_of(tmp_path))


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_an_epoch_that_gives_nothing_to_train_on_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_staleness: int
) -> None:
    monkeypatch.setattr(Fickle, "verify", lambda self, completion, target: 1 / 0)
    monkeypatch.setitem(by_name.VERIFIERS, "exact", Fickle)
    with pytest.raises(NothingSampled, match="none of the 12 items"):
        train(ahead(tmp_path, schedule__max_staleness=max_staleness))
    assert {group["fate"] for group in groups_of(tmp_path)} == {"unscored"}


def test_it_learns_from_groups_that_are_a_version_old(tmp_path: Path) -> None:
    """A reward is 0 or 1, so that the mean of the 1,280 rewards of ten steps has a standard deviation of at most 0.014. The
    mean of the first ten is near 0.01; where nothing is learned, that of the last ten exceeds 0.2 less than once in 10^9
    times."""
    overrides = [f"run.folder={tmp_path / 'run'}", "schedule.max_staleness=1", "conventions.old_logprobs=sampler"]
    outcome = train(read_plan(LEARNS, overrides))
    log = log_of(tmp_path / "run")
    require_balance(tmp_path / "run", outcome)
    assert fmean(line["staleness"] for line in log) > 0.5
    assert fmean(line["reward"] for line in log[-10:]) > 0.2
