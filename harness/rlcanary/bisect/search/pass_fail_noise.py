"""Flaky pass/fail runs: a false fail on a good commit, or a false pass on a bad one.

Both rates are unknown. They are summed over on a grid, with a prior for the ways in which commands are flaky: not at
all, in one direction only, equally in both (a noisy number against a threshold), or in both at different rates. A bad
commit fails more often than a good one. Besides, the outcomes of one commit may repeat, right or wrong (`SAMENESS`):
then its neighbours tell more than its own next run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import combinations_with_replacement
from math import comb, lgamma

import numpy as np
from numpy.typing import NDArray

from rlcanary.bisect.search.likelihood import Array, Prediction

LEVELS = (0.0005, 0.01, 0.03, 0.06, 0.1, 0.15, 0.2, 0.25, 0.3, 0.36, 0.42, 0.5, 0.6, 0.7, 0.8)
"""Rates on the grid. The first one stands for a command that is not flaky."""
LARGEST_ALIKE = 0.4
"""The largest rate that is equal on both sides. At 0.5 GOOD and BAD would look alike."""
LARGEST_SUM = 0.75

NEVER, FALSE_FAIL_ONLY, FALSE_PASS_ONLY, BOTH_ALIKE, ANYHOW = 0.2, 0.25, 0.23, 0.28, 0.04
"""Prior weights of the ways to be flaky."""
ONE_WAY_DECAY = 2.5
"""The decay of the prior for a command that is flaky in one direction: exp(-decay * rate)."""
ALIKE_DECAY = 4.0
"""The same for a command that is flaky equally in both directions."""
INDEPENDENT = 1e12
"""The sameness of a command whose runs of one commit are as independent as runs of different commits.

A commit's own flake rate follows a beta distribution whose mean is the command's rate and whose two parameters add up
to the sameness. The smaller the sameness, the more often a commit repeats its outcomes, right or wrong.
"""
SAMENESS = ((0.28, 0.02, 18.0), (0.08, 4.0, 8.0))
"""Models in which wrong outcomes repeat: prior weight, sameness, and the decay of the prior over the rate.

With a sameness of 0.02 a commit gives the same outcome on nearly every run, as under a fixed seed, and the rate is the
share of commits whose outcome is wrong. With 4 the flake rate differs between commits.
"""
USUAL_CONFIDENCE = 0.95
"""The highest confidence at which the models of `SAMENESS` have their whole weight."""
USUAL_COMMITS = 100
"""The least number of commits with which they have it."""
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
    """The likelihood of passes and failures with unknown flake rates.

    A `history` narrows the rates down. Runs cannot exclude repeated lies to any wanted `confidence`, nor among few
    `commits`, so the prior weight of lies falls with the doubt that is left and with the number of commits.
    """

    believes = False
    reads_outcomes = True
    end_runs = 1
    refusal_runs = 4
    end_share = 0.8

    def __init__(
        self, history: History | None = None, confidence: float = USUAL_CONFIDENCE, commits: int = USUAL_COMMITS
    ) -> None:
        doubt = min(1.0, (1 - confidence) / (1 - USUAL_CONFIDENCE))
        self._weigh(*_prior(doubt * min(1.0, commits / USUAL_COMMITS)))
        if history is not None:
            self._log_prior_R = self._log_weight(history.counts_4)
            self._log_prior_R -= np.logaddexp.reduce(self._log_prior_R)

    def _weigh(self, weight_R: Array, false_fail_R: Array, false_pass_R: Array, same_R: Array) -> None:
        self._false_fail_R, self._false_pass_R, self._same_R = false_fail_R, false_pass_R, same_R
        self._log_prior_R = np.log(weight_R)
        self._logs_4R = np.log(np.stack([false_fail_R, 1 - false_fail_R, false_pass_R, 1 - false_pass_R]))

    def predict(self, readings: Sequence[Sequence[float]], ends: tuple[bool, bool] = (False, False)) -> Prediction:
        bad_D, good_D = _counts(readings)
        log_weight_SR = self._log_weights(readings)
        # An end that gives the same answer each time is what it is called: it does not lie.
        for place, is_end in zip((0, -1), ends, strict=True):
            if is_end:
                log_weight_SR[place, self._same_R < INDEPENDENT] = -np.inf
        largest_S = log_weight_SR.max(axis=1, keepdims=True)
        weight_SR = np.exp(log_weight_SR - largest_S)
        evidence_S = weight_SR.sum(axis=1)
        weight_SR /= evidence_S[:, None]
        fail_S = weight_SR @ self._false_fail_R
        pass_S = weight_SR @ self._false_pass_R
        chances_S2K = np.stack([np.stack([1 - fail_S, fail_S], axis=1), np.stack([pass_S, 1 - pass_S], axis=1)], axis=1)
        size_R1 = self._same_R[:, None]
        total_RD = size_R1 + bad_D + good_D
        on_good_SD = weight_SR @ ((size_R1 * self._false_fail_R[:, None] + bad_D) / total_RD)
        on_bad_SD = weight_SR @ ((size_R1 * (1 - self._false_pass_R[:, None]) + bad_D) / total_RD)
        is_good_SD = np.arange(len(readings) + 1)[:, None] > np.arange(len(readings))
        again_SD = np.where(is_good_SD, on_good_SD, on_bad_SD)
        fails, passes = float(bad_D.sum()), float(good_D.sum())
        # If all commits are alike, every failure rate is equally likely.
        log_evidence_alike = lgamma(fails + 1) + lgamma(passes + 1) - lgamma(fails + passes + 2)
        fail = (fails + 1) / (fails + passes + 2)
        return Prediction(
            largest_S[:, 0] + np.log(evidence_S),
            chances_S2K,
            log_evidence_alike,
            np.array([1 - fail, fail]),
            np.stack([1 - again_SD, again_SD], axis=2),
            weight_SR[:, self._same_R < INDEPENDENT].sum(axis=1),
        )

    def _log_weights(self, readings: Sequence[Sequence[float]]) -> Array:
        """Compute the log probability of each position and grid point, with all readings."""
        good_DR, bad_DR = self._log_sides(readings)
        zero_1R = np.zeros((1, len(self._log_prior_R)))
        before_SR = np.concatenate([zero_1R, np.cumsum(good_DR, axis=0)])
        after_SR = np.concatenate([zero_1R, np.cumsum(bad_DR[::-1], axis=0)])[::-1]
        result: Array = before_SR + after_SR + self._log_prior_R
        return result

    def _log_sides(self, readings: Sequence[Sequence[float]]) -> tuple[Array, Array]:
        """Compute the log probability of each commit's readings if it is good, and if it is bad."""
        bad_D, good_D = (counts_D.astype(int) for counts_D in _counts(readings))
        most = int((bad_D + good_D).max(initial=0))

        def log_rising(start_R: Array, count_D: NDArray[np.int64]) -> Array:
            """Compute log(start (start + 1) ... (start + count - 1))."""
            log_CR = np.log(start_R + np.arange(most)[:, None])
            sums_CR: Array = np.concatenate([np.zeros((1, len(start_R))), np.cumsum(log_CR, axis=0)])
            return sums_CR[count_D]

        size_R = self._same_R
        total_DR = log_rising(size_R, bad_D + good_D)
        good_DR = log_rising(size_R * self._false_fail_R, bad_D) + log_rising(size_R * (1 - self._false_fail_R), good_D)
        bad_DR = log_rising(size_R * self._false_pass_R, good_D) + log_rising(size_R * (1 - self._false_pass_R), bad_D)
        return good_DR - total_DR, bad_DR - total_DR

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
        ways = comb(sum(gaps), changes)
        if not ways:
            return -np.inf
        side_D2R = np.stack(self._log_sides(readings), axis=1)
        largest_DR = side_D2R.max(axis=1)
        side_D2R = np.exp(side_D2R - largest_DR[:, None])
        states = np.arange(changes + 1)
        # Number of ways to place the changes from one state to another in a gap.
        ways_GZZ = np.zeros((len(gaps), changes + 1, changes + 1))
        for start, to in combinations_with_replacement(range(changes + 1), 2):
            ways_GZZ[:, to, start] = [comb(gap, to - start) for gap in gaps]
        weight_ZR = np.zeros((changes + 1, len(self._log_prior_R)))
        weight_ZR[0] = 1.0
        log_scale_R = self._log_prior_R + largest_DR.sum(axis=0)
        for index, ways_ZZ in enumerate(ways_GZZ):
            weight_ZR = ways_ZZ @ weight_ZR
            if index < len(readings):
                weight_ZR *= side_D2R[index, states % 2]
            scale_R = np.maximum(weight_ZR.max(axis=0), 1e-300)
            weight_ZR /= scale_R
            log_scale_R += np.log(scale_R)
        with np.errstate(divide="ignore"):
            log_evidence_R = log_scale_R + np.log(weight_ZR[-1])
        return float(np.logaddexp.reduce(log_evidence_R) - np.log(ways))


class Believed(PassFail):
    """The likelihood of a command that is never flaky. Every run is believed, so the search is plain halving."""

    believes = True
    end_runs = 1
    refusal_runs = 1

    def __init__(self) -> None:
        self._weigh(np.ones(1), np.full(1, CERTAIN), np.full(1, CERTAIN), np.full(1, INDEPENDENT))


def _counts(readings: Sequence[Sequence[float]]) -> tuple[Array, Array]:
    """Count the failures and the passes of each commit."""
    bad_D = np.array([sum(values) for values in readings], dtype=float)
    return bad_D, np.array([len(values) for values in readings], dtype=float) - bad_D


def _prior(part: float) -> tuple[Array, Array, Array, Array]:
    """Return weight, false-fail rate, false-pass rate and sameness of every grid point of nonzero weight.

    The models in which outcomes repeat have this `part` of their usual weight.
    """
    rate_L = np.array(LEVELS)
    edges = np.concatenate([[0.004], (rate_L[1:-1] + rate_L[2:]) / 2, [0.85]])
    width_L = np.diff(edges)  # Widths of the levels above the first.
    one_way_L = width_L * np.exp(-ONE_WAY_DECAY * rate_L[1:])
    alike_L = np.where(rate_L[1:] < LARGEST_ALIKE, width_L * np.exp(-ALIKE_DECAY * rate_L[1:]), 0.0)
    anyhow_LL = np.outer(width_L, width_L) * (rate_L[1:, None] + rate_L[1:] < LARGEST_SUM)
    weight_LL = np.zeros((len(rate_L), len(rate_L)))
    weight_LL[0, 0] = NEVER
    weight_LL[1:, 0] = FALSE_FAIL_ONLY * one_way_L / one_way_L.sum()
    weight_LL[0, 1:] = FALSE_PASS_ONLY * one_way_L / one_way_L.sum()
    weight_LL[1:, 1:] = ANYHOW * anyhow_LL / anyhow_LL.sum() + np.diag(BOTH_ALIKE * alike_L / alike_L.sum())
    fail_G, pass_G = np.nonzero(weight_LL)
    independent = 1 - part * sum(weight for weight, _, _ in SAMENESS)
    weight_G = independent * weight_LL[fail_G, pass_G]
    parts = [(weight_G, rate_L[fail_G], rate_L[pass_G], np.full(len(fail_G), INDEPENDENT))]
    rate_M = rate_L[1:][rate_L[1:] < LARGEST_ALIKE]
    for weight, sameness, decay in SAMENESS:
        share_M = width_L[: len(rate_M)] * np.exp(-decay * rate_M)
        share_M *= part * weight / share_M.sum()
        parts.append((share_M, rate_M, rate_M, np.full(len(rate_M), sameness)))
    weight_R, fail_R, pass_R, same_R = (np.concatenate(column) for column in zip(*parts, strict=True))
    return weight_R, fail_R, pass_R, same_R
