"""The search along the first parents and, while it ends at a merge, among the commits that the merge brought in."""

import math
from dataclasses import dataclass, replace

from rlcanary.bisect.line.merges import Inside, look_inside
from rlcanary.bisect.line.stage import Stage, make_stage_inside
from rlcanary.bisect.plan import Request
from rlcanary.bisect.record.journal import Observation
from rlcanary.bisect.search.verdict import Refusal, Verdict
from rlcanary.system.git import Commit, Repository


@dataclass(frozen=True)
class Closed:
    """A merge that the search could not go into, and why. Most often it is itself the culprit."""

    inside: Inside
    refusal: Refusal

    @property
    def is_untestable(self) -> bool:
        """Whether nobody can tell if the culprit lies inside."""
        return self.refusal in (Refusal.GOOD_UNTESTABLE, Refusal.BAD_UNTESTABLE)


class Descent:
    """One search below another, each inside the merge that the one above it ended at.

    A run counts in every search in whose range its commit lies: where one inside a merge speaks against the merge, the
    search that ended there goes on. So what the searches come to follows from the runs alone, in whatever order they came.
    """

    def __init__(self, request: Request, repository: Repository, first: Stage) -> None:
        self._request = request
        self._repository = repository
        self.stages = [first]
        self.insides: list[Inside] = []
        """The merge between each search and the next one."""
        self.closed: Closed | None = None
        self._observations: list[Observation] = []

    @property
    def stage(self) -> Stage:
        """The innermost search, the one that runs."""
        return self.stages[-1]

    @property
    def merges(self) -> list[Commit]:
        """The guilty merges, outermost first."""
        return [inside.merge for inside in self.insides]

    def record(self, observation: Observation) -> None:
        """Raises what `Bayesian.record` raises."""
        self._observations.append(observation)
        for stage in self.stages:
            stage.record(observation)

    @property
    def reopened(self) -> int | None:
        """The number of the first search that goes on after it had ended at a merge, or None."""
        for number, (stage, inside) in enumerate(zip(self.stages, self.insides, strict=False)):
            if stage.search.result().culprit != inside.merge.sha or stage.search.next_commits(1):
                return number
        return None

    def advance(self) -> bool:
        """Go to the search that is next when the innermost has ended: up again, or into a merge. False when all is over."""
        if (number := self.reopened) is not None:
            del self.stages[number + 1 :], self.insides[number:]
            return True
        if (refusal := self.stage.search.refusal) is not None:
            if self.insides:
                self.closed = Closed(self.insides.pop(), refusal)
                self.stages.pop()
            return False
        culprit = self.stage.search.result().culprit
        if culprit is None or self._request.first_parent:
            return False
        inside = look_inside(self._repository, self._repository.commit(culprit), self.stages[0].good.sha)
        if inside is None:
            return False
        stage = make_stage_inside(self._request, self._repository, inside, self.stage)
        for observation in self._observations:
            stage.record(observation)
        self.stages.append(stage)
        self.insides.append(inside)
        return True

    def verdict(self) -> Verdict:
        """Of the innermost search, where every probability is multiplied by those of the merges.

        All that a merge brought in is suspect where its branch cannot be tested.
        """
        *outer, innermost = [stage.search.result() for stage in self.stages]
        share = math.prod(verdict.probability for verdict in outer)
        if self.closed is not None and self.closed.is_untestable:
            brought = tuple(commit.sha for commit in self.closed.inside.commits)
            innermost = replace(innermost, suspects=(*brought, *innermost.suspects))
        return replace(
            innermost,
            probability=share * innermost.probability,
            posterior={sha: share * probability for sha, probability in innermost.posterior.items()},
            relapse=next((verdict.relapse for verdict in (innermost, *outer) if verdict.relapse), None),
        )
