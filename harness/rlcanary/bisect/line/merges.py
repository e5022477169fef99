"""Look inside a guilty merge: find the commits that it brought in."""

from dataclasses import dataclass

from rlcanary.system.git import Commit, Repository


@dataclass(frozen=True)
class Inside:
    merge: Commit
    good: Commit
    """The parent of the branch's first commit: where it left the searched line, or GOOD if that is on the branch."""
    commits: tuple[Commit, ...]
    """The branch's commits by first parents, oldest first. The last one is the merge's second parent."""


def look_inside(repository: Repository, commit: Commit, good: str) -> Inside | None:
    """Find the commits that a merge of two parents brought in.

    Args:
        repository: The user's repository.
        commit: The commit to look inside.
        good: The SHA of GOOD. Its ancestors are left out.

    Returns:
        None if the commit does not have two parents, or if they have no common ancestor.
    """
    parents = repository.parents(commit.sha)
    if len(parents) != 2:
        return None
    base = repository.merge_base(*parents)
    if base is None or base == parents[1]:
        return None
    line = repository.commits("--first-parent", "--reverse", parents[1], f"^{base}", f"^{good}")
    if not line:
        return None
    # The merge base is not on the branch's line if the branch had merged it.
    before = repository.parents(line[0].sha) or [base]
    return Inside(commit, repository.commit(before[0]), tuple(line))


def why_not_searched(repository: Repository, sha: str) -> str:
    """Describe what a search that ended at a merge left unsearched, and how to search it. Empty for other commits."""
    first, *others = repository.parents(sha) or [""]
    bases = {other: repository.merge_base(first, other) for other in others}
    brought = [other for other in others if bases[other] != other]
    if not brought:
        return ""
    ways = [f"--good {base[:10]} --bad {other[:10]}" for other in brought if (base := bases[other]) is not None]
    how = (
        f"; search it with {', and with '.join(ways)}" if ways else " and has no common ancestor with its first parent"
    )
    branches = f"the {len(brought)} branches" if len(brought) > 1 else "the branch"
    return f"the commits of {branches} were not searched{how}"
