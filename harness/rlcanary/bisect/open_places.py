"""The places of a running search. The journal records each place before it is made and after it is gone."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from rlcanary.bisect.record.journal import Journal
from rlcanary.bisect.request import Request
from rlcanary.bisect.runs.places import Checkout, Place
from rlcanary.bisect.runs.worktree import Worktree
from rlcanary.bisect.view.progress import Display
from rlcanary.system.git import GitError, Repository


@contextmanager
def open_places(request: Request, repository: Repository, journal: Journal, display: Display) -> Iterator[list[Place]]:
    """Open a place per job. With `--keep-worktree` the first place is left as it is at the end."""
    places: list[Place] = []
    with ExitStack() as stack:
        for _ in range(request.jobs):
            place: Place = (Checkout if request.in_place else Worktree)(repository, not request.no_submodules)
            facts = {"home": place.home} if isinstance(place, Checkout) else {"path": str(place.path)}
            name = "checkout" if request.in_place else "worktree"
            journal.append(name, **facts)
            kept = request.keep_worktree and not places
            stack.callback(_finish, place, name, facts, kept, journal, display)
            places.append(place)
        yield places


def _finish(place: Place, name: str, facts: dict[str, str], kept: bool, journal: Journal, display: Display) -> None:
    if kept:
        display.kept(place)
        journal.append(f"{name}-kept", **facts)
        return
    try:
        place.remove()
        journal.append(f"{name}-removed", **facts)
    except (OSError, GitError) as error:
        display.notice(f"warning: {place.path} could not be put in order: {error}; the next search tries again")
