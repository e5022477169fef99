r"""Verifying of final answers: find the answer in a completion, and compare it with the right one.

Answers are found where benchmarks ask for them: in `\boxed{}` (MATH, arXiv 2103.03874), in an `<answer>` tag
(DeepSeek-R1, 2501.12948), behind `####` (GSM8K, 2110.14168), or behind `Answer:` (DAPO, 2503.14476).
"""

import re
from decimal import Decimal
from fractions import Fraction

from rlcanary.contract.conventions import Conventions
from rlcanary.contract.presets import GRPO
from rlcanary.contract.records.preparation import Answer, AnswerFormat

PATTERNS: dict[AnswerFormat, re.Pattern[str]] = {
    "tag": re.compile(r"<answer>(.*?)</answer>", re.DOTALL),
    "hash": re.compile(r"####(.*)"),
    "line": re.compile(r"^Answer:(.*)", re.MULTILINE),
    "bare": re.compile(r"\A(.*)\Z", re.DOTALL),
}
NUMBER = re.compile(r"[-+]?(\d+|\d{1,3}(,\d{3})+)?(\.\d+)?", re.ASCII)
FRACTION = re.compile(r"([-+]?)\\frac\{([^{}]*)\}\{([^{}]*)\}|([^/]*)/([^/]*)")
BOX = "\\boxed{"


def verify(answer: Answer, conventions: Conventions = GRPO) -> bool:
    """Tell whether the completion's final answer is the right one.

    A number is compared by its value, an expression as LaTeX without its spacing or by its value if it is a fraction of
    numbers, the letter of a choice without regard to case, and a text as it is without outer blanks. An empty reference
    is the answer of no completion.
    """
    found = answers_in(answer.text, answer.format)
    if not found:
        return False
    given, right = found[-1 if conventions.answer_taken == "last" else 0].strip(), answer.reference.strip()
    if not given or not right:
        return False
    if answer.kind == "number":
        return number(given) == number(right) is not None
    if answer.kind == "math":
        values = fraction(plain_latex(given)), fraction(plain_latex(right))
        return plain_latex(given) == plain_latex(right) or values[0] == values[1] is not None
    if answer.kind == "choice":
        return given.strip("().").upper() == right.strip("().").upper()
    return given == right


def answers_in(text: str, format: AnswerFormat) -> list[str]:
    """Find the answers that a completion gives in a format, in order; one that is not closed is none."""
    return _boxed(text) if format == "boxed" else [found[1] for found in PATTERNS[format].finditer(text)]


def number(text: str) -> Decimal | None:
    """Parse a number in decimal notation, thousands perhaps set off by commas; None if the text is not one."""
    digits = text.strip().removeprefix("$")
    return Decimal(digits.replace(",", "")) if NUMBER.fullmatch(digits) and re.search(r"\d", digits) else None


def fraction(text: str) -> Fraction | None:
    r"""Parse a number, `a/b` or `\frac{a}{b}` of numbers exactly; None if the text is none of these or divides by 0."""
    if (found := FRACTION.fullmatch(text)) is None:
        return None if (value := number(text)) is None else Fraction(value)
    above, below = (number(found[index] or found[index + 2] or "") for index in (2, 3))
    if above is None or not below:
        return None
    return Fraction(above) / Fraction(below) * (-1 if found[1] == "-" else 1)


def plain_latex(text: str) -> str:
    r"""Remove what does not change the meaning of an expression: dollar signs, spacing, sizes of fractions and brackets."""
    text = re.sub(r"\\[dt]frac(?![a-zA-Z])", r"\\frac", text)
    return re.sub(r"\\(?:left|right|q?quad)(?![a-zA-Z])|\\[!,;: ]|[\s$]", "", text)


def _boxed(text: str) -> list[str]:
    found: list[str] = []
    end = 0
    while (start := text.find(BOX, end)) >= 0:
        start += len(BOX)
        depth, end = 1, start
        while end < len(text) and depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        if not depth:
            found.append(text[start : end - 1])
    return found
