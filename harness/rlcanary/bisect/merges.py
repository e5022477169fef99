"""Going into a guilty merge: the commits that it brought in."""

from dataclasses import dataclass

from rlcanary.bisect.git import Commit, Repository


@dataclass(frozen=True)
class Inside:
    merge: Commit
    good: Commit
    """Where the branch left the line that was searched."""
    commits: tuple[Commit, ...]
    """Of the branch, by first parents, oldest first; the last one is the merge's second parent."""


def look_inside(repository: Repository, commit: Commit) -> Inside | None:
    """What a merge of two brought in; None for other commits, and where the sides have no common ancestor."""
    parents = repository.parents(commit.sha)
    if len(parents) != 2:
        return None
    base = repository.merge_base(*parents)
    if base is None or base == parents[1]:
        return None
    line = repository.commits("--first-parent", "--reverse", f"{base}..{parents[1]}")
    return Inside(commit, repository.commit(base), tuple(line))
