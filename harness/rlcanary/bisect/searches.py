"""Which search a request asks for, and how often its ends run."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from rlcanary.bisect.bayesian import Bayesian
from rlcanary.bisect.git import Commit, Repository
from rlcanary.bisect.levels import Levels
from rlcanary.bisect.likelihood import Likelihood
from rlcanary.bisect.outcomes import Outcome
from rlcanary.bisect.past_runs import past_runs
from rlcanary.bisect.plan import Request
from rlcanary.bisect.rates import Believed, PassFail


@dataclass
class Stage:
    """A search over one line of commits: that of the first parents, then those inside guilty merges.

    GOOD and BAD of a command that passes and fails run once at first, for most commands never flake. They run as often as
    the likelihood wants as soon as two runs contradict each other, and before a culprit is named that rests on a single run
    of an end: BAD itself, or the first commit after GOOD.
    """

    good: Commit
    good_name: str
    commits: tuple[Commit, ...]
    search: Bayesian
    _likelihood: Likelihood
    _wanted_end_runs: int
    _results: dict[int, set[Outcome]] = field(default_factory=dict)

    @property
    def bad(self) -> Commit:
        return self.commits[-1]

    def record(self, sha: str, outcome: Outcome, value: float | None) -> None:
        """Raises Contradiction where every run is believed."""
        self.search.record(sha, outcome, value)
        position = next((i for i, commit in enumerate(self.commits) if commit.sha == sha), -1)
        self._results.setdefault(position, set()).add(outcome)
        if self._contradicts:
            self._likelihood.end_runs = self._wanted_end_runs

    def wants_ends_confirmed(self) -> bool:
        """Whether the search is to go on after all, because its result rests on one run of an end."""
        if self._likelihood.end_runs >= self._wanted_end_runs or len(self.commits) < 3:
            return False
        culprit = self.search.result().culprit
        if culprit not in (self.commits[0].sha, self.bad.sha):
            return False
        self._likelihood.end_runs = self._wanted_end_runs
        return True

    @property
    def _contradicts(self) -> bool:
        """Whether a commit passed and failed, or failed before one that passed."""
        bad = [position for position, outcomes in self._results.items() if Outcome.BAD in outcomes]
        good = [position for position, outcomes in self._results.items() if Outcome.GOOD in outcomes]
        return bool(bad and good) and min(bad) <= max(good)


def make_stage(
    request: Request,
    repository: Repository,
    good: Commit,
    good_name: str,
    commits: Sequence[Commit],
    trusted: Collection[str] = (),
) -> Stage:
    """`trusted`: the SHAs of the ends that need no run."""
    likelihood: Likelihood
    if request.metric is not None:
        likelihood = Levels(1 if request.worse == "higher" else -1)
    elif request.deterministic:
        likelihood = Believed()
    else:
        likelihood = PassFail(past_runs(request.command, repository, good.sha, commits[-1].sha))
    wanted = likelihood.end_runs
    if request.metric is None:
        likelihood.end_runs = 1
    names = [commit.sha for commit in commits]
    search = Bayesian(good.sha, names, likelihood, confidence=request.confidence, trusted=trusted)
    return Stage(good, good_name, tuple(commits), search, likelihood, wanted)
