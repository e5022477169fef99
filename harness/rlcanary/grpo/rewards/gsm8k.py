"""Score grade-school word problems whose answer is one number (GSM8K, 2110.14168), compared exactly."""

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from rlcanary.errors import UserError
from rlcanary.grpo.rewards.numbers import number, numbers, tagged_answer
from rlcanary.grpo.rewards.verifier import Score

HASHES = re.compile(r"####\s*(\S+)")
BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
IN_WORDS = re.compile(r"answer\s*(?:is\s*[:=]?|[:=])\s*(\S+)", re.IGNORECASE)


def _only(text: str) -> Decimal | None:
    """Return the number of a text that holds exactly one: two answers are none."""
    found = numbers(text)
    return found[0] if len(found) == 1 else None


def _hashes(text: str) -> Decimal | None:
    found = HASHES.findall(text)
    return _only(found[-1]) if found else None


def _marked(text: str) -> Decimal | None:
    """Return the number after the first kind of marker found; the last of its kind counts."""
    tagged = tagged_answer(text)
    if tagged is not None:
        return _only(tagged)
    for marker in (HASHES, BOXED, IN_WORDS):
        if found := marker.findall(text):
            return _only(found[-1])
    return None


def _last(text: str) -> Decimal | None:
    found = numbers(text)
    return found[-1] if found else None


def _any(text: str) -> Decimal | None:
    marked = _marked(text)
    return _last(text) if marked is None else marked


# The function that finds the answer, by mode.
MODES: dict[str, Callable[[str], Decimal | None]] = {
    "strict": _hashes,
    "flexible": _marked,
    "last_number": _last,
    "any": _any,
}


class GSM8KVerifier:
    r"""Scores 1 for the right number, less for a wrong one in the right form, 0 for none.

    Modes: "strict" takes the number behind `####` as in the dataset; "flexible" one behind `<answer>`, `####`, `\boxed` or
    "the answer is"; "last_number" the last of the text, be it the answer or not; "any" a marked one, else the last.
    """

    bounds = (0.0, 1.0)

    def __init__(self, mode: str = "flexible", format_weight: float = 0.0) -> None:
        """Choose the way in which the answer is found.

        Args:
            mode: one of the modes of the class.
            format_weight: the reward of a wrong number that the mode found, between 0 and 1.

        Raises:
            UserError: no such mode, or a weight outside 0 … 1.
        """
        if mode not in MODES:
            raise UserError(f"gsm8k mode {mode!r} is not one of {', '.join(MODES)}")
        if not 0 <= format_weight <= 1:
            raise UserError(f"format_weight {format_weight} is not between 0 and 1")
        self.format_weight = format_weight
        self._find = MODES[mode]

    def verify(self, completion: str, target: Any) -> Score:
        """Compare with a target that is a number or a solution of the dataset, which ends in `#### number`."""
        right = number(target)
        if right is None:
            right = _hashes(str(target))
        if right is None:
            return Score(None, "bad target", detail=f"{target!r} is neither a number nor ends in one after ####")
        given = self._find(completion)
        if given is None:
            return Score(0.0, "no answer")
        return Score(1.0 if given == right else self.format_weight)
