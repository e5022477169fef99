"""The interface between the search and a model of flaky runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

GOOD, BAD = 0.0, 1.0
"""The two readings of a run that passes or fails. The reading of a metric is its value."""


@dataclass(frozen=True)
class Prediction:
    """The evidence of the readings so far, per position of the culprit among the D commits that were run.

    There are S = D + 1 positions: before the first commit, between two neighbours, after the last. At position s the
    first s commits are on the good side and the others on the bad side. K is the number of kinds of reading.
    """

    log_evidence_S: Array
    """Log probability of all readings, up to a constant."""
    chances_S2K: Array
    """Probability of each kind for the next reading: [:, 0] on the good side, [:, 1] on the bad side."""
    log_evidence_alike: float
    """Log probability of all readings if every commit is alike, up to the same constant."""
    chances_alike_K: Array
    chances_again_SDK: Array | None = None
    """Probability of each kind for one more reading of each of the D commits. None if it is that of any commit."""
    repeats_S: Array | None = None
    """Probability that wrong readings repeat on the same commit. None if the model has none that do."""


class Likelihood(Protocol):
    """A model of noise whose parameters are learned from the readings."""

    believes: bool
    """Whether every run is taken as right, so that outcomes can contradict each other."""
    reads_outcomes: bool
    """Whether each reading is GOOD or BAD, rather than a number."""
    end_runs: int
    """The least number of runs of GOOD and of BAD before they count as verified."""
    refusal_runs: int
    """The number of runs after which an end that was wrong every time is refused."""
    end_share: float
    """GOOD or BAD runs again if its information is at least this share of the best commit's.

    Information counts only the next run. GOOD and BAD also teach about the noise, which helps all later runs.
    """

    def predict(self, readings: Sequence[Sequence[float]], ends: tuple[bool, bool] = (False, False)) -> Prediction:
        """Compute the prediction from the readings of each commit that was run, oldest commit first.

        Args:
            readings: The readings of each commit.
            ends: Whether the first of these commits is GOOD, and whether the last is BAD.
        """
        ...

    def log_odds_relapse(self, readings: Sequence[Sequence[float]], gaps: Sequence[int]) -> float:
        """Compute the log odds that the history breaks, is fixed and breaks again, against breaking once.

        Args:
            readings: The readings of each commit that was run, oldest commit first.
            gaps: The number of culprit positions before each of these commits, and after the last.
        """
        ...

    def badness(self, values: Sequence[float]) -> float:
        """Score the readings of one commit. A higher score is worse."""
        ...

    def estimate(self, good: Sequence[float], bad: Sequence[float]) -> Mapping[str, float]:
        """Estimate the command's parameters from the readings of each side, by name, for the report."""
        ...
