"""What a search needs to know about runs that may lie."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

GOOD, BAD = 0.0, 1.0
"""The two readings of a run that passes or fails; the reading of a metric is its value."""


@dataclass(frozen=True)
class Prediction:
    """What the readings so far say, for each place that the culprit can have among the D commits that were run.

    S = D + 1 places: before the first of them, between two neighbours, after the last. At place s the first s commits lie
    on the good side and the others on the bad side. K is the number of kinds of reading.
    """

    log_evidence_S: Array
    """Log probability of all readings, up to a constant."""
    chances_S2K: Array
    """Probability of each kind for the next reading: [:, 0] on the good side, [:, 1] on the bad side."""
    log_evidence_alike: float
    """Log probability of all readings if every commit is alike, up to the same constant."""
    chances_alike_K: Array


class Likelihood(Protocol):
    """A family of noise whose parameters are learned from the readings."""

    believes: bool
    """Whether no run ever lies, so that outcomes can contradict each other."""
    reads_outcomes: bool
    """Whether a reading is one of GOOD and BAD, rather than any number."""
    end_runs: int
    """How often GOOD and BAD are each run at least, before they count as verified."""
    refusal_runs: int
    """An end that was wrong every time is refused after so many runs."""

    def predict(self, readings: Sequence[Sequence[float]]) -> Prediction:
        """`readings`: those of each commit that was run, oldest commit first."""
        ...

    def log_odds_relapse(self, readings: Sequence[Sequence[float]], gaps: Sequence[int]) -> float:
        """Log odds that the history breaks, is mended and breaks again, against breaking once.

        `gaps`: how many places a change has before each commit that was run.
        """
        ...

    def badness(self, values: Sequence[float]) -> float:
        """How bad the readings of one commit are, higher being worse."""
        ...

    def estimate(self, good: Sequence[float], bad: Sequence[float]) -> Mapping[str, float]:
        """What the readings of each side say about the command, by name, for the report."""
        ...
