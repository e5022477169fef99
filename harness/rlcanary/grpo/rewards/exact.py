"""Compare with one right text, letter by letter: the score of the generated tasks."""

from typing import Any

from rlcanary.grpo.rewards.verifier import Score


class ExactVerifier:
    """Scores 1 if the completion is the target, outer spaces aside; else 0, or the share of right letters if `partial`."""

    bounds = (0.0, 1.0)

    def __init__(self, partial: bool = False) -> None:
        self.partial = partial

    def verify(self, completion: str, target: Any) -> Score:
        """Compare with the text of the target."""
        given, right = completion.strip(), str(target).strip()
        if given == right:
            return Score(1.0)
        if not given:
            return Score(0.0, "no answer")
        if not self.partial:
            return Score(0.0)
        in_place = sum(a == b for a, b in zip(given, right, strict=False))
        return Score(in_place / max(len(given), len(right)))
