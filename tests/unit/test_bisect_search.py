import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcanary.bisect.outcomes import Outcome
from rlcanary.bisect.search import Contradiction, Halving


def commits(n: int) -> list[str]:
    return [f"c{index}" for index in range(n)]


def play(search: Halving, answer: Callable[[int], Outcome]) -> int:
    tests = 0
    while (commit := search.next_commit()) is not None:
        search.record(commit, answer(int(commit[1:])))
        tests += 1
    return tests


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 99, 100, 257])
def test_every_culprit_is_found_within_the_runs_of_halving(n: int) -> None:
    for culprit in range(n):
        search = Halving(commits(n))
        tests = play(search, lambda i, culprit=culprit: Outcome.BAD if i >= culprit else Outcome.GOOD)
        assert search.result().culprit == f"c{culprit}"
        assert tests <= math.ceil(math.log2(n))


@given(st.data())
def test_culprit_is_never_outside_the_suspects_and_a_single_one_is_never_wrong(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 60))
    culprit = data.draw(st.integers(0, n - 1))
    untestable = data.draw(st.sets(st.integers(0, n - 2), max_size=n)) if n > 1 else set()
    search = Halving(commits(n))
    tests = play(
        search, lambda i: Outcome.UNTESTABLE if i in untestable else Outcome.BAD if i >= culprit else Outcome.GOOD
    )
    assert tests < n
    assert f"c{culprit}" in search.result().suspects
    if search.result().culprit is None:
        assert untestable & {int(commit[1:]) for commit in search.result().suspects}


def test_stretch_of_untestable_commits_costs_its_two_edges_and_a_confirmation() -> None:
    search = Halving(commits(99))
    tests = play(search, lambda i: Outcome.UNTESTABLE if 53 <= i <= 68 else Outcome.BAD if i >= 61 else Outcome.GOOD)
    assert search.result().suspects == tuple(f"c{index}" for index in range(53, 70))
    assert tests <= 14


def test_single_untestable_commit_elsewhere_does_not_widen_the_result() -> None:
    search = Halving(commits(99))
    play(search, lambda i: Outcome.UNTESTABLE if i == 49 else Outcome.BAD if i >= 61 else Outcome.GOOD)
    assert search.result().culprit == "c61"


def test_testable_commit_between_two_untestable_ones_is_tried() -> None:
    search = Halving(commits(11))
    for index in (4, 6):
        search.record(f"c{index}", Outcome.UNTESTABLE)
    play(search, lambda i: Outcome.UNTESTABLE if i in (4, 6) else Outcome.BAD if i >= 5 else Outcome.GOOD)
    assert search.result().suspects == ("c4", "c5")


def test_good_after_bad_is_a_contradiction() -> None:
    search = Halving(commits(10))
    search.record("c3", Outcome.BAD)
    with pytest.raises(Contradiction, match="c5 is good, but c3"):
        search.record("c5", Outcome.GOOD)


def test_an_infrastructure_failure_is_no_evidence() -> None:
    with pytest.raises(ValueError, match="no evidence"):
        Halving(commits(3)).record("c0", Outcome.INFRA)
