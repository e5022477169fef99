"""The search for the commit that broke a command, or moved a metric, whose runs may lie: Bayesian inference over its place.

Every commit is the culprit with some probability. The next run goes where its outcome is expected to tell most about which
one it is; the noise is learned from the same runs (rates.py, levels.py). While no run contradicts another this is halving.
"""

from collections.abc import Collection, Sequence

import numpy as np

from rlcanary.bisect.ends import Ends
from rlcanary.bisect.likelihood import BAD, GOOD, Array, Likelihood, Prediction
from rlcanary.bisect.outcomes import Outcome
from rlcanary.bisect.search import Contradiction, Refusal, Verdict
from rlcanary.bisect.untestable import chance_testable

CONFIDENCE = 0.95
HALVING_SHARE = 0.9
"""The middle is taken while nothing contradicts and its information is this share of the best."""
READY_SHARE = 0.7
"""A commit whose environment is built is taken where its information is this share of the best."""
WORTHLESS_SHARE = 0.05
"""A run under way is not worth waiting for below this share of the best information."""
LEAST_INFORMATION = 1e-6
"""Bits; a run that tells less is not started."""
SCENARIOS = 16
"""How many joint outcomes of the runs under way are looked at."""
RELAPSE_ODDS = 1000.0
"""The history breaks more than once, at these odds against once."""


class Bayesian:
    """A search over a line of commits, with any number of runs at a time.

    The caller loops: start what `next_commits` names; when a run ends, `record` it, end those that `worthless` names, ask
    again. The search is over when `next_commits` names none and nothing runs; then `refusal` or else `result` is what it
    came to. GOOD and BAD, the ends, are commits like others here: they come from `next_commits` first, as often as the
    noise asks, and go to `record`. The order and the time of the records do not matter, so a journal is taken up by
    recording all of it, every run of a commit that ran more than once.

    The likelihood says what runs are like:
    - `Believed()`: no run ever lies. Plain halving, each end once; records that contradict each other raise Contradiction.
    - `PassFail(history)`: runs pass and fail, and sometimes by chance, at rates that are learned.
    - `Levels(worse)`: runs measure a metric, and its value is recorded.
    """

    def __init__(
        self,
        good: str,
        commits: Sequence[str],
        likelihood: Likelihood,
        *,
        confidence: float = CONFIDENCE,
        trusted: Collection[str] = (),
    ) -> None:
        """`commits`: oldest first; `good` is the parent of the first, the last one is BAD.

        `confidence`: the probability of the culprit at which the search stops, in (0, 1).
        `trusted`: those of the two ends that need not be run.
        """
        self._commits = tuple(commits)
        self._bad = self._commits[-1]
        self._position = {sha: index for index, sha in enumerate(commits)} | {good: -1}
        self._likelihood = likelihood
        self._confidence = confidence
        self._end_of = {good: GOOD, self._bad: BAD}
        self._commit_of_end = {GOOD: good, BAD: self._bad}
        self._ends = Ends(likelihood, [self._end_of[sha] for sha in trusted])
        self._readings: dict[int, list[float]] = {}
        self._untestable: set[int] = set()
        self._inferred = False

    def record(self, commit: str, outcome: Outcome, value: float | None = None) -> None:
        """Take in a finished run: good, bad or untestable. Where the search is for a metric, `value` is the metric's, in
        place of good and bad.

        Raises KeyError for a commit outside the range, ValueError for an outcome that is no evidence, Contradiction where
        every run is believed and this one cannot be true together with the others.
        """
        position = self._position[commit]
        if outcome is Outcome.UNTESTABLE:
            self._untestable.add(position)
            if commit in self._end_of:
                self._ends.record_untestable(self._end_of[commit])
        else:
            reading = self._reading(outcome, value)
            if self._likelihood.believes:
                self._check_contradiction(position, reading)
            self._readings.setdefault(position, []).append(reading)
            if commit in self._end_of:
                self._ends.record(self._end_of[commit], reading)
        self._inferred = False

    def next_commits(self, count: int, running: Sequence[str] = (), ready: Collection[str] = ()) -> list[str]:
        """Up to `count` commits to start now, while those in `running` run (a commit that runs twice is named twice).

        A commit comes again, even twice at once, where the noise asks for it. Fewer than `count` come, or none, where more
        runs would add nothing to those under way. Among commits that tell nearly as much, those in `ready` come first: the
        ones whose environment is built.
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
        """Those of the runs under way whose outcome no longer matters."""
        self._infer()
        if self._is_over:
            return list(running)
        information_N = self._information([])
        enough = WORTHLESS_SHARE * float((information_N * self._chance_N).max())
        inner = [sha for sha in running if sha not in self._end_of]
        return [sha for sha in inner if information_N[self._position[sha]] < enough]

    @property
    def refusal(self) -> Refusal | None:
        """Why the search cannot start from these ends; None while nothing speaks against them."""
        return self._ends.refusal

    def result(self) -> Verdict:
        """The culprit, or as few commits as hold the demanded probability. May be asked at any time."""
        self._infer()
        if self._is_certain_enough:
            member_N = self._group_N == self._likeliest_group
        else:
            order = np.argsort(-self._posterior_N, kind="stable")
            count = int(np.searchsorted(np.cumsum(self._posterior_N[order]), self._confidence)) + 1
            member_N = np.zeros(len(order), dtype=bool)
            member_N[order[:count]] = True
        suspects = tuple(self._commits[index] for index in np.flatnonzero(member_N))
        posterior = dict(zip(self._commits, self._posterior_N.tolist(), strict=True))
        return Verdict(suspects, float(self._posterior_N[member_N].sum()), posterior, self._estimate(), self._relapse)

    def tests_left(self) -> int:
        """About how many more runs the search takes, 0 when it is over."""
        self._infer()
        if self._is_over:
            return 0
        information = float((self._information([]) * self._chance_N).max())
        if information <= LEAST_INFORMATION:
            return 0
        unknown = float(entropy(self._posterior_N))
        if not self._likelihood.believes:
            unknown += np.log2(1 / (1 - self._confidence)) / 4
        return max(1, int(np.ceil(unknown / information - 1e-6))) + self._ends.runs_left

    def _reading(self, outcome: Outcome, value: float | None) -> float:
        if self._likelihood.reads_outcomes and outcome in (Outcome.GOOD, Outcome.BAD):
            return BAD if outcome is Outcome.BAD else GOOD
        if not self._likelihood.reads_outcomes and value is not None and np.isfinite(value):
            return value
        raise ValueError(f"{outcome} with the value {value} is no evidence about a commit")

    def _check_contradiction(self, position: int, reading: float) -> None:
        for other, readings in self._readings.items():
            if reading == GOOD and BAD in readings and other <= position:
                good, bad = position, other
            elif reading == BAD and GOOD in readings and position <= other:
                good, bad = other, position
            else:
                continue
            if good != bad and {good, bad} & {-1, len(self._commits) - 1}:
                continue  # An end that is not what it is called is refused, not contradicted.
            names = {index: sha[:10] for sha, index in self._position.items() if index in (good, bad)}
            raise Contradiction(f"{names[good]} is good, but {names[bad]} at or before it is bad")

    @property
    def _is_over(self) -> bool:
        if self.refusal is not None:
            return True
        return self._ends.is_settled and (self._is_certain_enough or self._relapse is not None)

    def _next(self, running: Sequence[str], ready: Collection[str]) -> str | None:
        if self._is_over:
            return None
        end = self._ends.next_end([self._end_of[sha] for sha in running if sha in self._end_of])
        if end is not None:
            return self._commit_of_end[end]
        if self._is_certain_enough:
            return None  # Only the ends are still to be borne out.
        worth_N = self._information(self._positions(running)) * self._chance_N
        best = int(worth_N.argmax())
        if worth_N[best] <= LEAST_INFORMATION:
            return None
        choice = best
        middle = self._middle
        if middle is not None and not running and worth_N[middle] >= HALVING_SHARE * worth_N[best]:
            choice = middle
        if ready and self._commits[choice] not in ready:
            enough = READY_SHARE * worth_N[best]
            near = [self._position[sha] for sha in ready if sha in self._position]
            near = [index for index in near if index >= 0 and worth_N[index] >= enough]
            choice = max(near, key=lambda index: float(worth_N[index]), default=choice)
        return self._commits[choice]

    def _infer(self) -> None:
        if self._inferred:
            return
        tested = sorted(self._readings)
        readings = [self._readings[index] for index in tested]
        self._prediction: Prediction = self._likelihood.predict(readings)
        count = len(self._commits)
        self._place_N = np.searchsorted(np.array(tested, dtype=int), np.arange(count))
        log_weight_N = self._prediction.log_evidence_S[self._place_N]
        weight_N = np.exp(log_weight_N - log_weight_N.max())
        self._posterior_N: Array = weight_N / weight_N.sum()
        self._chance_N = chance_testable(count, tested, self._untestable)
        # Commits that no run can tell apart are found together or not at all.
        separates_N = self._chance_N > 0
        separates_N[[index for index in tested if index >= 0]] = True
        self._group_N = np.concatenate([[0], np.cumsum(separates_N[:-1])])
        mass_G = np.bincount(self._group_N, weights=self._posterior_N)
        self._likeliest_group = int(mass_G.argmax())
        self._is_certain_enough = bool(mass_G[self._likeliest_group] >= self._confidence)
        self._relapse = self._find_relapse(tested, readings)
        self._inferred = True

    def _find_relapse(self, tested: list[int], readings: list[list[float]]) -> tuple[str, str] | None:
        if self._likelihood.believes or not self._likelihood.reads_outcomes:
            return None
        share_D = np.array([sum(values) / len(values) for values in readings])
        if not len(share_D) or np.all(np.diff(share_D) >= 0):
            return None
        gaps = np.bincount(self._place_N, minlength=len(tested) + 1)
        if self._likelihood.log_odds_relapse(readings, gaps.tolist()) < np.log(RELAPSE_ODDS):
            return None
        # The pair that the readings bear out best: Laplace's estimate of the share of failures, weighed by how far apart.
        fails_D = np.array([(sum(values) + 0.5) / (len(values) + 1) for values in readings])
        inner = [place for place, index in enumerate(tested) if 0 <= index < len(self._commits) - 1]
        pairs = [(fails_D[i] - fails_D[j], i, j) for i in inner for j in inner if i < j]
        _, bad, good = max(pairs)
        return self._commits[tested[bad]], self._commits[tested[good]]

    def _estimate(self) -> dict[str, float]:
        """Of the readings on either side of the likeliest culprit."""
        culprit = int(self._posterior_N.argmax())
        sides: tuple[list[float], list[float]] = ([], [])
        for index, values in self._readings.items():
            sides[index >= culprit].extend(values)
        return dict(self._likelihood.estimate(*sides))

    @property
    def _middle(self) -> int | None:
        """Where plain halving would go; None once runs contradict each other, or where it has no say."""
        if self._untestable or not self._likelihood.reads_outcomes:
            return None
        good = max((index for index, values in self._readings.items() if GOOD in values), default=-1)
        bad = min((index for index, values in self._readings.items() if BAD in values), default=len(self._commits) - 1)
        return (good + bad) // 2 if bad - good > 1 else None

    def _positions(self, commits: Sequence[str]) -> list[int]:
        return [index for index in (self._position[sha] for sha in commits) if index >= 0]

    def _information(self, running: Sequence[int]) -> Array:
        """Expected information in bits, about which commit is the culprit, of a run on each commit.

        With runs under way it is what the run adds to theirs: the mean over their joint outcomes.
        """
        chances_N2K = self._prediction.chances_S2K[self._place_N]
        joint_XN = self._scenarios(running, chances_N2K)
        weight_X = joint_XN.sum(axis=1)
        reading_XNK = _mixture(joint_XN, chances_N2K) / weight_X[:, None, None]
        surprise_N = weight_X @ entropy(reading_XNK)
        ambiguity_N21 = entropy(chances_N2K)[..., None]
        given_N = _mixture(joint_XN.sum(axis=0)[None], ambiguity_N21)[0, :, 0]
        information_N: Array = np.maximum(surprise_N - given_N, 0.0)
        return information_N

    def _scenarios(self, running: Sequence[int], chances_N2K: Array) -> Array:
        """Joint probability of each culprit and each outcome of the runs under way, of the likeliest outcomes."""
        joint_XN: Array = self._posterior_N[None]
        if not running:
            return joint_XN
        # What matters of a reading that is a number is which side it speaks for.
        speaks_bad_N2K = (chances_N2K[:, 1] >= chances_N2K[:, 0])[:, None]
        bad_N2 = (chances_N2K * speaks_bad_N2K).sum(axis=2)
        culprit_N = np.arange(len(self._commits))
        for index in running:
            bad_N = np.where(index >= culprit_N, bad_N2[:, 1], bad_N2[:, 0])
            joint_XN = np.concatenate([joint_XN * bad_N, joint_XN * (1 - bad_N)])
            likeliest = np.argsort(-joint_XN.sum(axis=1), kind="stable")[:SCENARIOS]
            joint_XN = joint_XN[likeliest]
        possible_XN: Array = joint_XN[joint_XN.sum(axis=1) > 0]
        return possible_XN


def entropy(chances: Array) -> Array:
    """Bits, over the last axis."""
    result: Array = -(chances * np.log2(np.maximum(chances, 1e-300))).sum(axis=-1)
    return result


def _mixture(weight_XN: Array, values_N2K: Array) -> Array:
    """For a run on each commit: its values summed over the culprits, each with its weight, on the side that it then has."""
    bad_XNK = np.cumsum(weight_XN[:, :, None] * values_N2K[:, 1], axis=1)
    good_XNK = np.cumsum(weight_XN[:, :, None] * values_N2K[:, 0], axis=1)
    result: Array = bad_XNK + good_XNK[:, -1:] - good_XNK
    return result
