"""Prepare the command before its first run: pinned files, runners, import paths."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rlcanary.bisect.plan import Plan
from rlcanary.bisect.record.journal import Journal
from rlcanary.bisect.request import Request
from rlcanary.bisect.resume import mark_of
from rlcanary.bisect.runs.environments import EnvironmentCache
from rlcanary.bisect.runs.pinned_files import Command, prepare_command
from rlcanary.bisect.runs.probe import Probe, Run
from rlcanary.bisect.runs.remote import RemoteRun
from rlcanary.jobs.choose import make_executor
from rlcanary.jobs.job import Cluster
from rlcanary.jobs.outcomes import find_runners
from rlcanary.system import sessions as process
from rlcanary.system.import_paths import find_import_paths


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
