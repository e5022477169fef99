r"""Completions that give a final answer, and answers on which every verifier of their kind agrees.

Where sensible verifiers differ there is no pair: 1/2 and 0.5, a lower-case letter, an answer that differs in its punctuation
alone, a box that is never closed around the right answer.
"""

from collections.abc import Iterator

from rlcanary.checks.case import Case
from rlcanary.contract.records.preparation import Answer, AnswerFormat, AnswerKind

KINDS: tuple[AnswerKind, ...] = ("number", "math", "choice", "exact")
FORMATS: tuple[AnswerFormat, ...] = ("boxed", "tag", "hash", "line", "bare")
Pairs = dict[AnswerKind, list[tuple[str, str]]]
"""By kind, an answer and a reference."""

EQUAL: Pairs = {
    "number": [(each, each) for each in ("42", "0", "-7", "3.25", "1234567")] + [("1,234,567", "1234567")],
    "math": [(each, each) for each in ("42", "0", "-7", r"\frac{3}{4}", r"\frac{\sqrt{3}}{2}", "x^{2}+1", "(3, -1)")],
    "choice": [(each, each) for each in "ABCD"],
    "exact": [
        (each, each) for each in ("blue whale", "7", "0", "Zürich", "f(x)=[1]*2", "a.c", "12|42", "really? (yes)")
    ],
}
UNEQUAL: Pairs = {
    "number": [
        *(
            (each, "42")
            for each in ("43", "24", "52", "-42", "4", "2", "421", "142", "4.2", "0", "\N{MINUS SIGN}42", "forty")
        ),
        *((each, "-42") for each in ("42", "-4", "-24")),
        *((each, "3.25") for each in ("3.35", "3", "325", "0.25", "3425", "13.25")),
        *((each, "234") for each in ("1,234", "234,567")),
        *((each, "0") for each in ("1", "10", "0.5", "zero or one")),
    ],
    "math": [
        *((each, "42") for each in ("43", "24", "-42", "4", "2", "421", "142", "4.2", "\N{MINUS SIGN}42")),
        *(
            (each, r"\frac{3}{4}")
            for each in (r"\frac{4}{3}", r"\frac{3}{5}", r"-\frac{3}{4}", r"\frac{13}{4}", "3", "4")
        ),
        *((each, r"\frac{\sqrt{3}}{2}") for each in (r"\frac{\sqrt{2}}{2}", r"\frac{\sqrt{3}}{3}", r"\sqrt{3}", "2")),
        *((each, "x^{2}+1") for each in ("x^{2}-1", "x^{3}+1", "x^{2}", "xx1")),
        *((each, "(3, -1)") for each in ("(3, 1)", "(2, -1)", "3", "-1")),
    ],
    "choice": [("B", "A"), ("A", "B"), ("D", "C"), ("AB", "A"), ("AB", "B"), ("ABCD", "C"), ("none", "A")],
    "exact": [
        *((each, "blue whale") for each in ("whale", "blue", "blue whales", "blue shark", "bluewhal")),
        *((each, "a.c") for each in ("abc", "a")),
        *((each, "12|42") for each in ("12", "42")),
        *((each, "7") for each in ("17", "71", "8")),
    ],
}
BEGINNINGS: dict[AnswerKind, tuple[str, str]] = {
    "number": ("12", "1234"),
    "math": (r"\frac{1", r"\frac{17}{4}"),
    "choice": ("", "C"),
    "exact": ("blue wh", "blue whale"),
}
"""By kind, what is left of an answer after truncation, and the answer."""

THOUGHT = "Let me see."


def written(answer: str, format: AnswerFormat, thought: str = THOUGHT) -> str:
    """Write a completion that gives this final answer."""
    match format:
        case "boxed":
            return f"{thought}\nSo the answer is $\\boxed{{{answer}}}$."
        case "tag":
            return f"<think>\n{thought}\n</think>\n<answer>{answer}</answer>"
        case "hash":
            return f"{thought}\n#### {answer}"
        case "line":
            return f"{thought}\n\nAnswer: {answer}"
    return answer


def cut(answer: str, format: AnswerFormat) -> str:
    """Write a completion that is truncated behind this much of its final answer."""
    text = written(answer, format)
    return text[: len(text) - text[::-1].index(answer[::-1])] if answer else THOUGHT


def judged(text: str, kind: AnswerKind, format: AnswerFormat, reference: str, told: str) -> Case:
    """Make a case of one completion."""
    return Case(kind, format, told, answer=Answer(kind, format, text, reference))


def answered(pairs: Pairs) -> Iterator[Case]:
    """Make a case of each pair in each format."""
    for kind, each in pairs.items():
        for format in FORMATS:
            for answer, reference in each:
                yield judged(written(answer, format), kind, format, reference, f"{answer} where {reference} is right")
