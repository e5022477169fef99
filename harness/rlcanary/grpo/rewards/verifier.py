"""The protocol of a verifier, and its score: a reward, or the reason why there is none. A failure is never a zero."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from rlcanary.errors import UserError

log = logging.getLogger(__name__)
log.addHandler(logging.NullHandler())

Problem = Literal["no answer", "bad target", "exception", "timeout", "out of bounds", "worker died"]


@dataclass(frozen=True)
class Score:
    """The result of a verifier for one completion.

    Attributes:
        value: the reward; None if the verifier could not judge, which is not a reward of zero.
        problem: the reason for no value. "no answer" alone comes with a value: the completion holds nothing to judge,
            which is the completion's fault and not the verifier's.
        seconds: duration of the call.
        detail: the problem in words.
    """

    value: float | None
    problem: Problem | None = None
    seconds: float = 0.0
    detail: str = ""

    def __post_init__(self) -> None:
        if (self.value is None) != (self.problem not in (None, "no answer")):
            raise ValueError(f"a score has a value or a problem that explains its absence: {self!r}")


class Verifier(Protocol):
    """Judges completions against the target of their prompt. To add one, write one file beside this.

    Attributes:
        bounds: the smallest and the largest reward that it gives.
    """

    bounds: tuple[float, float]

    def verify(self, completion: str, target: Any) -> Score:
        """Score one completion. It may raise: `judge` turns that into a score without a value.

        Raises:
            UserError: the verifier was set up wrongly, so that no completion will ever be judged.
        """


def judge(verifier: Verifier, completion: str, target: Any) -> Score:
    """Score with a verifier and time it; an exception, or a value outside its bounds, becomes a problem.

    Raises:
        UserError: as `Verifier.verify`.
    """
    began = time.perf_counter()
    try:
        score = verifier.verify(completion, target)
    except UserError:
        raise
    except Exception as error:
        log.warning("%s raised; the completion has no reward", type(verifier).__name__, exc_info=True)
        score = Score(None, "exception", detail=f"{type(error).__name__}: {error}")
    low, high = verifier.bounds
    if score.value is not None and not low <= score.value <= high:
        score = Score(None, "out of bounds", detail=f"{score.value} is not between {low} and {high}")
    return replace(score, seconds=time.perf_counter() - began)


@dataclass
class Tally:
    """Counts of a verifier's calls and scores.

    Attributes:
        calls: number of completions.
        scored: number of completions with a value, whatever it is.
        zeros: number of completions with a value of zero.
        problems: number of times each problem came up; "no answer" is also among the scored.
        seconds: sum over the calls.
    """

    calls: int = 0
    scored: int = 0
    zeros: int = 0
    problems: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


class Reward:
    """The reward function of `rlcanary.contract.adapter.Item`: a verifier, with the target and the answer's prefix."""

    def __init__(self, verifier: Verifier, target: Any, prefix: str = "") -> None:
        self.verifier, self.target, self.prefix = verifier, target, prefix

    def __call__(self, completion: str) -> float | None:
        return judge(self.verifier, self.prefix + completion, self.target).value


class Tallied:
    """Counts the scores of another verifier; it may be called from several threads."""

    def __init__(self, verifier: Verifier) -> None:
        self.verifier = verifier
        self.bounds = verifier.bounds
        self.tally = Tally()
        self._lock = threading.Lock()

    def verify(self, completion: str, target: Any) -> Score:
        """Return the other verifier's score, as `judge` gives it."""
        score = judge(self.verifier, completion, target)
        with self._lock:
            self.tally.calls += 1
            self.tally.scored += score.value is not None
            self.tally.zeros += score.value == 0
            self.tally.problems.update([score.problem] if score.problem else [])
            self.tally.seconds += score.seconds
        return score
