"""The team's reward functions, as TRL calls them: completions and columns of the dataset in, a list of numbers out."""

import re
from decimal import Decimal

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
NUMBER = re.compile(r"[-+]?\d{1,30}(\.\d{1,30})?", re.ASCII)


def number(text):
    """Read a whole text as a number, None if it is none. Thousands may have commas."""
    text = text.strip().replace(",", "")
    return Decimal(text) if NUMBER.fullmatch(text) else None


def is_right(text, answer):
    """Tell whether the last answer of a completion is the right one."""
    given = ANSWER.findall(text)
    return bool(given) and number(given[-1]) is not None and number(given[-1]) == number(answer)


def correct(completions, answer, **_):
    """1 for a right completion, 0 for any other."""
    return [float(is_right(text, right)) for text, right in zip(completions, answer, strict=True)]


def overlong(limit, buffer):
    """Make the function that takes up to 1 from completions in the last `buffer` tokens before the limit."""

    def punished(completion_ids, **_):
        return [-min(1.0, max(0, len(ids) - (limit - buffer)) / buffer) for ids in completion_ids]

    return punished
