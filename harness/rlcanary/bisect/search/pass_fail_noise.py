"""Flaky pass/fail runs: a false fail on a good commit, or a false pass on a bad one.

Both rates are unknown. They are summed over on a grid, with a prior for the ways in which commands are flaky: not at
all, in one direction only, equally in both (a noisy number against a threshold), or in both at different rates. A bad
commit fails more often than a good one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from math import comb, lgamma

import numpy as np

from rlcanary.bisect.search.likelihood import Array, Prediction

LEVELS = (0.0005, 0.01, 0.03, 0.06, 0.1, 0.15, 0.2, 0.25, 0.3, 0.36, 0.42, 0.5, 0.6, 0.7, 0.8)
"""Rates on the grid. The first one stands for a command that is not flaky."""
LARGEST_ALIKE = 0.4
"""The largest rate that is equal on both sides. At 0.5 GOOD and BAD would look alike."""
LARGEST_SUM = 0.75

NEVER, FALSE_FAIL_ONLY, FALSE_PASS_ONLY, BOTH_ALIKE, ANYHOW = 0.12, 0.25, 0.15, 0.45, 0.03
"""Prior weights of the ways to be flaky."""
ONE_WAY_DECAY = 2.5
"""The decay of the prior for a command that is flaky in one direction: exp(-decay * rate)."""
ALIKE_GROWTH = 1.5
CERTAIN = 1e-9
"""The rate of a command that is taken never to be flaky."""


@dataclass(frozen=True)
class History:
    """Passes and failures of the command before the search.

    They count runs where it should pass, as on nightly runs before it broke, and runs where it should fail.
    """

    good_passed: int = 0
    good_failed: int = 0
    bad_passed: int = 0
    bad_failed: int = 0

    def __add__(self, other: "History") -> "History":
        return History(*(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)))

    @property
    def counts_4(self) -> Array:
        return np.array([self.good_failed, self.good_passed, self.bad_passed, self.bad_failed], dtype=float)


class PassFail:
    """The likelihood of passes and failures with unknown flake rates. A `history` narrows the rates down."""

    believes = False
    reads_outcomes = True
    end_runs = 1
    refusal_runs = 4

    def __init__(self, history: History | None = None) -> None:
        self._weigh(*_prior())
        if history is not None:
            self._log_prior_R = self._log_weight(history.counts_4)
            self._log_prior_R -= np.logaddexp.reduce(self._log_prior_R)

    def _weigh(self, weight_R: Array, false_fail_R: Array, false_pass_R: Array) -> None:
        self._false_fail_R, self._false_pass_R = false_fail_R, false_pass_R
        self._log_prior_R = np.log(weight_R)
        self._logs_4R = np.log(np.stack([false_fail_R, 1 - false_fail_R, false_pass_R, 1 - false_pass_R]))

    def predict(self, readings: Sequence[Sequence[float]]) -> Prediction:
        bad_D, good_D = _counts(readings)
        zero = np.zeros(1)
        false_fail_S = np.concatenate([zero, np.cumsum(bad_D)])
        true_pass_S = np.concatenate([zero, np.cumsum(good_D)])
        false_pass_S = true_pass_S[-1] - true_pass_S
        true_fail_S = false_fail_S[-1] - false_fail_S
        log_weight_SR = self._log_weight(np.stack([false_fail_S, true_pass_S, false_pass_S, true_fail_S], axis=1))
        largest_S = log_weight_SR.max(axis=1, keepdims=True)
        weight_SR = np.exp(log_weight_SR - largest_S)
        evidence_S = weight_SR.sum(axis=1)
        fail_S = weight_SR @ self._false_fail_R / evidence_S
        pass_S = weight_SR @ self._false_pass_R / evidence_S
        chances_S2K = np.stack([np.stack([1 - fail_S, fail_S], axis=1), np.stack([pass_S, 1 - pass_S], axis=1)], axis=1)
        fails, passes = float(bad_D.sum()), float(good_D.sum())
        # If all commits are alike, every failure rate is equally likely.
        log_evidence_alike = lgamma(fails + 1) + lgamma(passes + 1) - lgamma(fails + passes + 2)
        fail = (fails + 1) / (fails + passes + 2)
        return Prediction(
            largest_S[:, 0] + np.log(evidence_S), chances_S2K, log_evidence_alike, np.array([1 - fail, fail])
        )

    def log_odds_relapse(self, readings: Sequence[Sequence[float]], gaps: Sequence[int]) -> float:
        share_D = [sum(values) / len(values) for values in readings]
        if self.believes or share_D == sorted(share_D):
            return -np.inf  # Failure rates never fall, so no run suggests a relapse.
        return self._log_evidence(3, readings, gaps) - self._log_evidence(1, readings, gaps)

    def badness(self, values: Sequence[float]) -> float:
        return (sum(values) + 0.5) / (len(values) + 1)  # Smoothed, so that more runs count for more.

    def estimate(self, good: Sequence[float], bad: Sequence[float]) -> Mapping[str, float]:
        """Estimate the expected rates `false_fail` and `false_pass`."""
        counts_4 = np.array([sum(good), len(good) - sum(good), len(bad) - sum(bad), sum(bad)])
        log_weight_R = self._log_weight(counts_4)
        weight_R = np.exp(log_weight_R - np.logaddexp.reduce(log_weight_R))
        return {"false_fail": float(weight_R @ self._false_fail_R), "false_pass": float(weight_R @ self._false_pass_R)}

    def _log_weight(self, counts_X4: Array) -> Array:
        result: Array = counts_X4 @ self._logs_4R + self._log_prior_R
        return result

    def _log_evidence(self, changes: int, readings: Sequence[Sequence[float]], gaps: Sequence[int]) -> float:
        """Compute the log evidence of `changes` changes between good and bad, at any positions."""
        bad_D, good_D = _counts(readings)
        fail_R, pass_R, miss_R, hit_R = self._logs_4R
        good_DR = np.outer(bad_D, fail_R) + np.outer(good_D, pass_R)
        bad_DR = np.outer(good_D, miss_R) + np.outer(bad_D, hit_R)
        side_D2R = np.stack([good_DR, bad_DR], axis=1)
        states = range(changes + 1)
        weight_ZR = np.zeros((changes + 1, len(self._log_prior_R)))
        weight_ZR[0] = 1.0
        log_scale_R = self._log_prior_R.copy()
        for index, gap in enumerate(gaps):
            # Number of ways to place the changes from one state to another in the gap.
            ways_ZZ = [[comb(gap, to - start) if to >= start else 0 for start in states] for to in states]
            weight_ZR = np.array(ways_ZZ, dtype=float) @ weight_ZR
            if index < len(readings):
                largest_R = side_D2R[index].max(axis=0)
                weight_ZR *= np.exp(side_D2R[index] - largest_R)[[state % 2 for state in states]]
                log_scale_R += largest_R
            scale_R = weight_ZR.max(axis=0)
            weight_ZR /= scale_R
            log_scale_R += np.log(scale_R)
        with np.errstate(divide="ignore"):
            log_evidence_R = log_scale_R + np.log(weight_ZR[-1])
        ways = comb(sum(gaps), changes)
        return float(np.logaddexp.reduce(log_evidence_R) - np.log(ways)) if ways else -np.inf


class Believed(PassFail):
    """The likelihood of a command that is never flaky. Every run is believed, so the search is plain halving."""

    believes = True
    end_runs = 1
    refusal_runs = 1

    def __init__(self) -> None:
        self._weigh(np.ones(1), np.full(1, CERTAIN), np.full(1, CERTAIN))


def _counts(readings: Sequence[Sequence[float]]) -> tuple[Array, Array]:
    """Count the failures and the passes of each commit."""
    bad_D = np.array([sum(values) for values in readings], dtype=float)
    return bad_D, np.array([len(values) for values in readings], dtype=float) - bad_D


def _prior() -> tuple[Array, Array, Array]:
    """Return the weight, the false-fail rate and the false-pass rate of every grid point of nonzero weight."""
    rate_L = np.array(LEVELS)
    edges = np.concatenate([[0.004], (rate_L[1:-1] + rate_L[2:]) / 2, [0.85]])
    width_L = np.diff(edges)  # Widths of the levels above the first.
    one_way_L = width_L * np.exp(-ONE_WAY_DECAY * rate_L[1:])
    alike_L = np.where(rate_L[1:] < LARGEST_ALIKE, width_L * np.exp(ALIKE_GROWTH * rate_L[1:]), 0.0)
    anyhow_LL = np.outer(width_L, width_L) * (rate_L[1:, None] + rate_L[1:] < LARGEST_SUM)
    weight_LL = np.zeros((len(rate_L), len(rate_L)))
    weight_LL[0, 0] = NEVER
    weight_LL[1:, 0] = FALSE_FAIL_ONLY * one_way_L / one_way_L.sum()
    weight_LL[0, 1:] = FALSE_PASS_ONLY * one_way_L / one_way_L.sum()
    weight_LL[1:, 1:] = ANYHOW * anyhow_LL / anyhow_LL.sum() + np.diag(BOTH_ALIKE * alike_L / alike_L.sum())
    fail_G, pass_G = np.nonzero(weight_LL)
    return weight_LL[fail_G, pass_G], rate_L[fail_G], rate_L[pass_G]
