"""Which search a request asks for."""

import math
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
    confidence: float | None = None,
) -> Stage:
    """`trusted`: the SHAs of the ends that need no run. `confidence`: where it is not that of the request.

    At a merge the search asks for the root of its confidence, so that what is left is asked for inside.
    """
    likelihood: Likelihood
    if request.metric is not None:
        likelihood = Levels(1 if request.worse == "higher" else -1)
    elif request.deterministic:
        likelihood = Believed()
    else:
        likelihood = PassFail(past_runs(request.command, repository, good.sha, commits[-1].sha))
    names = [commit.sha for commit in commits]
    confidence = request.confidence if confidence is None else confidence
    merges = () if request.first_parent else repository.merges(good.sha, names[-1])
    asked = dict.fromkeys(merges, math.sqrt(confidence))
    search = Bayesian(good.sha, names, likelihood, confidence=confidence, confidence_of=asked, trusted=trusted)
    return Stage(good, good_name, tuple(commits), search)


def make_stage_inside(request: Request, repository: Repository, inside: Inside, probability: float) -> Stage:
    """The search over the branch that a merge brought in, which is guilty with this probability.

    The probability of what it finds is the product of both: so much is asked that it reaches the confidence of the request.
    """
    confidence = min(request.confidence / probability, math.sqrt(request.confidence))
    name = "the commit that the branch left"
    return make_stage(request, repository, inside.good, name, inside.commits, confidence=confidence)
