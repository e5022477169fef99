"""Which search a request asks for."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from rlcanary.bisect.line.merges import Inside
from rlcanary.bisect.line.past_runs import past_runs
from rlcanary.bisect.plan import Request
from rlcanary.bisect.record.journal import Observation
from rlcanary.bisect.search.bayesian import Bayesian
from rlcanary.bisect.search.likelihood import BAD, GOOD, Likelihood
from rlcanary.bisect.search.metric_noise import Levels
from rlcanary.bisect.search.pass_fail_noise import Believed, History, PassFail
from rlcanary.system.git import Commit, Repository


@dataclass(frozen=True)
class Stage:
    """A search over one line of commits: that of the first parents, then those inside guilty merges."""

    good: Commit
    good_name: str
    commits: tuple[Commit, ...]
    search: Bayesian
    confidence: float

    @property
    def bad(self) -> Commit:
        return self.commits[-1]

    @cached_property
    def range(self) -> frozenset[str]:
        """The SHAs of all commits that can run."""
        return frozenset({self.good.sha, *(commit.sha for commit in self.commits)})

    def record(self, observation: Observation) -> None:
        """Where the commit is one of this search's. Raises what `Bayesian.record` raises."""
        if observation.commit in self.range:
            self.search.record(observation.commit, observation.outcome, observation.value)


def make_stage(
    request: Request,
    repository: Repository,
    good: Commit,
    good_name: str,
    commits: Sequence[Commit],
    *,
    trusted: Collection[str] = (),
    confidence: float | None = None,
    known: History | None = None,
) -> Stage:
    """The search over a line of commits.

    At a merge it asks for the root of its confidence: so much is left for the search inside.

    `trusted`: the SHAs of the ends that need no run. `confidence`: where it is not that of the request. `known`: what other
    runs say about how flaky the command is, besides the tracker's history.
    """
    confidence = request.confidence if confidence is None else confidence
    names = [commit.sha for commit in commits]
    likelihood: Likelihood
    if request.metric is not None:
        likelihood = Levels(1 if request.worse == "higher" else -1)
    elif request.deterministic:
        likelihood = Believed()
    else:
        past = past_runs(request.command, repository, good.sha, names[-1])
        likelihood = PassFail(past + known if past and known else past or known)
    merges = () if request.first_parent else repository.merges(good.sha, names[-1])
    asked = dict.fromkeys(merges, math.sqrt(confidence))
    search = Bayesian(good.sha, names, likelihood, confidence=confidence, confidence_of=asked, trusted=trusted)
    return Stage(good, good_name, tuple(commits), search, confidence)


def make_stage_inside(request: Request, repository: Repository, inside: Inside, outer: Stage) -> Stage:
    """The search over the branch that a merge brought in, at which the search `outer` ended.

    The probability of what it finds is that of both together. The runs of the outer one say how flaky the command is, and
    that the commit which the branch left is good, where it is among theirs.
    """
    shared = {inside.good.sha, *(commit.sha for commit in inside.commits)}
    good, bad = outer.search.sides(inside.merge.sha, without=shared)
    counts = good.count(GOOD), good.count(BAD), bad.count(GOOD), bad.count(BAD)
    return make_stage(
        request,
        repository,
        inside.good,
        "the commit that the branch left",
        inside.commits,
        trusted={inside.good.sha} & outer.range,
        confidence=math.sqrt(outer.confidence),
        known=None if request.metric else History(*counts),
    )
