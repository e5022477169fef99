from collections.abc import Callable

import numpy as np
import pytest

from rlcanary.bisect.search.bayesian import Bayesian
from rlcanary.bisect.search.metric_noise import Levels
from rlcanary.bisect.search.pass_fail_noise import History, PassFail
from rlcanary.bisect.search.verdict import Refusal
from rlcanary.jobs.outcomes import Outcome

GOOD, BAD = Outcome.GOOD, Outcome.BAD


def commits(n: int) -> list[str]:
    return [str(index) for index in range(n)]


def flaky(random: np.random.Generator, culprit: int, false_fail: float, false_pass: float) -> Callable[[int], Outcome]:
    return lambda index: BAD if random.random() < (1 - false_pass if index >= culprit else false_fail) else GOOD


def play(search: Bayesian, answer: Callable[[int], Outcome], ready: tuple[str, ...] = ()) -> list[str]:
    """The commits that were run, in their order; "-1" is GOOD."""
    ran: list[str] = []
    while chosen := search.next_commits(1, ready=ready):
        search.record(chosen[0], answer(int(chosen[0])))
        ran += chosen
        assert len(ran) < 1000
    return ran


@pytest.mark.parametrize("culprit", [0, 1, 37, 62, 99])
def test_command_that_never_flakes_is_searched_by_halving_and_confirmed_in_a_few_runs(culprit: int) -> None:
    search = Bayesian("-1", commits(100), PassFail())
    ran = play(search, lambda index: BAD if index >= culprit else GOOD)
    assert search.result().culprit == str(culprit)
    assert search.result().probability >= 0.95
    assert ran[:2] == ["-1", "99"]
    good, bad = -1, 99
    for commit in ran[2:]:
        if bad - good <= 1:
            break
        assert int(commit) == (good + bad) // 2
        good, bad = (good, int(commit)) if int(commit) >= culprit else (int(commit), bad)
    assert len(ran) <= 2 + 7 + 8


def test_stated_confidence_is_kept_where_runs_lie_both_ways() -> None:
    random = np.random.default_rng(0)
    stated, right = [], []
    for _ in range(60):
        culprit = int(random.integers(64))
        rates = random.uniform(0, 0.25, 2)
        search = Bayesian("-1", commits(64), PassFail())
        play(search, flaky(random, culprit, *rates))
        if search.refusal is None:  # Four false passes of BAD in a row look like a BAD that is not bad.
            verdict = search.result()
            stated.append(verdict.probability)
            right.append(str(culprit) in verdict.suspects)
    assert len(right) >= 58
    assert min(stated) >= 0.95
    assert np.mean(right) >= 0.9


def test_higher_confidence_takes_more_runs() -> None:
    runs = [
        len(play(Bayesian("-1", commits(256), PassFail(), confidence=confidence), lambda i: BAD if i >= 99 else GOOD))
        for confidence in (0.8, 0.95, 0.999)
    ]
    assert runs == sorted(set(runs))


def test_rates_are_learned() -> None:
    random = np.random.default_rng(1)
    search = Bayesian("-1", commits(64), PassFail(), confidence=0.9999)
    play(search, flaky(random, 40, 0.3, 0.0))
    estimates = search.result().estimates
    assert 0.15 < estimates["false_fail"] < 0.45
    assert estimates["false_pass"] < 0.1


def test_history_of_runs_that_never_failed_by_chance_saves_confirmations() -> None:
    def runs(history: History | None) -> int:
        return len(play(Bayesian("-1", commits(256), PassFail(history)), lambda index: BAD if index >= 99 else GOOD))

    assert runs(History(good_passed=40, bad_failed=10)) < runs(None)


def test_one_flake_costs_runs_but_not_the_answer() -> None:
    flaked = set()

    def once_bad(index: int) -> Outcome:
        if index == 31 and index not in flaked:
            flaked.add(index)
            return BAD
        return BAD if index >= 50 else GOOD

    search = Bayesian("-1", commits(64), PassFail())
    play(search, once_bad)
    assert flaked
    assert search.result().culprit == "50"


def test_order_of_the_records_does_not_matter() -> None:
    runs = [("-1", GOOD), ("63", BAD), ("31", BAD), ("15", GOOD), ("31", GOOD), ("40", BAD), ("20", Outcome.UNTESTABLE)]
    forward, backward = (Bayesian("-1", commits(64), PassFail()) for _ in range(2))
    for run in runs:
        forward.record(*run)
    for run in reversed(runs):
        backward.record(*run)
    assert forward.result().posterior == pytest.approx(backward.result().posterior)
    assert forward.next_commits(3) == backward.next_commits(3)


def test_good_that_failed_once_is_run_again_and_believed_when_it_passes() -> None:
    search = Bayesian("-1", commits(64), PassFail())
    search.record("-1", BAD)
    assert search.next_commits(1) == ["-1"]
    play(search, lambda index: BAD if index >= 20 else GOOD)
    assert search.refusal is None
    assert search.result().culprit == "20"


def test_good_that_always_fails_is_refused_within_four_runs() -> None:
    search = Bayesian("-1", commits(64), PassFail())
    assert play(search, lambda index: BAD) == ["-1"] * 4
    assert search.refusal is Refusal.GOOD_FAILS


def test_bad_that_failed_by_chance_once_is_not_blamed_but_run_again() -> None:
    search = Bayesian("-1", commits(64), PassFail())
    search.record("63", BAD)
    play(search, lambda index: GOOD)
    assert search.refusal is Refusal.BAD_PASSES


@pytest.mark.parametrize("rate", [0.3, 0.5, 0.7])
def test_command_that_fails_whatever_the_commit_is_refused(rate: float) -> None:
    random = np.random.default_rng(3)
    search = Bayesian("-1", commits(64), PassFail())
    play(search, lambda index: BAD if random.random() < rate else GOOD)
    assert search.refusal in {Refusal.ALIKE, Refusal.GOOD_FAILS, Refusal.BAD_PASSES}


def test_history_that_is_mended_and_breaks_again_is_noticed() -> None:
    search = Bayesian("-1", commits(64), PassFail())
    for index in (-1, 5, 25, 30, 63):
        for _ in range(3):
            search.record(str(index), BAD if index in (5, 63) else GOOD)
    assert search.result().relapse is None or search.result().relapse[0] == "5"
    for index in (7, 9, 20, 35, 40):
        for _ in range(3):
            search.record(str(index), BAD if index in (7, 9) else GOOD)
    relapse = search.result().relapse
    assert relapse is not None
    assert int(relapse[0]) <= 9
    assert 20 <= int(relapse[1]) <= 40


def test_flaky_history_that_breaks_once_is_not_called_mended() -> None:
    random = np.random.default_rng(4)
    for _ in range(10):
        culprit = int(random.integers(64))
        search = Bayesian("-1", commits(64), PassFail())
        play(search, flaky(random, culprit, 0.2, 0.2))
        assert search.result().relapse is None


@pytest.mark.parametrize("seed", range(4))
def test_two_commits_that_each_break_half_of_the_runs_are_both_named(seed: int) -> None:
    random = np.random.default_rng(seed)
    search = Bayesian("-1", commits(128), PassFail())
    rate = [*[0.0] * 41, *[0.5] * 40, *[1.0] * 48]
    play(search, lambda index: BAD if random.random() < rate[index + 1] else GOOD)
    verdict = search.result()
    assert [step.suspects for step in verdict.steps] == [("40",), ("80",)]
    assert verdict.suspects == ("40", "80")
    assert verdict.culprit is None
    assert all(step.probability >= 0.95 for step in verdict.steps)
    assert [step.failure_rate for step in verdict.steps] == pytest.approx([0.5, 1.0], abs=0.15)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("false_fail", "false_pass"), [(0.1, 0.1), (0.3, 0.0), (0.0, 0.3)])
def test_flaky_command_that_one_commit_breaks_has_no_second_step(
    false_fail: float, false_pass: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    search = Bayesian("-1", commits(128), PassFail())
    play(search, lambda index: BAD if random.random() < (1 - false_pass if index >= 80 else false_fail) else GOOD)
    assert search.result().steps == ()


def test_stretch_of_untestable_commits_is_stepped_around_and_named_as_a_range() -> None:
    search = Bayesian("-1", commits(100), PassFail())
    ran = play(search, lambda i: Outcome.UNTESTABLE if 53 <= i <= 68 else BAD if i >= 61 else GOOD)
    assert search.result().suspects == tuple(str(index) for index in range(53, 70))
    assert search.result().probability >= 0.95
    assert sum(53 <= int(commit) <= 68 for commit in ran) <= 8


def test_runs_at_once_are_of_different_commits_while_nothing_is_known() -> None:
    search = Bayesian("-1", commits(1024), PassFail(), trusted=["-1", "1023"])
    chosen = [int(commit) for commit in search.next_commits(7)]
    assert len(set(chosen)) == 7
    parts = np.diff([-1, *sorted(chosen), 1023])
    assert parts.max() <= 4 * parts.min()


def test_runs_added_to_those_under_way_fill_the_gaps() -> None:
    search = Bayesian("-1", commits(1024), PassFail(), trusted=["-1", "1023"])
    running = search.next_commits(3)
    assert not set(search.next_commits(2, running=running)) & set(running)


def test_runs_at_once_find_the_culprit_in_fewer_rounds() -> None:
    random = np.random.default_rng(5)
    rounds, right, culprits = {}, 0, (30, 60, 90, 120, 150, 200)
    for jobs in (1, 4):
        rounds[jobs] = 0
        for culprit in culprits:
            search = Bayesian("-1", commits(256), PassFail())
            answer = flaky(random, culprit, 0.05, 0.05)
            while chosen := search.next_commits(jobs):
                rounds[jobs] += 1
                for commit in chosen:
                    search.record(commit, answer(int(commit)))
            right += str(culprit) in search.result().suspects
    assert right >= 2 * len(culprits) - 2  # a search at 0.95 may be wrong; three of twelve would be in one case of 50
    assert rounds[4] <= rounds[1] / 1.8


def test_everything_under_way_is_worthless_once_the_culprit_is_known() -> None:
    search = Bayesian("-1", commits(64), PassFail())
    play(search, lambda index: BAD if index >= 20 else GOOD)
    assert search.worthless(["3", "40"]) == ["3", "40"]


def test_commit_with_a_built_environment_is_preferred_where_it_tells_nearly_as_much() -> None:
    search = Bayesian("-1", commits(64), PassFail(), trusted=["-1", "63"])
    assert search.next_commits(1) == ["31"]
    assert search.next_commits(1, ready=["36", "60"]) == ["36"]
    assert search.next_commits(1, ready=["60"]) == ["31"]


@pytest.mark.parametrize(("worse", "noises", "trials"), [(-1, 2.0, 24), (1, 2.0, 24), (-1, 1.0, 8)])
def test_metric_that_steps_by_one_or_two_noises_is_found_by_its_value(worse: int, noises: float, trials: int) -> None:
    random = np.random.default_rng(6)
    right = []
    for _ in range(trials):
        culprit = int(random.integers(64))
        search = Bayesian("-1", commits(64), Levels(worse))
        while chosen := search.next_commits(1):
            level = 500.0 + (worse * 10.0 * noises if int(chosen[0]) >= culprit else 0.0)
            search.record(chosen[0], Outcome.GOOD, level + 10.0 * random.normal())
        right.append(search.result().culprit == str(culprit))
    assert np.mean(right) >= 0.85


def test_levels_and_noise_of_a_metric_are_estimated() -> None:
    random = np.random.default_rng(7)
    search = Bayesian("-1", commits(64), Levels(-1), confidence=0.999)
    while chosen := search.next_commits(1):
        search.record(chosen[0], Outcome.GOOD, (90.0 if int(chosen[0]) >= 20 else 100.0) + 2.0 * random.normal())
    verdict = search.result()
    assert verdict.culprit == "20"
    assert verdict.estimates["before"] == pytest.approx(100, abs=3)
    assert verdict.estimates["after"] == pytest.approx(90, abs=3)
    assert 0.5 < verdict.estimates["noise"] < 4


def test_metric_that_moves_in_the_better_direction_is_no_culprit() -> None:
    random = np.random.default_rng(8)
    search = Bayesian("-1", commits(64), Levels(-1))
    runs = 0
    while (chosen := search.next_commits(1)) and runs < 300:
        runs += 1
        search.record(chosen[0], Outcome.GOOD, (110.0 if int(chosen[0]) >= 20 else 100.0) + 2.0 * random.normal())
    assert search.refusal is Refusal.ALIKE


def test_metric_that_recovers_and_drops_again_is_noticed() -> None:
    random = np.random.default_rng(10)
    search = Bayesian("-1", commits(64), Levels(-1))
    for index in (-1, 4, 10, 14, 18, 30, 35, 40, 55, 63):
        is_low = 10 <= index < 20 or index >= 50
        for _ in range(2):
            search.record(str(index), Outcome.GOOD, (90.0 if is_low else 100.0) + 2.0 * random.normal())
    relapse = search.result().relapse
    assert relapse is not None
    assert 10 <= int(relapse[0]) < 20 <= int(relapse[1]) < 50


def test_metric_without_any_noise_is_searched_by_halving() -> None:
    search = Bayesian("-1", commits(256), Levels(-1))
    runs = 0
    while chosen := search.next_commits(1):
        runs += 1
        search.record(chosen[0], Outcome.GOOD, 90.0 if int(chosen[0]) >= 77 else 100.0)
    assert search.result().culprit == "77"
    assert runs <= 6 + 12


def test_one_wild_value_does_not_drown_the_step() -> None:
    random = np.random.default_rng(9)
    search = Bayesian("-1", commits(64), Levels(-1))
    runs = 0
    while chosen := search.next_commits(1):
        runs += 1
        value = (90.0 if int(chosen[0]) >= 40 else 100.0) + 2.0 * random.normal()
        search.record(chosen[0], Outcome.GOOD, 0.0 if runs == 8 else value)
    assert search.result().culprit == "40"
    assert runs <= 40


def test_value_that_is_no_number_is_no_evidence() -> None:
    with pytest.raises(ValueError, match="no evidence"):
        Bayesian("-1", commits(4), Levels(-1)).record("1", Outcome.GOOD, float("nan"))


def test_commits_that_always_lie_end_in_the_culprit_or_in_suspects_that_hold_it() -> None:
    random = np.random.default_rng(12)
    named, right = 0, 0
    for _ in range(60):
        culprit = int(random.integers(128))
        lies = random.random(127) < 0.1  # BAD itself does not.
        search = Bayesian("-1", commits(128), PassFail())
        play(search, lambda i, lies=lies, culprit=culprit: BAD if (i >= culprit) ^ (0 <= i < 127 and lies[i]) else GOOD)
        suspects = search.result().suspects
        assert len(suspects) <= 40
        named += len(suspects) == 1
        right += str(culprit) in suspects
    assert named <= 40
    assert right >= 50


def test_neighbour_of_a_commit_that_only_repeats_itself_runs_next() -> None:
    search = Bayesian("-1", commits(64), PassFail())
    for index, outcome in ((-1, GOOD), (63, BAD), (31, BAD), (30, GOOD), (32, GOOD)):
        for _ in range(4):
            search.record(str(index), outcome)
    assert search.next_commits(1)[0] not in {"-1", "30", "31", "32", "63"}
