"""Verifying: the final answer of a completion is right if it is the reference, and otherwise wrong.

The checks have only pairs on which all verifiers of a kind agree.
"""

from collections.abc import Iterator

from rlcanary.checks.asserts import assert_equal, assert_true, unless_raised
from rlcanary.checks.case import Case
from rlcanary.checks.check import check
from rlcanary.checks.worlds.answers import (
    BEGINNINGS,
    EQUAL,
    FORMATS,
    KINDS,
    THOUGHT,
    UNEQUAL,
    answered,
    cut,
    judged,
    written,
)
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.records.preparation import Answer, AnswerKind

NEEDS = ("verify",)


def _equal() -> Iterator[Case]:
    yield from answered(EQUAL)
    for kind in KINDS:
        answer, reference = EQUAL[kind][0]
        for format in ("boxed", "tag"):
            yield judged(written(f" {answer} ", format), kind, format, reference, "between blanks")


@check("verifying.right_answer", needs=NEEDS, cases=_equal)
def right_answer(adapter: Adapter, answer: Answer) -> None:
    """A completion whose final answer is the reference is right: also 0, with nested braces or with commas in thousands.

    Silent because a right answer that is taken for wrong only makes the task look harder, and punishes what should be
    learned. Look for a pattern that ends at the first closing brace, for a reference that is compared with the whole
    text or searched the wrong way round, for answers that are tested by their truth, and for references that are used as
    patterns without being escaped.
    """
    told = f"the final answer of {answer.text!r} is {answer.reference!r} and is not taken for right"
    assert_equal(adapter.verify(answer), True, told, quantity="verdict")


def _unequal() -> Iterator[Case]:
    yield from answered(UNEQUAL)
    for kind, (beginning, reference) in BEGINNINGS.items():
        for format in FORMATS:
            yield judged(cut(beginning, format), kind, format, reference, "truncated")


@check("verifying.wrong_answer", needs=NEEDS, cases=_unequal)
def wrong_answer(adapter: Adapter, answer: Answer) -> None:
    """A completion whose final answer is one edit away from the reference is wrong.

    Silent because the reward only rises faster: a policy finds the answers that are right by accident, such as two letters
    at once. Look for a reference that is searched in the text instead of compared with the answer, for signs and
    thousands that a pattern leaves out, for a comparison of the last of several parts alone, and for references that
    are used as patterns.
    """
    told = f"the completion {answer.text!r} is taken for right, where {answer.reference!r} is"
    assert_equal(adapter.verify(answer), False, told, quantity="verdict")


OTHERS: dict[AnswerKind, tuple[str, str]] = {
    "number": ("42", "57"),
    "math": (r"\frac{3}{4}", r"\frac{5}{7}"),
    "choice": ("B", "C"),
    "exact": ("oak", "elm"),
}


def _mentioned(conventions: Conventions) -> Iterator[Case]:
    for kind in KINDS:
        right, wrong = OTHERS[kind]
        for format in FORMATS[:-1]:
            for final, other in ((wrong, right), (right, wrong)):
                text = written(final, format, f"It might be {other} at first sight, but no.")
                told = f"{final} after {other} in the thoughts"
                yield Case(kind, format, told, answer=Answer(kind, format, text, right), is_right=final == right)
                text = "\n\n".join(written(each, format) for each in (other, final))
                taken = final if conventions.answer_taken == "last" else other
                answer = Answer(kind, format, text, right)
                yield Case(kind, format, f"{other}, then {final}", answer=answer, is_right=taken == right)


@check("verifying.final_answer_counts", needs=NEEDS, cases=_mentioned)
def final_answer_counts(adapter: Adapter, answer: Answer, is_right: bool) -> None:
    """Only the final answer is judged: not what the thoughts mention, and of several answers the declared one.

    Silent because a completion that names every candidate is then right, which a policy learns soon. Look for a search of
    the whole text, and for a pattern whose first match is taken where the last is meant. A verifier that takes the first
    answer declares `answer_taken="first"`; one that rejects several declines these with `NotProvided`.
    """
    told = f"where {answer.reference!r} is right, the final answer of {answer.text!r} is judged wrongly"
    assert_equal(adapter.verify(answer), is_right, told, quantity="verdict")


def _empty() -> Iterator[Case]:
    for kind in KINDS:
        for format in FORMATS:
            texts = ["", " \n", written("", format), written(" ", format), *([THOUGHT] if format != "bare" else [])]
            for _, reference in EQUAL[kind][:2]:
                for text in dict.fromkeys(texts):
                    yield judged(text, kind, format, reference, f"{text!r} where {reference!r} is right")


@check("verifying.empty_is_wrong", needs=NEEDS, cases=_empty)
def empty_is_wrong(adapter: Adapter, answer: Answer) -> None:
    """A completion without an answer is wrong.

    Silent because the shortest completion then earns the most: every text contains the empty one, and nothing parsed is
    equal to nothing parsed. Look for `in` between strings, for two parse results that are compared although both are None,
    and for an answer that falls back to 0.
    """
    told = f"the completion {answer.text!r} is taken for right, where {answer.reference!r} is"
    assert_equal(adapter.verify(answer), False, told, quantity="verdict")


def _without_reference() -> Iterator[Case]:
    for kind in KINDS:
        given = EQUAL[kind][0][0]
        for format in FORMATS:
            # A program may have to print nothing: there an empty text is right.
            for answer in (given, *(("", " ") if kind != "exact" else ())):
                for reference in ("", " "):
                    yield judged(written(answer, format), kind, format, reference, f"{answer!r} for {reference!r}")


@check("verifying.empty_reference", severity="hardening", needs=NEEDS, cases=_without_reference)
def empty_reference(adapter: Adapter, answer: Answer) -> None:
    """No completion is right if the reference is empty; an error is fine.

    Silent because such rows come from a column that was lost or renamed: empty completions, or all, are then right. Look for
    a reference that is searched in the text, and for a default such as `row.get("answer", "")`.
    """
    verdict = unless_raised(adapter.verify, answer)
    told = f"the completion {answer.text!r} is taken for right, where the reference is {answer.reference!r}"
    assert_true(not verdict, told, quantity="verdict")


def _others() -> Iterator[Case]:
    for kind in KINDS:
        for format in FORMATS:
            one, two = OTHERS[kind]
            pairs = {"right": (one, one), "wrong": (one, two), "other": (two, two)}
            given = {name: Answer(kind, format, written(text, format), right) for name, (text, right) in pairs.items()}
            yield Case(kind, format, answers=given)


@check("verifying.earlier_answers", needs=NEEDS, cases=_others)
def earlier_answers(adapter: Adapter, answers: dict[str, Answer]) -> None:
    """A verdict depends on the completion and its own reference alone, not on those judged before.

    Silent because each verdict is right when its row comes first: short answers repeat all the time, with other references.
    Look for caches with the text or the reference alone as their key, and for a default argument that collects.
    """
    for name in ("right", "wrong", "other", "wrong", "right"):
        answer = answers[name]
        told = f"after others, {answer.text!r} is judged wrongly where {answer.reference!r} is right"
        assert_equal(adapter.verify(answer), name != "wrong", told, quantity="verdict")


HOSTILE = (
    *("nan", "inf", "-", "1/0", r"\frac{1}{0}", r"\frac{", "1e999", "½", "🙂", "None", "()", "[]"),
    *("\\", "%s{0}$1", "\x00", "{" * 200, "}" * 50, "(" * 50, "9" * 5000),
)


def _hostile() -> Iterator[Case]:
    for kind in KINDS:
        for format in FORMATS:
            for answer in HOSTILE:
                told = repr(answer) if len(answer) < 20 else f"{len(answer)} times {answer[0]}"
                yield judged(written(answer, format), kind, format, EQUAL[kind][0][1], told)


@check("verifying.any_text_is_judged", severity="hardening", needs=NEEDS, cases=_hostile)
def any_text_is_judged(adapter: Adapter, answer: Answer) -> None:
    """No text makes the verifier raise, and a text without a meaning is wrong.

    Silent because the error is caught somewhere above, where it becomes a reward of zero, a missing row or a restarted
    worker; the policy writes such texts all the time. Look for `int` and `float` of what a pattern found (a number of 5000
    digits is too long for `int`, and "nan" is a float), and for braces that are counted beyond the end.
    """
    verdict = unless_raised(adapter.verify, answer)
    shown = answer.text if len(answer.text) < 100 else f"{answer.text[:60]}…"
    assert_true(verdict is not None, f"the verifier raises for the completion {shown!r}", quantity="error")
    told = f"the completion {shown!r} is taken for right, where {answer.reference!r} is"
    assert_true(not verdict, told, quantity="verdict")
