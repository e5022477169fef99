"""Answers are found and compared as a second way of reading them does it."""

from decimal import Decimal
from fractions import Fraction
from itertools import product

import pytest

from rlcanary.checks.worlds.answers import EQUAL, FORMATS, UNEQUAL, Pairs, cut, written
from rlcanary.contract.presets import GRPO
from rlcanary.contract.records.preparation import Answer, AnswerFormat, AnswerKind
from rlcanary.reference.data.verifying import answers_in, fraction, number, plain_latex, verify


def is_right(answer: str, reference: str, kind: AnswerKind = "math") -> bool:
    return verify(Answer(kind, "bare", answer, reference))


def test_fractions_are_equal_if_their_cross_products_are() -> None:
    for a, b, c, d in product(range(-3, 4), (1, 2, 3), range(-3, 4), (1, 2, 4)):
        is_equal = a * d == c * b
        assert is_right(rf"\frac{{{a}}}{{{b}}}", f"{c}/{d}") == is_equal
        assert is_right(f"{a}/{b}", rf"\dfrac{{{c}}}{{{d}}}") == is_equal


def test_numbers_are_read_as_python_reads_them() -> None:
    for value in (0, 7, -7, 1234, 1234567, -1000000):
        assert number(f"{value:,}") == number(f"{value}") == number(f"${value}") == value
        assert number(f"{value}.0") == value
    for text in ("0.5", "-0.25", ".5", "+3"):
        assert number(text) == Decimal(text)


@pytest.mark.parametrize("text", ["", "-", ".", "1,23", "1.2.3", "nan", "1e3", "\N{MINUS SIGN}4", "٤", "4 2"])
def test_text_that_is_no_number_in_decimal_notation_is_none(text: str) -> None:
    assert number(text) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"-\frac{1}{2}", Fraction(-1, 2)),
        (r"\frac{-1}{-2}", Fraction(1, 2)),
        ("0.125", Fraction(1, 8)),
        (r"\frac{1}{0}", None),
        ("1/2/3", None),
        (r"\frac{x}{2}", None),
    ],
)
def test_fractions_have_their_exact_value(text: str, value: Fraction | None) -> None:
    assert fraction(text) == value


def test_spacing_and_sizes_of_brackets_do_not_change_an_expression() -> None:
    assert plain_latex(r"\left( \dfrac{1}{2},\, 3 \right)$") == r"(\frac{1}{2},3)"
    assert plain_latex(r"\leftarrow \rightarrow") == r"\leftarrow\rightarrow"
    assert plain_latex(r"x \quad = \qquad y") == "x=y"


@pytest.mark.parametrize("format", FORMATS)
def test_answer_that_is_written_in_a_format_is_found_in_it(format: AnswerFormat) -> None:
    answers = sorted({each for pairs in (EQUAL, UNEQUAL) for kind in pairs.values() for pair in kind for each in pair})
    for answer in answers:
        assert [found.strip() for found in answers_in(written(answer, format), format)] == [answer]


def test_box_ends_where_its_braces_are_even() -> None:
    text = r"\boxed{a{b}{c{d}}} and \boxed{} and \boxed{open{"
    assert answers_in(text, "boxed") == ["a{b}{c{d}}", ""]
    # A second reading: count braces up to each closing one.
    inside = text.partition("{")[2]
    ends = [
        end for end in range(len(inside)) if inside[end] == "}" and inside[:end].count("{") == inside[:end].count("}")
    ]
    assert inside[: ends[0]] == "a{b}{c{d}}"


def test_last_or_first_answer_counts_as_declared() -> None:
    text = "#### 1\n#### 2"
    assert [verify(Answer("number", "hash", text, each)) for each in "12"] == [False, True]
    first = GRPO.replace(answer_taken="first")
    assert [verify(Answer("number", "hash", text, each), first) for each in "12"] == [True, False]


def test_letter_of_a_choice_is_read_in_brackets_and_in_either_case() -> None:
    assert [is_right(each, "B", "choice") for each in ("B", "(b)", "B.", "AB", "")] == [True, True, True, False, False]


def test_truncation_leaves_the_beginning_of_an_answer() -> None:
    for format in FORMATS:
        assert cut("12", format).endswith("12")
        assert written("1234", format).startswith(cut("12", format))


def test_pairs_are_of_the_kinds_and_no_pair_is_both() -> None:
    both: Pairs = {kind: sorted(set(EQUAL[kind]) & set(UNEQUAL[kind])) for kind in EQUAL}
    assert not any(both.values())
    assert all(answer != reference for pairs in UNEQUAL.values() for answer, reference in pairs)
