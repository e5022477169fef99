"""The `tracker` fixture and the results file.

Starting pytest writes `unit_results.json` with a null exit status, ending it writes the results; a copy of every run
goes to `unit_results/`. Under xdist every worker keeps its own journal and the controller writes the results.
"""

import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rlcanary.errors import UserError
from rlcanary.results.keys import qualified_keys
from rlcanary.results.outcomes import OutcomeLog
from rlcanary.results.recorder import ProcessRecorder, RunRecorder
from rlcanary.results.store import default_results_file

if TYPE_CHECKING:
    from rlcanary.results.tracker import Tracker

PROCESS = pytest.StashKey[ProcessRecorder]()
JOURNALS_INPUT = "rlcanary_journals"


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
        "which way a metric is better, for `rlcanary regress`: `PATTERN = lower|higher|stable|ignore` a line",
        type="linelist",
        default=[],
    )


@pytest.fixture
def tracker(request: pytest.FixtureRequest) -> Iterator["Tracker"]:
    """Records measurements: track(name, value), log_max_mem(name), get_max_mem(); also the test's time as `_elapsed`."""
    with request.config.stash[PROCESS].tracking(request.node.nodeid) as tracker:
        yield tracker


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    config = session.config
    workerinput: dict[str, Any] | None = getattr(config, "workerinput", None)
    try:
        if workerinput is not None:
            config.stash[PROCESS] = ProcessRecorder(Path(workerinput[JOURNALS_INPUT]), workerinput["workerid"])
        elif runs_tests(config):
            run = RunRecorder.start(results_file(config), config.rootpath)
            config.stash[PROCESS] = run
            config.pluginmanager.register(RunReporter(run, session))
    except UserError as error:
        raise pytest.UsageError(f"rlcanary: {error}") from error


@pytest.hookimpl(tryfirst=True)  # before tests are deselected, so that -k and -m do not change a key
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    process = config.stash.get(PROCESS, None)
    if process is not None:
        process.qualify_keys(qualified_keys(item.nodeid for item in items))


def pytest_unconfigure(config: pytest.Config) -> None:
    process = config.stash.get(PROCESS, None)
    if process is not None:
        process.close()


class RunReporter:
    """The hooks of the process that owns the run."""

    def __init__(self, run: RunRecorder, session: pytest.Session) -> None:
        self.run = run
        self.session = session
        self.outcomes = OutcomeLog()
        self.was_finished = False

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[JOURNALS_INPUT] = str(self.run.run_folder)

    def pytest_report_header(self, config: pytest.Config) -> list[str]:
        recovered = [
            f"an earlier run was killed; what it had recorded is in {shown(path, config)}"
            for path in self.run.recovered
        ]
        problems = [f"warning: {problem}" for problem in self.run.problems]
        return [
            f"rlcanary: {line}"
            for line in (f"results in {shown(self.run.results_file, config)}", *recovered, *problems)
        ]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if type(report) is pytest.TestReport:  # a subtest's report is part of its test's
            xfail = hasattr(report, "wasxfail")
            over = self.outcomes.add(report.nodeid, str(report.when), report.outcome, xfail, report.duration)
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
        try:
            problems = self.run.finish(int(session.exitstatus), coverage_total(session.config))
        except (OSError, UserError) as error:
            session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
            print(f"rlcanary: the results of this run could not be written: {error}", file=sys.stderr)
        else:
            for problem in problems:
                print(f"rlcanary: warning: {problem}", file=sys.stderr)


def results_file(config: pytest.Config) -> Path:
    """The path given on the command line (relative to the current folder), or in the ini file (to the root), or the
    default.
    """
    if option := config.getoption("rlcanary_results"):
        return config.invocation_params.dir / str(option)
    if ini := config.getini("rlcanary_results"):
        return config.rootpath / str(ini)
    return default_results_file(config.rootpath, config.getini("testpaths"))


def runs_tests(config: pytest.Config) -> bool:
    return not (config.option.collectonly or config.option.showfixtures or config.option.show_fixtures_per_test)


def coverage_total(config: pytest.Config) -> float | None:
    """The percentage that pytest-cov reports, if it measured anything."""
    total = getattr(config.pluginmanager.get_plugin("_cov"), "cov_total", None)
    return None if total is None else float(total)


def shown(path: Path, config: pytest.Config) -> str:
    return str(path.relative_to(config.rootpath) if path.is_relative_to(config.rootpath) else path)
