"""The oracle of logged numbers, derived a second time by enumeration or by hand."""

import math
from itertools import combinations, product
from statistics import fmean, pstdev, stdev

import pytest

from rlcanary.contract.batch import Completion, Group
from rlcanary.contract.presets import GRPO
from rlcanary.contract.records.reporting import EvaluatedItem, Metric, RolloutBatch
from rlcanary.reference import reporting

GRADED = [0.25, -1.0, 0.75, 0.75, 2.0]


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_best_of_k_is_the_mean_of_the_best_over_all_subsets_or_draws(k: int) -> None:
    subsets = fmean(max(each) for each in combinations(GRADED, k))
    draws = fmean(max(each) for each in product(GRADED, repeat=k))
    assert reporting.best_at_k(GRADED, k, with_replacement=False) == pytest.approx(subsets)
    assert reporting.best_at_k(GRADED, k, with_replacement=True) == pytest.approx(draws)


@pytest.mark.parametrize(
    ("n", "right", "k"), [(1, 0, 1), (1, 1, 1), (5, 2, 1), (5, 2, 3), (5, 1, 5), (6, 3, 4), (6, 0, 6)]
)
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n: int, right: int, k: int) -> None:
    samples = [place < right for place in range(n)]
    assert reporting.pass_at_k(n, right, k) == pytest.approx(fmean(any(each) for each in combinations(samples, k)))


def test_pass_at_k_is_unbiased() -> None:
    chance, n, k = 0.3, 4, 2
    expected = sum(
        math.comb(n, right) * chance**right * (1 - chance) ** (n - right) * reporting.pass_at_k(n, right, k)
        for right in range(n + 1)
    )
    assert expected == pytest.approx(1 - (1 - chance) ** k)


def test_majority_wins_and_ties_go_to_the_first_or_are_shared() -> None:
    assert reporting.vote(["a", "b", "b"], [0.0, 1.0, 1.0], shared=False) == 1.0
    assert reporting.vote(["a", "b", "b", "a"], [0.0, 1.0, 1.0, 0.0], shared=False) == 0.0
    assert reporting.vote(["a", "b", "b", "a", "c"], [0.0, 1.0, 1.0, 0.0, 1.0], shared=True) == 0.5


def item(scores: list[float], dataset: str, answers: list[str] | None = None) -> EvaluatedItem:
    return EvaluatedItem(0, scores, dataset, answers)


def test_numbers_over_all_weigh_items_or_datasets() -> None:
    items = [item([1.0, 0.0], "math"), item([0.0, 0.0], "math"), item([1.0, 1.0], "code")]
    metrics = reporting.evaluation_metrics(items, 1, GRPO)
    assert (metrics["math/mean@n"], metrics["code/mean@n"], metrics["mean@n"]) == (0.25, 1.0, 0.5)
    assert reporting.evaluation_metrics(items, 1, GRPO.replace(overall_score="datasets"))["mean@n"] == 0.625


def test_metric_that_an_item_has_no_value_of_is_left_out() -> None:
    metrics = reporting.evaluation_metrics([item([1.0], "math"), item([1.0, 0.0], "math", ["a", "b"])], 2, GRPO)
    assert metrics == {"mean@n": 0.75, "math/mean@n": 0.75}


def test_missing_scores_are_an_error_or_left_out_or_zero() -> None:
    items = [item([1.0, math.nan], "math", ["a", "b"]), item([math.nan, math.nan], "math", ["a", "b"])]
    with pytest.raises(ValueError, match="no reward"):
        reporting.evaluation_metrics(items, 1, GRPO)
    left_out = reporting.evaluation_metrics(items, 1, GRPO.replace(unscored="exclude"))
    assert (left_out["mean@n"], left_out["pass@k"], left_out["maj@n"]) == (1.0, 1.0, 1.0)
    as_zero = reporting.evaluation_metrics(items, 1, GRPO.replace(unscored="zero"))
    assert (as_zero["mean@n"], as_zero["pass@k"], as_zero["maj@n"]) == (0.25, 0.25, 0.5)


EOS = 2
TOOL = Completion([5, 6, 7, EOS], sampled=[True, False, True, True])
CUT = Completion([5, 6, 7], finish_reason="length")
LOST = Completion([5], finish_reason="abort")
BATCH = RolloutBatch(
    [
        Group([3], [TOOL, CUT, CUT], [1.0, 0.0, 0.5], policy_version=4, dataset="math"),
        Group([3], [TOOL, LOST], [1.0, 1.0], policy_version=1, dataset="code"),
    ],
    trainer_version=5,
    eos_token_ids=[EOS],
)


def test_metrics_of_a_rollout_counted_by_hand() -> None:
    assert reporting.rollout_metrics(BATCH, GRPO) == {
        "reward": 0.7,
        "reward_std": pytest.approx(stdev([1.0, 0.0, 0.5, 1.0, 1.0])),
        "reward_min": 0.0,
        "reward_max": 1.0,
        "reward/math": 0.5,
        "reward/code": 1.0,
        "length": 3.0,
        "length_min": 1,
        "length_max": 4,
        "length_right": 3.0,
        "stopped": 0.4,
        "truncated": 0.4,
        "aborted": 0.2,
        "no_signal": 0.5,
        "all_right": 0.5,
        "none_right": 0.0,
        "staleness": pytest.approx(11 / 5),
        "staleness_max": 4,
    }


@pytest.mark.parametrize(
    ("counted", "with_eos", "length"), [("all", False, 13), ("sampled", True, 13), ("sampled", False, 11)]
)
def test_lengths_count_tool_tokens_and_ends_as_declared(counted: str, with_eos: bool, length: int) -> None:
    conventions = GRPO.replace(logged_length=counted, length_counts_eos=with_eos)
    assert reporting.rollout_metrics(BATCH, conventions)["length"] == length / 5


def test_spread_is_that_of_the_batch_or_the_mean_of_the_groups() -> None:
    of_groups = reporting.rollout_metrics(BATCH, GRPO.replace(logged_std="group", logged_std_ddof=0))
    assert of_groups["reward_std"] == pytest.approx(pstdev([1.0, 0.0, 0.5]) / 2)


def test_group_of_one_has_no_spread_with_ddof_1() -> None:
    alone = RolloutBatch([Group([3], [CUT], [0.0])])
    metrics = reporting.rollout_metrics(alone, GRPO)
    assert math.isnan(metrics["reward_std"])
    assert "length_right" not in metrics


def test_rollouts_without_a_reward_have_the_other_metrics() -> None:
    nothing = RolloutBatch([Group([3], [CUT], [math.nan])])
    with pytest.raises(ValueError, match="no reward"):
        reporting.rollout_metrics(nothing, GRPO)
    left_out = reporting.rollout_metrics(nothing, GRPO.replace(unscored="exclude"))
    assert left_out["truncated"] == 1.0
    assert "reward" not in left_out
    assert reporting.rollout_metrics(nothing, GRPO.replace(unscored="zero", pass_threshold=0.0))["length_right"] == 3


def test_parts_are_reduced_as_each_metric_says() -> None:
    first = {
        "kl": Metric(1.0, 3),
        "tokens": Metric(3, 3, "sum"),
        "low": Metric(1, 3, "min"),
        "lr": Metric(0.1, 1, "last"),
    }
    second = {
        "kl": Metric(5.0, 1),
        "tokens": Metric(1, 1, "sum"),
        "low": Metric(-1, 1, "min"),
        "lr": Metric(0.2, 1, "last"),
    }
    empty = {"kl": Metric(math.nan, 0), "high": Metric(4.0, 1, "max")}
    merged = reporting.merged_metrics([first, second, empty])
    assert merged == {"kl": 2.0, "tokens": 4.0, "low": -1, "lr": 0.2, "high": 4.0}


def test_metric_without_a_value_is_left_out_and_one_with_two_reductions_is_an_error() -> None:
    assert reporting.merged_metrics([{"kl": Metric(0.0, 0)}]) == {}
    with pytest.raises(ValueError, match="kl is reduced in several ways: max, mean"):
        reporting.merged_metrics([{"kl": Metric(0.0)}, {"kl": Metric(0.0, 1, "max")}])


def test_ranks_share_the_items_of_an_evaluation() -> None:
    assert [reporting.evaluation_items(5, rank, 3) for rank in range(3)] == [[0, 3], [1, 4], [2]]


def test_steps_of_evaluations() -> None:
    assert reporting.evaluation_steps(5, 2, at_start=False, at_end=False) == [2, 4]
    assert reporting.evaluation_steps(5, 2, at_start=True, at_end=True) == [0, 2, 4, 5]
    assert reporting.evaluation_steps(4, 2, at_start=False, at_end=True) == [2, 4]


def test_completion_without_text_is_not_logged() -> None:
    with pytest.raises(ValueError, match="without text"):
        reporting.logged_samples(BATCH, 1)
