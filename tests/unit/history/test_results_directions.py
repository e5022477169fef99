"""Which way a metric is better."""

import pytest

from rlcanary.errors import UserError
from rlcanary.history.directions import Direction, Rule, direction_of, matches, parse_rules


@pytest.mark.parametrize(
    ("metric", "direction"),
    [
        ("loss", "lower"),
        ("train/policyLoss", "lower"),
        ("avg_prob_mult_error", "lower"),
        ("_elapsed", "lower"),
        ("peak_mem_gb", "lower"),
        ("step_time_s", "lower"),
        ("reward", "higher"),
        ("pass@1", "higher"),
        ("validAccuracy", "higher"),
        ("tokens_per_s", "higher"),
        ("samples_per_second", "higher"),
        ("tokens_per_sec_per_gpu", "higher"),
        ("gb_per_s", "higher"),
        ("tflops_per_gpu", "higher"),
        ("max_mem_per_gpu", "lower"),
        ("seconds_per_gpu", "lower"),
        ("failures_per_hour", "lower"),
        ("upper_s", None),
        ("mean_lps", None),
        ("entropy", None),
        ("grad_norm", None),
        ("reward_loss", None),
        ("glossary", None),
        ("times_per_seed", "lower"),
    ],
)
def test_words_of_the_name_tell_the_direction(metric: str, direction: str | None) -> None:
    assert direction_of("test_loss::test_reward", metric, []) == direction


def test_declaration_goes_before_the_words_and_the_first_one_counts() -> None:
    rules = parse_rules(["test_a::*.loss = higher", "*.loss = ignore", "*=stable"])
    assert direction_of("test_a::test_x[=0.5]", "loss", rules) is Direction.HIGHER
    assert direction_of("test_b::test_x", "loss", rules) is Direction.IGNORE
    assert direction_of("test_b::test_x", "entropy", rules) is Direction.STABLE


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("*.loss", "test_a::test_x[0.5].loss", True),
        ("test_a::test_x[0.5].loss", "test_a::test_x[0.5].loss", True),
        ("test_a::test_x[0.5].loss", "test_a::test_x[0x5].loss", False),
        ("test_a*", "test_a::x\n.loss", True),
        (".loss", "test_a.loss", False),
    ],
)
def test_only_a_star_is_special_in_a_pattern(pattern: str, name: str, fits: bool) -> None:
    assert matches(pattern, name) is fits


@pytest.mark.parametrize("line", ["*.loss", "*.loss = down", "= lower", ""])
def test_rule_of_another_form_is_refused(line: str) -> None:
    with pytest.raises(UserError, match="lower, higher, stable, ignore"):
        parse_rules([line])


def test_pattern_may_hold_an_equals_sign() -> None:
    assert parse_rules(["test[a=1].x = lower"]) == [Rule("test[a=1].x", Direction.LOWER)]
