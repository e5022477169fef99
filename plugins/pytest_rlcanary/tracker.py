"""Provide the `tracker` fixture and write the results file.

A run is recorded where an option, a setting or the folder `unit_results` asks for it, and where a test uses the tracker; no
other run writes anything. `unit_results.json` has a null exit status until the run ends, and then the results; a copy of
every run goes to `unit_results/`. Under xdist every worker keeps its own journal and the controller writes the results.
"""

import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_rlcanary.hooks import Hooks, hooks_in
from rlcanary.errors import UserError
from rlcanary.recording.keys import qualified_keys
from rlcanary.recording.outcomes import OutcomeLog
from rlcanary.recording.recorder import ProcessRecorder, RunRecorder, WorkerRecorder, tracking_into
from rlcanary.recording.records import Records
from rlcanary.recording.results_file import default_results_file, require_place
from rlcanary.system.printable import printable

if TYPE_CHECKING:
    from rlcanary.recording.tracker import Tracker

PROCESS = pytest.StashKey[ProcessRecorder]()
RUN_INPUT = "rlcanary_run"
RUN_OUTPUT = "rlcanary_records"


def __dir__() -> list[str]:
    return [*hooks_in(globals()), "tracker"]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rlcanary")
    group.addoption(
        "--rlcanary-results",
        metavar="PATH",
        help="results file (default: unit_results.json beside the tests); the folder of that name beside it keeps every run",
    )
    parser.addini(
        "rlcanary_results", "results file, relative to the root directory (see --rlcanary-results)", default=""
    )
    parser.addini(
        "rlcanary_directions",
        "the better direction of metrics, for `rlcanary regress`: `PATTERN = lower|higher|stable|ignore` a line",
        type="linelist",
        default=[],
    )


@pytest.fixture
def tracker(request: pytest.FixtureRequest) -> Iterator["Tracker"]:
    """Records measurements: track(name, value), log_max_mem(name), get_max_mem(); also the test's time as `_elapsed`."""
    process, nodeid = request.config.stash.get(PROCESS, None), request.node.nodeid
    # Fixtures may be set up only to be shown.
    with tracking_into(Records(), nodeid) if process is None else process.tracking(nodeid) as tracker:
        yield tracker


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    config = session.config
    workerinput: dict[str, Any] | None = getattr(config, "workerinput", None)
    if not runs_tests(config):
        return
    if workerinput is not None:
        given = workerinput[RUN_INPUT]
        worker = WorkerRecorder(Path(given["results_file"]), given["header"], workerinput["workerid"])
        config.stash[PROCESS] = worker
        config.pluginmanager.register(WorkerReporter(worker))
    else:
        try:
            run = RunRecorder(results_file(config), config.rootpath)
            if is_named(config):
                require_place(run.results_file)
        except UserError as error:
            raise pytest.UsageError(f"rlcanary: {error}") from error
        config.stash[PROCESS] = run
        config.pluginmanager.register(RunReporter(run, session))
        if is_named(config) or run.history.is_dir():
            run.open()


@pytest.hookimpl(tryfirst=True)  # before tests are deselected, so that -k and -m do not change a key
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    process = config.stash.get(PROCESS, None)
    if process is not None:
        process.qualify_keys(qualified_keys(item.nodeid for item in items))


def pytest_collection_finish(session: pytest.Session) -> None:
    process = session.config.stash.get(PROCESS, None)
    if process is not None and any(uses_tracker(item) for item in session.items):
        process.open()


def uses_tracker(item: pytest.Item) -> bool:
    """Tell if a test uses this plugin's fixture, and not a fixture of its own project with the same name."""
    if "tracker" not in getattr(item, "fixturenames", ()):
        return False
    known = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    return bool(known.get("tracker")) and known["tracker"][-1].func.__module__ == __name__


def pytest_unconfigure(config: pytest.Config) -> None:
    process = config.stash.get(PROCESS, None)
    if process is not None:
        process.close()


class WorkerReporter(Hooks):
    """Hooks of a worker of xdist."""

    def __init__(self, worker: WorkerRecorder) -> None:
        self.worker = worker

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        worker = self.worker
        if worker.is_open:
            output = worker.records.missing(), worker.problems + worker.records.problems, map(str, worker.recovered)
            session.config.workeroutput[RUN_OUTPUT] = [list(each) for each in output]  # type: ignore[attr-defined]


class RunReporter(Hooks):
    """Hooks of the process that owns the run."""

    def __init__(self, run: RunRecorder, session: pytest.Session) -> None:
        self.run = run
        self.session = session
        self.outcomes = OutcomeLog()
        self.was_finished = False
        self.has_workers = False
        self.told: set[str] = set()

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        self.has_workers = True
        node.workerinput[RUN_INPUT] = {"results_file": str(self.run.results_file), "header": self.run.header}

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        output = getattr(node, "workeroutput", {}).get(RUN_OUTPUT)  # a worker that was killed leaves none
        if output is not None:
            self.run.add_from_worker(*output)

    def pytest_report_header(self, config: pytest.Config) -> list[str]:
        return self.place() + self.news()

    def pytest_report_collectionfinish(self, config: pytest.Config) -> list[str]:
        return self.place() + self.news() if config.option.verbose >= 0 else []

    def place(self) -> list[str]:
        return self.untold(
            [f"results in {shown(self.run.results_file, self.session.config)}"] if self.run.is_open else []
        )

    def news(self) -> list[str]:
        recovered = [
            f"an earlier run was killed; its records are in {shown(path, self.session.config)}"
            for path in self.run.recovered
        ]
        return self.untold(recovered + [f"warning: {problem}" for problem in self.run.problems])

    def untold(self, lines: list[str]) -> list[str]:
        lines = [line for line in dict.fromkeys(lines) if line not in self.told]
        self.told.update(lines)
        return [f"rlcanary: {printable(line)}" for line in lines]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.has_workers:
            self.run.open_as_a_worker_did()
        is_subtest = type(report) is not pytest.TestReport
        xfail, spent_s = hasattr(report, "wasxfail"), 0.0 if is_subtest else report.duration
        # A subtest that fails fails its test, of which pytest says so later or, under xdist, never; its time is its test's.
        if report.failed or (report.skipped and xfail) or not is_subtest:
            over = self.outcomes.add(report.nodeid, str(report.when), report.outcome, xfail, spent_s)
            if over is not None:
                self.run.add_outcome(report.nodeid, over)

    @pytest.hookimpl(
        wrapper=True, tryfirst=True
    )  # outermost: the exit status is final and the workers of xdist have ended
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None]:
        try:
            return (yield)
        finally:
            self.write_results(session)

    def pytest_unconfigure(self) -> None:
        if not self.was_finished:  # a plugin failed while the session started: pytest then skips the session's end
            self.write_results(self.session)

    def write_results(self, session: pytest.Session) -> None:
        self.was_finished = True
        self.run.finish(int(session.exitstatus), coverage_total(session.config))
        for line in self.news():
            print(line, file=sys.stderr)


def is_named(config: pytest.Config) -> bool:
    """Tell if the user named a place for the results."""
    return bool(config.getoption("rlcanary_results") or config.getini("rlcanary_results"))


def results_file(config: pytest.Config) -> Path:
    """Choose the path of the results file.

    From the command line (relative to the current folder), or the ini file (relative to the root), or the default.
    """
    if option := config.getoption("rlcanary_results"):
        return config.invocation_params.dir / str(option)
    if ini := config.getini("rlcanary_results"):
        return config.rootpath / str(ini)
    return default_results_file(config.rootpath, config.getini("testpaths"))


def runs_tests(config: pytest.Config) -> bool:
    """Tell if the session runs tests, and not only lists them, their fixtures or what sets these up."""
    option = config.option
    listing = option.collectonly or option.showfixtures or option.show_fixtures_per_test
    return not (listing or getattr(option, "setuponly", False) or getattr(option, "setupplan", False))


def coverage_total(config: pytest.Config) -> float | None:
    """Return the percentage that pytest-cov reports, if it measured anything."""
    total = getattr(config.pluginmanager.get_plugin("_cov"), "cov_total", None)
    return None if total is None else float(total)


def shown(path: Path, config: pytest.Config) -> str:
    return str(path.relative_to(config.rootpath) if path.is_relative_to(config.rootpath) else path)
