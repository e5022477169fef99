"""Which search a request asks for."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rlcanary.bisect.bayesian import Bayesian
from rlcanary.bisect.git import Commit, Repository
from rlcanary.bisect.levels import Levels
from rlcanary.bisect.likelihood import Likelihood
from rlcanary.bisect.merges import Inside
from rlcanary.bisect.past_runs import past_runs
from rlcanary.bisect.plan import Request
from rlcanary.bisect.rates import Believed, PassFail


@dataclass(frozen=True)
class Stage:
    """A search over one line of commits: that of the first parents, then those inside guilty merges."""

    good: Commit
    good_name: str
    commits: tuple[Commit, ...]
    search: Bayesian

    @property
    def bad(self) -> Commit:
        return self.commits[-1]


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
    names = [commit.sha for commit in commits]
    search = Bayesian(good.sha, names, likelihood, confidence=request.confidence, trusted=trusted)
    return Stage(good, good_name, tuple(commits), search)


def make_stage_inside(request: Request, repository: Repository, inside: Inside) -> Stage:
    """The search over the branch that a guilty merge brought in."""
    return make_stage(request, repository, inside.good, "the commit that the branch left", inside.commits)
