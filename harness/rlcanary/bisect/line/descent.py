"""The search along the first parents and, while it ends at a merge, among the commits that the merge brought in."""

import math
from dataclasses import dataclass, replace

from rlcanary.bisect.line.merges import Inside, look_inside
from rlcanary.bisect.line.stage import Stage, make_stage_inside
from rlcanary.bisect.record.journal import Observation
from rlcanary.bisect.request import Request
from rlcanary.bisect.search.verdict import Refusal, Verdict
from rlcanary.system.git import Commit, Repository


@dataclass(frozen=True)
class Closed:
    """A merge whose branch could not be searched, and the refusal. The merge itself is most often the culprit."""

    inside: Inside
    refusal: Refusal

    @property
    def is_untestable(self) -> bool:
        """Whether an end of the branch is untestable, so that the culprit may lie inside or be the merge itself."""
        return self.refusal in (Refusal.GOOD_UNTESTABLE, Refusal.BAD_UNTESTABLE)


class Descent:
    """A stack of searches, each inside the merge that the search above it ended at.

    A run counts in every search whose range contains its commit. A run inside a merge may be evidence against that
    merge; the outer search then goes on. The result depends on the set of runs, not on their order.
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
        """The innermost search, which is the active one."""
        return self.stages[-1]

    @property
    def merges(self) -> list[Commit]:
        """The guilty merges, outermost first."""
        return [inside.merge for inside in self.insides]

    def record(self, observation: Observation) -> None:
        """Add a finished run to every search.

        Raises:
            Contradiction: Every run is believed, and this one contradicts an earlier one.
            ValueError: The outcome is no evidence.
        """
        self._observations.append(observation)
        for stage in self.stages:
            stage.record(observation)

    @property
    def reopened(self) -> int | None:
        """The index of the first search that has to go on after it had ended at a merge, or None."""
        for number, (stage, inside) in enumerate(zip(self.stages, self.insides, strict=False)):
            if stage.search.result().culprit != inside.merge.sha or stage.search.next_commits(1):
                return number
        return None

    def advance(self) -> bool:
        """Move to the next search when the innermost one has ended: back up, or into a merge.

        Returns:
            False when no search is left.
        """
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
        inside = look_inside(self._repository, self._repository.commit(culprit), self._good)
        if inside is None:
            return False
        stage = make_stage_inside(self._request, self._repository, inside, self.stage)
        for observation in self._observations:
            stage.record(observation)
        self.stages.append(stage)
        self.insides.append(inside)
        return True

    @property
    def _good(self) -> str:
        """The commit whose history holds no suspect: the user's GOOD if a merge brought it in, else the first start."""
        first = self.stages[0]
        named = self._repository.find(self._request.good) if self._request.good else None
        if named is None or named in first.range:
            return first.good.sha
        inside = self._repository.is_ancestor(named, first.bad.sha) and self._repository.is_ancestor(
            first.good.sha, named
        )
        return named if inside else first.good.sha

    def verdict(self) -> Verdict:
        """Return the innermost search's verdict, with its probabilities multiplied by those of the guilty merges.

        If an end of a merge's branch is untestable, every commit of the branch is a suspect.
        """
        *outer, innermost = [stage.search.result() for stage in self.stages]
        share = math.prod(verdict.probability for verdict in outer)
        if self.closed is not None and self.closed.is_untestable:
            brought = tuple(commit.sha for commit in self.closed.inside.commits)
            innermost = replace(innermost, suspects=(*brought, *innermost.suspects))
        steps = tuple(replace(step, probability=share * step.probability) for step in innermost.steps)
        return replace(
            innermost,
            steps=steps,
            probability=share * innermost.probability,
            posterior={sha: share * probability for sha, probability in innermost.posterior.items()},
            relapse=next((verdict.relapse for verdict in (innermost, *outer) if verdict.relapse), None),
        )
