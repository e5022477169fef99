import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcanary.bisect.search.bayesian import Bayesian
from rlcanary.bisect.search.pass_fail_noise import Believed
from rlcanary.bisect.search.verdict import Contradiction, Refusal
from rlcanary.jobs.outcomes import Outcome


def commits(n: int) -> list[str]:
    return [f"c{index}" for index in range(n)]


def halving(n: int) -> Bayesian:
    """A search that believes every run, and its ends without one."""
    return Bayesian("good", commits(n), Believed(), trusted=["good", f"c{n - 1}"])


def play(search: Bayesian, answer: Callable[[int], Outcome]) -> int:
    tests = 0
    while chosen := search.next_commits(1):
        search.record(chosen[0], answer(int(chosen[0][1:])))
        tests += 1
    return tests


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 99, 100, 257])
def test_every_culprit_is_found_within_the_runs_of_halving(n: int) -> None:
    for culprit in range(n):
        search = halving(n)
        tests = play(search, lambda i, culprit=culprit: Outcome.BAD if i >= culprit else Outcome.GOOD)
        assert search.result().culprit == f"c{culprit}"
        assert tests <= math.ceil(math.log2(n))


@settings(deadline=None)
@given(st.data())
def test_culprit_is_never_outside_the_suspects_and_a_single_one_is_never_wrong(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 60))
    culprit = data.draw(st.integers(0, n - 1))
    untestable = data.draw(st.sets(st.integers(0, n - 2), max_size=n)) if n > 1 else set()
    search = halving(n)
    tests = play(
        search, lambda i: Outcome.UNTESTABLE if i in untestable else Outcome.BAD if i >= culprit else Outcome.GOOD
    )
    assert tests < n
    assert f"c{culprit}" in search.result().suspects
    if search.result().culprit is None:
        assert untestable & {int(commit[1:]) for commit in search.result().suspects}


def test_stretch_of_untestable_commits_costs_its_two_edges_and_a_confirmation() -> None:
    search = halving(99)
    tests = play(search, lambda i: Outcome.UNTESTABLE if 53 <= i <= 68 else Outcome.BAD if i >= 61 else Outcome.GOOD)
    assert search.result().suspects == tuple(f"c{index}" for index in range(53, 70))
    assert tests <= 14


def test_several_runs_at_once_shorten_halving_to_a_logarithm_of_a_larger_base() -> None:
    for culprit in range(0, 1024, 11):
        search = halving(1024)
        rounds = 0
        while chosen := search.next_commits(3):
            assert len(set(chosen)) == len(chosen)
            rounds += 1
            for commit in chosen:
                search.record(commit, Outcome.BAD if int(commit[1:]) >= culprit else Outcome.GOOD)
        assert search.result().culprit == f"c{culprit}"
        assert rounds <= 6  # 4 parts each time: the logarithm of 1024 to the base 4 is 5


def test_end_that_is_not_what_it_is_called_is_refused_after_one_run() -> None:
    search = Bayesian("good", commits(9), Believed())
    assert search.next_commits(1) == ["good"]
    search.record("good", Outcome.BAD)
    assert search.refusal is Refusal.GOOD_FAILS
    assert search.next_commits(4) == []
    search = Bayesian("good", commits(9), Believed())
    assert search.next_commits(2) == ["good", "c8"]
    search.record("good", Outcome.GOOD)
    search.record("c8", Outcome.GOOD)
    assert search.refusal is Refusal.BAD_PASSES


def test_untestable_end_is_refused() -> None:
    search = Bayesian("good", commits(9), Believed())
    search.record("c8", Outcome.UNTESTABLE)
    assert search.refusal is Refusal.BAD_UNTESTABLE


def test_runs_whose_outcome_is_known_by_now_are_worthless() -> None:
    search = halving(1024)
    first, middle, last = sorted(search.next_commits(3), key=lambda commit: int(commit[1:]))
    search.record(middle, Outcome.GOOD)
    assert search.worthless([first, last]) == [first]


def test_single_untestable_commit_elsewhere_does_not_widen_the_result() -> None:
    search = halving(99)
    play(search, lambda i: Outcome.UNTESTABLE if i == 49 else Outcome.BAD if i >= 61 else Outcome.GOOD)
    assert search.result().culprit == "c61"


def test_testable_commit_between_two_untestable_ones_is_tried() -> None:
    search = halving(11)
    for index in (4, 6):
        search.record(f"c{index}", Outcome.UNTESTABLE)
    play(search, lambda i: Outcome.UNTESTABLE if i in (4, 6) else Outcome.BAD if i >= 5 else Outcome.GOOD)
    assert search.result().suspects == ("c4", "c5")


def test_good_after_bad_is_a_contradiction() -> None:
    search = halving(10)
    search.record("c3", Outcome.BAD)
    with pytest.raises(Contradiction, match="c5 is good, but c3"):
        search.record("c5", Outcome.GOOD)


def test_an_infrastructure_failure_is_no_evidence() -> None:
    with pytest.raises(ValueError, match="no evidence"):
        halving(3).record("c0", Outcome.INFRA)
