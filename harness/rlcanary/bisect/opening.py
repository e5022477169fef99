"""Open what a search needs: its lock, its journal, the command and the places to run it in."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rlcanary.bisect.line.descent import Descent
from rlcanary.bisect.line.stage import make_stage
from rlcanary.bisect.plan import Plan
from rlcanary.bisect.record.journal import Header, Journal, Lock, set_test_variables
from rlcanary.bisect.request import Request
from rlcanary.bisect.resume import mark_of, open_journal
from rlcanary.bisect.runs.environments import EnvironmentCache, default_cache_folder
from rlcanary.bisect.runs.pinned_files import Command, prepare_command
from rlcanary.bisect.runs.places import Checkout, Place
from rlcanary.bisect.runs.pool import Pool
from rlcanary.bisect.runs.probe import Probe, Run
from rlcanary.bisect.runs.remote import RemoteRun
from rlcanary.bisect.runs.worktree import Worktree
from rlcanary.bisect.view.progress import Display
from rlcanary.jobs.choose import make_executor
from rlcanary.jobs.job import Cluster
from rlcanary.jobs.outcomes import find_runners
from rlcanary.system import sessions as process
from rlcanary.system.git import GitError, Repository
from rlcanary.system.import_paths import find_import_paths


@dataclass(frozen=True)
class OpenSearch:
    """A search that holds its lock, its journal and its places."""

    request: Request
    plan: Plan
    display: Display
    interrupts: process.Interrupts
    header: Header
    journal: Journal
    places: Sequence[Place]
    environments: EnvironmentCache | None
    pool: Pool
    descent: Descent


@contextmanager
def open_search(request: Request, plan: Plan, display: Display, interrupts: process.Interrupts) -> Iterator[OpenSearch]:
    """Open a search, or one that was cut short again. At the end its probes are stopped and its places removed.

    Raises:
        UserError: The search cannot run here.
    """
    repository = plan.repository
    store = repository.common_dir / "rlcanary" / "bisect"
    with ExitStack() as stack:
        lock = Lock(repository.git_dir / "rlcanary" / "bisect.lock")
        stack.callback(lock.release)
        prepared = prepare(request, plan, store / "pinned")
        for text in prepared.notices:
            display.notice(text)
        header = Header(
            plan.root,
            plan.good.sha,
            plan.bad.sha,
            request.command,
            str(repository.directory),
            tuple((file.relative, file.digest) for file in prepared.command.pinned),
            f"{request.metric} {request.worse}" if request.metric else "",
            set_test_variables(),
        )
        journal = open_journal(store, header, request, plan, display)
        stack.callback(journal.close)
        places = stack.enter_context(open_places(request, repository, journal, display))
        environments = None
        if plan.builder is not None:
            folder = (request.env_dir or default_cache_folder()).absolute()
            environments = EnvironmentCache(folder, plan.builder, plan.keys)
        numbers = [event["run"] for event in journal.events() if event["event"] in ("run", "observation")]
        probe = prepared.probe(request, plan, journal, environments)
        pool = Pool(probe, places, interrupts, 1 + max(numbers, default=0))
        stack.callback(pool.stop)
        stage = make_stage(request, repository, plan.good, plan.good_name, plan.commits, trusted=plan.trusted)
        descent = Descent(request, repository, stage)
        yield OpenSearch(request, plan, display, interrupts, header, journal, places, environments, pool, descent)


@dataclass(frozen=True)
class Preparation:
    command: Command
    runners: tuple[str, ...]
    import_paths: tuple[str, ...]
    notices: tuple[str, ...]

    def probe(self, request: Request, plan: Plan, journal: Journal, environments: EnvironmentCache | None) -> Probe:
        return Probe(
            self.command,
            plan.repository.toplevel,
            plan.repository.directory,
            journal.folder,
            plan.table,
            self.runners,
            request.timeout,
            self.import_paths,
            mark_of(journal),
            self._run(request, journal),
            request.metric,
            environments,
        )

    def _run(self, request: Request, journal: Journal) -> Run:
        if request.executor == "local":
            return process.run
        make = partial(make_executor, request.executor, Cluster.of_environment())
        jobs = RemoteRun(make, f"bisect-{journal.folder.name}")
        jobs.cancel_left(journal.folder)
        return jobs


def prepare(request: Request, plan: Plan, copies: Path) -> Preparation:
    """Copy the files that must not change to the folder `copies`, and find how the command imports the checkout.

    Raises:
        UserError: A path to pin is not a file.
    """
    repository = plan.repository
    command = prepare_command(
        request.command, repository, plan.bad.sha, copies, also=request.pin, automatic=not request.no_pin
    )
    notices: list[str] = []
    if command.pinned:
        names = ", ".join(file.relative for file in command.pinned)
        notices.append(f"pinned as it is in your checkout, the same for every commit: {names}")
    if command.absent and not request.in_place:
        names = ", ".join(command.absent)
        notices.append(
            f"warning: not in the history, so no run finds it: {names}; a whole path names the one in your checkout"
        )
    texts = [file.copy.read_text(encoding="utf-8", errors="replace") for file in command.pinned]
    imports = find_import_paths(request.command, repository.toplevel, repository.toplevel / repository.directory)
    if imports.relative:
        notices.append(
            f"Python imports from this checkout ({', '.join(imports.relative)}: an editable install or PYTHONPATH): "
            "runs import the same folders of the commit under test"
        )
    if imports.unreachable:
        notices.append(
            f"warning: {', '.join(imports.unreachable)} is installed from this checkout and cannot be redirected: "
            "runs import your checkout, not the commit under test"
        )
    return Preparation(command, find_runners(request.command, texts), imports.relative, tuple(notices))


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
    if kept and place.path.is_dir():  # A finished search that is only shown again made none.
        display.kept(place)
        journal.append(f"{name}-kept", **facts)
        return
    try:
        place.remove()
        journal.append(f"{name}-removed", **facts)
    except (OSError, GitError) as error:
        display.notice(f"warning: {place.path} could not be cleaned up: {error}; the next search tries again")
