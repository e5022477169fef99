"""Bayesian search for the commit that broke a command or moved a metric, on runs that may be flaky.

The next run goes to the commit with the largest expected information about the culprit. The noise is estimated from
the same runs (pass_fail_noise.py, metric_noise.py). While no run contradicts another, the search is plain halving.
"""

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from itertools import combinations

import numpy as np

from rlcanary.bisect.search.ends import Ends
from rlcanary.bisect.search.information import entropy, information
from rlcanary.bisect.search.likelihood import BAD, GOOD, Array, Likelihood, Prediction
from rlcanary.bisect.search.two_steps import PRIOR, TwoSteps, two_steps
from rlcanary.bisect.search.untestable import chance_testable
from rlcanary.bisect.search.verdict import Refusal, Step, Verdict, check_contradiction
from rlcanary.jobs.outcomes import Outcome

CONFIDENCE = 0.95
CERTAINTY = 1 - 1e-6
"""The confidence of a search that believes every run."""
HALVING_SHARE = 0.9
"""The middle commit is chosen while no runs contradict and its information is at least this share of the best."""
READY_SHARE = 0.35
"""A commit with a built environment is preferred if its information is at least this share of the best.

A build often takes longer than a run.
"""
WORTHLESS_SHARE = 0.05
"""A running probe below this share of the best information is cancelled."""
LEAST_INFORMATION = 1e-6
"""The least information, in bits, for which a run is started."""
FUTILE = 0.005
"""The information, in bits, of the best run below which suspects are not told apart. Less at a high confidence."""
RELAPSE_ODDS = 20.0
"""The odds of several breakages against one above which the result names a relapse."""
HOPELESS_ODDS = 1000.0
"""The odds of several breakages against one above which the search stops, since it looks for a single culprit."""


class Bayesian:
    """A search over a line of commits, with any number of runs at a time.

    The caller starts the commits from `next_commits`, calls `record` when a run ends, cancels those in `worthless`, and
    asks again. The search is over when `next_commits` is empty and nothing runs. The outcome is then `refusal`, or else
    `result`.

    GOOD and BAD are ordinary commits here. They come first from `next_commits`, as often as the noise requires. The
    order of records does not matter, so a search is resumed by recording its whole journal, repeated runs included.

    The likelihood models the runs:
    - `Believed()`: every run is right. Plain halving, each end once. Contradicting records raise Contradiction.
    - `PassFail(history)`: runs pass or fail, sometimes by chance, at estimated rates.
    - `Levels(worse)`: runs measure a metric, and its value is recorded.
    """

    def __init__(
        self,
        good: str,
        commits: Sequence[str],
        likelihood: Likelihood,
        *,
        confidence: float = CONFIDENCE,
        confidence_of: Mapping[str, float] | None = None,
        trusted: Collection[str] = (),
        may_be_good: bool = False,
    ) -> None:
        """Set up the search.

        Args:
            good: The parent of the first commit.
            commits: Oldest first. The last one is BAD.
            likelihood: The model of the runs.
            confidence: The probability of the culprit at which the search stops, in (0, 1).
            confidence_of: Overrides `confidence` for some commits.
            trusted: The ends that need no run.
            may_be_good: Nobody called BAD bad: that it is good is as likely as each commit.
        """
        self._commits = tuple(commits)
        self._bad = self._commits[-1]
        self._position = {sha: index for index, sha in enumerate(commits)} | {good: -1}
        self._likelihood = likelihood
        self._confidence = CERTAINTY if likelihood.believes else confidence
        self._confidence_of = {} if likelihood.believes else dict(confidence_of or {})
        self._end_of = {good: GOOD, self._bad: BAD}
        self._commit_of_end = {GOOD: good, BAD: self._bad}
        self._ends = Ends(likelihood, [self._end_of[sha] for sha in trusted])
        self._log_prior_H, self._log_prior_alike = self._ends.log_prior(len(commits), may_be_good=may_be_good)
        self._readings: dict[int, list[float]] = {}
        self._untestable: set[int] = set()
        self._inferred = False

    def record(self, commit: str, outcome: Outcome, value: float | None = None) -> None:
        """Add a finished run: good, bad, untestable or measured.

        Args:
            commit: The SHA of the commit that ran.
            outcome: The outcome of the run.
            value: The metric's value, in a search for a metric.

        Raises:
            KeyError: The commit is outside the range.
            ValueError: The outcome is no evidence.
            Contradiction: Every run is believed, and this one contradicts an earlier one.
        """
        position = self._position[commit]
        if outcome is Outcome.UNTESTABLE:
            self._untestable.add(position)
            if commit in self._end_of:
                self._ends.record_untestable(self._end_of[commit])
        else:
            reading = self._reading(outcome, value)
            if self._likelihood.believes:
                check_contradiction(self._readings, self._position, position, reading)
            self._readings.setdefault(position, []).append(reading)
            if commit in self._end_of:
                self._ends.record(self._end_of[commit], reading)
        self._inferred = False

    def next_commits(self, count: int, running: Sequence[str] = (), ready: Collection[str] = ()) -> list[str]:
        """Choose up to `count` commits to start now.

        A commit may be chosen again, even twice at once, if the noise requires it. Fewer than `count` are returned if
        more runs would add nothing to the running ones.

        Args:
            count: The largest number of commits.
            running: The commits that run now, repeated if a commit runs twice.
            ready: Commits with a built environment. They are preferred among commits of similar information.
        """
        self._infer()
        chosen: list[str] = []
        while len(chosen) < count:
            commit = self._next([*running, *chosen], ready)
            if commit is None:
                break
            chosen.append(commit)
        return chosen

    def worthless(self, running: Sequence[str]) -> list[str]:
        """Select the running commits whose outcome no longer matters."""
        self._infer()
        if self._is_over:
            return list(running)
        information_C = self._information_alone
        enough = WORTHLESS_SHARE * float((information_C * self._chance_C).max())
        return [sha for sha in running if sha not in self._end_of and information_C[self._candidate(sha)] < enough]

    @property
    def refusal(self) -> Refusal | None:
        """The reason why the search cannot start from these ends, or None."""
        self._infer()
        if (by_their_runs := self._ends.refusal) is not None:
            return by_their_runs
        doubts = {
            Refusal.GOOD_FAILS: self._belief_H[0],
            Refusal.BAD_PASSES: self._belief_H[-1],
            Refusal.ALIKE: self._alike,
        }
        if sum(doubts.values()) < self._confidence:
            return None
        return self._ends.mostly_wrong or max(doubts, key=lambda refusal: doubts[refusal])

    def result(self) -> Verdict:
        """Return the culprit, or the fewest commits that hold the requested probability. May be called at any time."""
        self._infer()
        posterior = dict(zip(self._commits, self._posterior_N.tolist(), strict=True))
        found = [self._suspects(mass_N) for mass_N in self._masses]
        suspects = tuple(sha for sha in self._commits if any(sha in some for some, _ in found))
        probability = min(probability for _, probability in found)
        if self._two is None or len(found) == 1:
            return Verdict(suspects, probability, posterior, self._estimate(), self._relapse)
        rates = self._two.failures_3[1:].tolist()
        steps = tuple(Step(*one, rate) for one, rate in zip(found, rates, strict=True))
        return Verdict(suspects, probability, posterior, {}, self._relapse, steps)

    def _suspects(self, mass_N: Array) -> tuple[tuple[str, ...], float]:
        """Return the fewest commits that hold enough of `mass_N`, and the probability that one breaks the command."""
        member_N = self._group_N == self._likeliest_group(mass_N)
        if self._posterior_N[member_N].sum() < self._demanded(mass_N):
            order = np.argsort(-mass_N, kind="stable")
            held_N = np.cumsum(mass_N[order])
            count = int(np.searchsorted(held_N, self._confidence_of_set * held_N[-1])) + 1
            member_N = np.zeros(len(order), dtype=bool)
            member_N[order[:count]] = True
        suspects = tuple(self._commits[index] for index in np.flatnonzero(member_N))
        return suspects, min(1.0, float(self._posterior_N[member_N].sum()))

    def sides(self, culprit: str, without: Collection[str] = ()) -> tuple[list[float], list[float]]:
        """Return the readings before the culprit, and from the culprit on. Commits in `without` are left out."""
        left_out = {self._position[sha] for sha in without if sha in self._position}
        sides: tuple[list[float], list[float]] = ([], [])
        for index, values in self._readings.items():
            if index not in left_out:
                sides[index >= self._position[culprit]].extend(values)
        return sides

    def tests_left(self) -> int:
        """Estimate how many more runs the search takes. 0 when it is over.

        Until two runs contradict each other, the estimate assumes that none will and that the median is the culprit.
        """
        self._infer()
        if self._is_over:
            return 0
        good, bad = self._bounds
        if self._likelihood.reads_outcomes and good < bad:
            return self._tests_without_surprise()
        information = float((self._information_alone * self._chance_C).max())
        if information <= LEAST_INFORMATION:
            return 0
        unknown = float(entropy(self._posterior_N))
        doubt = -float(np.log2(1 - self._confidence))
        runs = (unknown + doubt / 4) / information
        return max(1, int(np.ceil(runs - 1e-6))) + self._ends.runs_left

    def _tests_without_surprise(self) -> int:
        search, count = deepcopy(self), 0
        culprit = int(np.searchsorted(np.cumsum(self._posterior_N), self._posterior_N.sum() / 2))
        while chosen := search.next_commits(1):
            search.record(chosen[0], Outcome.BAD if self._position[chosen[0]] >= culprit else Outcome.GOOD)
            count += 1
        return count

    def _reading(self, outcome: Outcome, value: float | None) -> float:
        if self._likelihood.reads_outcomes and outcome in (Outcome.GOOD, Outcome.BAD):
            return BAD if outcome is Outcome.BAD else GOOD
        if not self._likelihood.reads_outcomes and value is not None and np.isfinite(value):
            return value
        raise ValueError(f"{outcome} with the value {value} is no evidence about a commit")

    @property
    def _is_over(self) -> bool:
        if self.refusal is not None:
            return True
        settled = self._is_certain_enough or self._relapse_odds >= HOPELESS_ODDS or self._is_futile
        return settled and self._ends.next_end() is None

    def _next(self, running: Sequence[str], ready: Collection[str]) -> str | None:
        if self._is_over:
            return None
        end = self._ends.next_end([self._end_of[sha] for sha in running if sha in self._end_of])
        if end is not None:
            return self._commit_of_end[end]
        information_C = (
            self._information([self._candidate(sha) for sha in running]) if running else self._information_alone
        )
        worth_C = information_C * self._chance_C
        best = int(worth_C.argmax())
        if worth_C[best] <= LEAST_INFORMATION:
            return None
        choice, middle = best, self._middle
        end = max((0, len(self._commits)), key=lambda candidate: float(worth_C[candidate]))
        if not running and middle is not None and worth_C[middle] >= HALVING_SHARE * worth_C[best]:
            choice = middle
        elif not running and worth_C[end] >= self._likelihood.end_share * worth_C[best]:
            choice = end
        if ready and self._sha(choice) not in ready:
            enough = READY_SHARE * worth_C[best]
            near = [self._candidate(sha) for sha in ready if sha in self._position]
            near = [candidate for candidate in near if worth_C[candidate] >= enough]
            choice = max(near, key=lambda candidate: float(worth_C[candidate]), default=choice)
        return self._sha(choice)

    def _candidate(self, sha: str) -> int:
        """Return the index of a commit among those that can run. GOOD has index 0."""
        return self._position[sha] + 1

    def _sha(self, candidate: int) -> str:
        return self._commits[candidate - 1] if candidate else self._commit_of_end[GOOD]

    def _infer(self) -> None:
        if self._inferred:
            return
        tested = sorted(self._readings)
        readings = [self._readings[index] for index in tested]
        count = len(self._commits)
        ends = -1 in self._readings, count - 1 in self._readings
        self._prediction: Prediction = self._likelihood.predict(readings, ends)
        self._place_H = np.searchsorted(np.array(tested, dtype=int), np.arange(-1, count + 1))
        log_weight_H = self._prediction.log_evidence_S[self._place_H] + self._log_prior_H
        log_alike = self._prediction.log_evidence_alike + self._log_prior_alike
        largest = max(log_weight_H.max(), log_alike)
        weight_H, alike = np.exp(log_weight_H - largest), float(np.exp(log_alike - largest))
        total = float(weight_H.sum()) + alike
        self._two = self._two_steps(largest + float(np.log(total)))
        chance_of_two = 0.0 if self._two is None else self._two.chance
        self._belief_H: Array = (1 - chance_of_two) * weight_H / total
        self._alike = (1 - chance_of_two) * alike / total
        self._single_N: Array = self._belief_H[1:-1]
        self._posterior_N: Array = self._single_N
        self._masses = [self._posterior_N]
        if self._two is not None:
            self._posterior_N = self._single_N + chance_of_two * self._two.chance_2N.sum(axis=0)
            self._masses = list(self._two.chance_2N) if chance_of_two > 0.5 else [self._posterior_N]
        chance_N = chance_testable(count, tested, self._untestable)
        # Commits that no run can separate are found together.
        separates_N = chance_N > 0
        separates_N[[index for index in tested if index >= 0]] = True
        self._group_N = np.concatenate([[0], np.cumsum(separates_N[:-1])])
        groups = [self._likeliest_group(mass_N) for mass_N in self._masses]
        self._is_certain_enough = len(set(groups)) == len(groups) and all(
            self._posterior_N[self._group_N == group].sum() >= self._demanded(mass_N)
            for group, mass_N in zip(groups, self._masses, strict=True)
        )
        self._chance_C = np.concatenate([[float(GOOD in self._ends.asked)], chance_N])
        self._chance_C[-1] *= BAD in self._ends.asked
        gaps = np.bincount(self._place_H[1:-1], minlength=len(tested) + 1)
        log_odds = self._likelihood.log_odds_relapse(readings, gaps.tolist())
        self._relapse_odds = (1 - chance_of_two) * float(np.exp(min(log_odds, 50.0)))
        again_SDK = self._prediction.chances_again_SDK
        self._alone_C: Array | None = None
        self._again: dict[int, Array] = {}
        if again_SDK is not None:
            self._again = {index + 1: again_SDK[self._place_H, order] for order, index in enumerate(tested)}
        self._inferred = True

    @property
    def _is_futile(self) -> bool:
        """Whether the suspects cannot be told apart: wrong outcomes repeat, so that no run tells much more."""
        if len(self._masses) > 1:
            return self._tells_little
        if self._prediction.repeats_S is None:
            return False
        inside, likeliest = float(self._single_N.sum()), float(self._single_N.max())
        repeats_N = self._prediction.repeats_S[self._place_H][1:-1]
        repeats = float((self._single_N * repeats_N).sum() - likeliest * repeats_N[self._single_N.argmax()])
        if 2 * repeats < inside - likeliest or inside * self._confidence_of_set < self._confidence:
            return False
        return self._tells_little

    @property
    def _tells_little(self) -> bool:
        enough = FUTILE * min(1.0, (1 - self._demanded(self._posterior_N)) / (1 - CONFIDENCE))
        return float((self._information_alone * self._chance_C).max()) < enough

    @property
    def _confidence_of_set(self) -> float:
        """The probability of several suspects: a third of the doubt, since that costs no run."""
        return 1 - (1 - self._confidence) / 3

    def _likeliest_group(self, mass_N: Array) -> int:
        return int(np.bincount(self._group_N, weights=mass_N).argmax())

    def _demanded(self, mass_N: Array) -> float:
        """The confidence at which the commit of the most `mass_N` is named."""
        return self._confidence_of.get(self._commits[int(mass_N.argmax())], self._confidence)

    @property
    def _relapse(self) -> tuple[str, str] | None:
        """The bad commit and the later good commit that are best supported by the readings."""
        if self._relapse_odds < RELAPSE_ODDS:
            return None
        badness = {index: self._likelihood.badness(values) for index, values in self._readings.items()}
        inner = sorted(index for index in badness if 0 <= index < len(self._commits) - 1)
        bad, good = max(combinations(inner, 2), key=lambda pair: badness[pair[0]] - badness[pair[1]])
        return self._commits[bad], self._commits[good]

    def _estimate(self) -> dict[str, float]:
        return dict(self._likelihood.estimate(*self.sides(self._commits[int(self._posterior_N.argmax())])))

    @property
    def _middle(self) -> int | None:
        """The candidate of plain halving.

        None for a metric, with untestable commits, or once runs contradict each other.
        """
        if self._untestable or not self._likelihood.reads_outcomes:
            return None
        good, bad = self._bounds
        return (good + bad) // 2 + 1 if bad - good > 1 else None

    @property
    def _bounds(self) -> tuple[int, int]:
        """The newest commit that was good, and the oldest that was bad."""
        good = max((index for index, values in self._readings.items() if GOOD in values), default=-1)
        bad = min((index for index, values in self._readings.items() if BAD in values), default=len(self._commits) - 1)
        return good, bad

    @property
    def _information_alone(self) -> Array:
        self._alone_C = self._information([]) if self._alone_C is None else self._alone_C
        return self._alone_C

    def _two_steps(self, log_evidence: float) -> TwoSteps | None:
        if self._likelihood.believes or not self._likelihood.reads_outcomes:
            return None
        prior = PRIOR * min(1.0, (1 - self._confidence) / (1 - CONFIDENCE))
        return two_steps(self._readings, len(self._commits), log_evidence, prior)

    def _information(self, running: Sequence[int]) -> Array:
        chances_H2K = self._prediction.chances_S2K[self._place_H]
        belief_Z = np.append(self._belief_H, self._alike)
        apart = None if self._two is None else self._two.apart()
        return information(belief_Z, chances_H2K, self._prediction.chances_alike_K, running, self._again, apart)
