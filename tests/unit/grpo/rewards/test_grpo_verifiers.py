"""Verifiers: a reward, or why there is none; a failure of the verifier never looks like a wrong answer."""

import threading
from decimal import Decimal

import pytest

from rlcanary.errors import UserError
from rlcanary.grpo.rewards.exact import ExactVerifier
from rlcanary.grpo.rewards.gsm8k import GSM8KVerifier
from rlcanary.grpo.rewards.math import MathVerifier
from rlcanary.grpo.rewards.numbers import numbers
from rlcanary.grpo.rewards.verifier import Reward, Score, Tallied, judge


class Scripted:
    """Gives, or raises, what it was told to."""

    bounds = (0.0, 1.0)

    def __init__(self, said):
        self.said = said

    def verify(self, completion, target):
        if isinstance(self.said, Exception):
            raise self.said
        return self.said


def test_exception_of_a_verifier_is_not_a_score_of_zero():
    score = judge(Scripted(ZeroDivisionError("by zero")), "4", "4")
    assert (score.value, score.problem, score.detail) == (None, "exception", "ZeroDivisionError: by zero")


def test_value_outside_the_declared_bounds_is_a_problem():
    score = judge(Scripted(Score(1.15)), "4", "4")
    assert (score.value, score.problem) == (None, "out of bounds")


def test_nan_is_outside_all_bounds():
    assert judge(Scripted(Score(float("nan"))), "4", "4").problem == "out of bounds"


@pytest.mark.parametrize(
    ("value", "problem"), [(0.0, "timeout"), (1.0, "exception"), (None, None), (None, "no answer")]
)
def test_score_has_either_a_value_or_the_reason_why_not(value, problem):
    with pytest.raises(ValueError, match="a value or a problem"):
        Score(value, problem)


def test_score_says_how_long_the_verifier_took():
    class Slow(Scripted):
        def verify(self, completion, target):
            threading.Event().wait(0.05)
            return self.said

    assert 0.05 <= judge(Slow(Score(1.0)), "", "").seconds < 5


def test_reward_of_an_item_is_none_where_the_verifier_failed():
    assert Reward(Scripted(RuntimeError()), "4")("4") is None
    assert Reward(Scripted(Score(0.0)), "4")("4") == 0.0


def test_tally_counts_problems_apart_from_zeros():
    seen = []
    verifier = Scripted(None)
    tallied = Tallied(verifier)
    for said in (Score(0.0), Score(1.0), Score(0.0, "no answer"), RuntimeError(), Score(None, "timeout")):
        verifier.said = said
        seen.append(tallied.verify("", ""))
    tally = tallied.tally
    assert (tally.calls, tally.scored, tally.zeros) == (5, 3, 2)
    assert tally.problems == {"no answer": 1, "exception": 1, "timeout": 1}
    assert tally.seconds == pytest.approx(sum(score.seconds for score in seen))


@pytest.fixture(scope="module")
def mathematics():
    return MathVerifier()


@pytest.mark.parametrize(
    ("completion", "target"),
    [
        (r"so it is \boxed{\frac{1}{2}}", "0.5"),
        ("The answer is 42.", "42"),
        ("<answer>42</answer>", "42"),
        (r"<answer>\frac12</answer>", "1/2"),
        ("I first thought <answer>7</answer>, but no: <answer>42</answer>", 42),
        ("<b>42</b>", "42"),
        (r"$x^2 + 2x + 1$", "(x+1)^2"),
    ],
)
def test_math_accepts_equal_expressions(mathematics, completion, target):
    assert judge(mathematics, completion, target).value == 1.0


@pytest.mark.parametrize("completion", ["<answer>41</answer> or 42", r"\boxed{42} or \boxed{41}", "43", "-42"])
def test_math_refuses_other_expressions(mathematics, completion):
    score = judge(mathematics, completion, "42")
    assert (score.value, score.problem) == (0.0, None)


def test_math_falls_back_to_the_last_number_where_the_library_finds_nothing(mathematics):
    completion = "<b>41</b><i>42</i>"
    assert mathematics._library.parse(completion, parsing_timeout=None) == []
    assert judge(mathematics, completion, "42").value == 1.0
    assert judge(mathematics, completion, "41").value == 0.0


@pytest.mark.parametrize("completion", ["", "I do not know", "<answer></answer>"])
def test_math_counts_a_completion_without_an_answer_apart(mathematics, completion):
    score = judge(mathematics, completion, "42")
    assert (score.value, score.problem) == (0.0, "no answer")


def test_math_target_is_read_as_a_whole(mathematics):
    scores = [judge(mathematics, rf"\boxed{{{given}}}", "(3, -1)").value for given in ("(3, -1)", "(2, -1)", "-1")]
    assert scores == [1.0, 0.0, 0.0]


def test_minus_sign_of_typesetting_is_a_minus():
    assert [int(each) for each in numbers("\N{MINUS SIGN}42 and 7")] == [-42, 7]


def test_math_target_that_is_no_expression_is_no_wrong_answer(mathematics):
    score = judge(mathematics, "42", "")
    assert (score.value, score.problem) == (None, "bad target")


@pytest.mark.parametrize("mode", ["strict", "flexible", "last_number", "any"])
def test_gsm8k_accepts_the_form_of_the_dataset(mode):
    target = "Natalia sold 48/2 = 24 clips in May.\n#### 1,072"
    assert judge(GSM8KVerifier(mode), "She sold clips.\n#### 1072", target).value == 1.0


@pytest.mark.parametrize(
    ("mode", "completion", "value", "problem"),
    [
        ("strict", "The answer is 42", 0.0, "no answer"),
        ("flexible", "The answer is $42.00.", 1.0, None),
        ("flexible", "The answer is: **42**.", 1.0, None),
        ("flexible", "Answer: 42 km (2 days)", 1.0, None),
        ("flexible", "<answer>42</answer> in 2 days", 1.0, None),
        ("flexible", "<answer>41 or 42</answer>", 0.0, "no answer"),
        ("flexible", r"\boxed{42} km in 2 days", 1.0, None),
        ("flexible", "42 km in 2 days", 0.0, "no answer"),
        ("last_number", "17 apples, then 42 km in 2 days", 0.0, None),
        ("any", "The answer is 42: 17 apples in 2 days", 1.0, None),
        ("any", "17 apples, then 42", 1.0, None),
        ("any", "none", 0.0, "no answer"),
    ],
)
def test_gsm8k_mode_finds_the_answer_where_it_says(mode, completion, value, problem):
    score = judge(GSM8KVerifier(mode), completion, 42)
    assert (score.value, score.problem) == (value, problem)


def test_gsm8k_pays_for_the_form_of_a_wrong_answer():
    verifier = GSM8KVerifier("strict", format_weight=0.1)
    assert judge(verifier, "#### 41", 42).value == 0.1
    assert judge(verifier, "#### 42", 42).value == 1.0
    assert judge(verifier, "41", 42).value == 0.0


@pytest.mark.parametrize("settings", [{"mode": "lenient"}, {"format_weight": 1.5}])
def test_gsm8k_setting_that_does_not_exist_is_refused_before_any_completion(settings):
    with pytest.raises(UserError, match=str(*settings.values())):
        GSM8KVerifier(**settings)


def test_gsm8k_target_without_a_number_is_no_wrong_answer():
    assert judge(GSM8KVerifier(), "42", "forty-two").problem == "bad target"


def test_numbers_of_a_text_are_exact():
    text = "$1,234.50 for x2 in the 3rd week, -7 and .5 left of 100%; 0.1 more"
    assert numbers(text) == [Decimal(n) for n in ("1234.50", "-7", ".5", "100", "0.1")]


def test_exact_verifier_pays_for_letters_in_place_only_if_asked():
    assert judge(ExactVerifier(), " abc\n", "abc").value == 1.0
    assert judge(ExactVerifier(), "abd", "abc").value == 0.0
    assert judge(ExactVerifier(partial=True), "abd", "abc").value == pytest.approx(2 / 3)
    assert judge(ExactVerifier(partial=True), "abcabc", "abc").value == 0.5
    assert judge(ExactVerifier(), "", "abc").problem == "no answer"
