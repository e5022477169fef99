"""One search over one line of commits, set up from the user's request."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from rlcanary.bisect.line.merges import Inside
from rlcanary.bisect.line.past_runs import past_runs
from rlcanary.bisect.record.journal import Observation
from rlcanary.bisect.request import Request
from rlcanary.bisect.search.bayesian import Bayesian
from rlcanary.bisect.search.likelihood import BAD, GOOD, Likelihood
from rlcanary.bisect.search.metric_noise import Levels
from rlcanary.bisect.search.pass_fail_noise import Believed, History, PassFail
from rlcanary.system.git import Commit, Repository


@dataclass(frozen=True)
class Stage:
    """A search over one line of commits: the first parents, or a branch inside a guilty merge.

    `known` counts the runs of the searches around this one.
    """

    good: Commit
    good_name: str
    commits: tuple[Commit, ...]
    search: Bayesian
    confidence: float
    known: History | None = None

    @property
    def bad(self) -> Commit:
        return self.commits[-1]

    @cached_property
    def range(self) -> frozenset[str]:
        """The SHAs of all commits that can run."""
        return frozenset({self.good.sha, *(commit.sha for commit in self.commits)})

    def record(self, observation: Observation) -> None:
        """Add a finished run if its commit is in this search's range.

        Raises:
            Contradiction: Every run is believed, and this one contradicts an earlier one.
            ValueError: The outcome is no evidence.
        """
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
    may_be_good: bool = False,
) -> Stage:
    """Set up the search over a line of commits.

    At a merge the search stops at the square root of its confidence, which leaves room for the search inside the merge.

    Args:
        request: The command line's options.
        repository: The user's repository.
        good: The parent of the first commit.
        good_name: The name of `good` in messages.
        commits: The line, oldest first. The last one is BAD.
        trusted: The SHAs of the ends that need no run.
        confidence: Overrides the request's confidence.
        known: Counts of earlier passes and failures, added to those of the tracker's history.
        may_be_good: Nobody called the last commit bad.
    """
    confidence = request.confidence if confidence is None else confidence
    names = [commit.sha for commit in commits]
    merges = () if request.first_parent else repository.merges(good.sha, names[-1])
    asked = dict.fromkeys(merges, math.sqrt(confidence))
    likelihood: Likelihood
    if request.metric is not None:
        likelihood = Levels(1 if request.worse == "higher" else -1)
    elif request.deterministic:
        likelihood = Believed()
    else:
        past = past_runs(request.command, repository, good.sha, names[-1])
        highest = max([confidence, *asked.values()])
        likelihood = PassFail(past + known if past and known else past or known, highest, len(names))
    search = Bayesian(
        good.sha,
        names,
        likelihood,
        confidence=confidence,
        confidence_of=asked,
        trusted=trusted,
        may_be_good=may_be_good,
    )
    return Stage(good, good_name, tuple(commits), search, confidence, known)


def make_stage_inside(request: Request, repository: Repository, inside: Inside, outer: Stage) -> Stage:
    """Set up the search over the branch of the merge at which the search `outer` ended.

    The two searches share the requested confidence. The runs of `outer` and of the searches around it tell how flaky
    the command is. If `outer` includes the commit that the branch left, that commit is trusted to be good. The branch's
    last commit may be good: then the merge itself is the culprit.
    """
    shared = {inside.good.sha, *(commit.sha for commit in inside.commits)}
    good, bad = outer.search.sides(inside.merge.sha, without=shared)
    known = None if request.metric else History(good.count(GOOD), good.count(BAD), bad.count(GOOD), bad.count(BAD))
    return make_stage(
        request,
        repository,
        inside.good,
        "the base of the branch",
        inside.commits,
        trusted={inside.good.sha} & outer.range,
        confidence=math.sqrt(outer.confidence),
        known=known + outer.known if known and outer.known else known,
        may_be_good=True,
    )
