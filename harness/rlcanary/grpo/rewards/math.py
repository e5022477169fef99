r"""Compare mathematical answers as expressions by math-verify: 1/2 is 0.5 is \frac{1}{2}."""

import logging
from typing import Any

from rlcanary.errors import UserError
from rlcanary.grpo.rewards.numbers import numbers, tagged_answer
from rlcanary.grpo.rewards.verifier import Score


class MathVerifier:
    """Scores 1 for the right answer, 0 for another or none.

    The answer is the text in the last `<answer>` tag, else the one math-verify finds in the whole text (boxed first), else
    the last number. It has no time limit of its own, since an alarm works in main threads only: simplifying an expression
    can take for ever, so give it to a `VerifierPool`.
    """

    bounds = (0.0, 1.0)

    def __init__(self) -> None:
        """Import math-verify.

        Raises:
            UserError: it is not installed.
        """
        try:
            import math_verify
        except ModuleNotFoundError as error:
            raise UserError("the math verifier needs math-verify: pip install 'rlcanary[grpo]'") from error
        # It warns of calls without its alarm, once per process; the pool is the time limit.
        logging.getLogger(math_verify.__name__).setLevel(logging.ERROR)
        self._library = math_verify

    def verify(self, completion: str, target: Any) -> Score:
        """Compare with a target in LaTeX or plain notation, as text or as a number."""
        right = self._expression(str(target))
        if not right:
            return Score(None, "bad target", detail=f"{target!r} is no mathematical expression")
        given = self._answer(completion)
        if not given:
            return Score(0.0, "no answer")
        # The right answer goes first: the comparison is not symmetric.
        return Score(float(self._library.verify(right, given, timeout_seconds=None, raise_on_error=True)))

    def _answer(self, completion: str) -> list[Any]:
        tagged = tagged_answer(completion)
        if tagged is not None:
            return self._expression(tagged)
        found = self._parse(completion)
        if found:
            return found
        last = numbers(completion)[-1:]
        return self._parse(str(last[0])) if last else []

    def _expression(self, text: str) -> list[Any]:
        """Parse a text that is an expression as a whole, even without the signs that set LaTeX apart from prose."""
        # As prose, "(3, -1)" would be the number at its end.
        return self._parse(f"${text}$") or self._parse(text)

    def _parse(self, text: str) -> list[Any]:
        """Parse with math-verify: nothing is [], which is not None."""
        found: list[Any] = self._library.parse(text, parsing_timeout=None)
        return found
