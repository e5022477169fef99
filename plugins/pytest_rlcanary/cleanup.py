"""End and name a test's leftovers before the next test begins."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from pytest_rlcanary.fixtures import (
    check_scope,
    clean_gpu,
    ray_cluster_fixture,
    ray_options,
    ray_session,
    tiny_chat_tokenizer,
    tiny_gpt2_fixture,
    tiny_llama_fixture,
    tiny_model_folder,
    tiny_qwen2_fixture,
    vllm_engine,
    vllm_engine_options,
)
from pytest_rlcanary.hooks import Hooks, hooks_in
from pytest_rlcanary.marks import closest_mark
from pytest_rlcanary.stash import BELONGINGS, GIVEN_UP
from rlcanary.cleanup.belongings import Belongings, empty_gpu_caches, gpu_bytes_allocated
from rlcanary.cleanup.session_guardian import SessionGuardian
from rlcanary.cleanup.surroundings import Keeper
from rlcanary.system.processes import adopt_orphans

if TYPE_CHECKING:
    from rlcanary.cleanup.leaks import Resources

__all__ = (  # the fixtures of this plugin
    "clean_gpu",
    "ray_cluster_fixture",
    "ray_options",
    "ray_session",
    "tiny_chat_tokenizer",
    "tiny_gpt2_fixture",
    "tiny_llama_fixture",
    "tiny_model_folder",
    "tiny_qwen2_fixture",
    "vllm_engine",
    "vllm_engine_options",
)

LEFT = pytest.StashKey[list[str]]()
GREW = pytest.StashKey[list[dict[str, Any]]]()
SURROUNDINGS = pytest.StashKey[Keeper]()
# Attributes of a report travel from a worker of xdist to its controller.
LEFT_ATTRIBUTE, GREW_ATTRIBUTE = "rlcanary_left", "rlcanary_grew"
LEFT_ATTACHER, LEFT_REPORTER = "rlcanary-left-attacher", "rlcanary-left"
GPU_LEAK_BYTES = 2**20
UNMARKED_LIMITS = {"gpu_mb": 1, "processes": 0, "threads": 0, "ray_actors": 0}


def __dir__() -> list[str]:
    return [*hooks_in(globals()), *__all__]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rlcanary")
    group.addoption(
        "--leak-report", action="store_true", help="measure what each test leaves behind, and report growth"
    )
    group.addoption(
        "--ray-address",
        metavar="ADDRESS",
        help="let tests use this running Ray cluster (default: one of their own; a plain ray.init() obeys RAY_ADDRESS)",
    )
    parser.addini(
        "rlcanary_keep_processes", "parts of command lines of processes that tests may leave running", type="linelist"
    )
    parser.addini("rlcanary_ray_scope", "scope of the ray_cluster fixture: module or session", default="module")


@pytest.hookimpl(tryfirst=True)  # before any conftest can start CUDA
def pytest_load_initial_conftests() -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        from rlcanary.cleanup.gpu_shares import take_share

        take_share()


def pytest_configure(config: pytest.Config) -> None:
    check_scope(config)
    config.addinivalue_line(
        "markers",
        "leak_check(gpu_mb=, rss_mb=, processes=, threads=, fds=, sockets=, shm=, ray_actors=): "
        "fail the test if it leaves more than this",
    )
    if runs_tests_here(config):
        cleanup = Cleanup(config)
        config.pluginmanager.register(cleanup, "rlcanary-cleanup-hooks")
        config.stash[SURROUNDINGS] = cleanup.surroundings
    if is_controller(config) or config.getoption("leak_report"):
        config.pluginmanager.register(LeftReporter(config), LEFT_REPORTER)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Note the surroundings of a test after the hooks of conftests, which may prepare each test, and before its fixtures.

    A module is registered before every conftest, and the hooks of what was registered last run first.
    """
    if (surroundings := item.config.stash.get(SURROUNDINGS, None)) is not None:
        surroundings.begin()


def runs_tests_here(config: pytest.Config) -> bool:
    """Tell if this process runs tests: not if it only lists them or is the controller of xdist."""
    option = config.option
    listing = option.collectonly or option.showfixtures or option.show_fixtures_per_test
    return not (listing or is_controller(config))


def is_controller(config: pytest.Config) -> bool:
    """Tell if this process hands tests to workers of xdist."""
    option = config.option
    # As xdist decides it: `--dist` alone, as in a project's addopts, distributes nothing.
    distributes = getattr(option, "dist", "no") != "no" and getattr(option, "tx", None)
    return bool(distributes) and not hasattr(config, "workerinput")


class Cleanup(Hooks):
    """The hooks of a process that runs tests."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        # A child that a test forks may come out of the test and end the session too: it cleans up nothing of this process.
        self.pid = os.getpid()
        self.guardian: SessionGuardian | None = None
        self.ray_folder: str | None = None
        # The resources before the test, if what grows during it is measured.
        self.before: Resources | None = None
        self.in_shared_setup = False
        self.surroundings = Keeper()
        # Whether a finalizer of the test looks at its surroundings, and the state which that restored.
        self.looks_behind = False
        self.put_back: list[str] = []
        self.measures_all: bool = config.getoption("leak_report")
        self.keeps_tracebacks: bool = config.getoption("usepdb", False)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        if sys.platform == "linux":
            adopt_orphans()
            self.guardian = SessionGuardian()
        self.give_ray_its_own_folder()
        spared = () if self.guardian is None else (self.guardian.pid,)
        self.belongings = Belongings(spared, self.config.getini("rlcanary_keep_processes"))
        self.config.stash[BELONGINGS] = self.belongings

    def give_ray_its_own_folder(self) -> None:
        """Give Ray a folder of its own, so that `ray.init()` finds no cluster of this host or of another worker."""
        if address := self.config.getoption("ray_address"):
            os.environ["RAY_ADDRESS"] = address
        elif "RAY_ADDRESS" not in os.environ and "RAY_TMPDIR" not in os.environ:
            # Short, because Ray puts sockets into it, whose paths are limited to 107 characters.
            self.ray_folder = f"{tempfile.gettempdir()}/rlc-{os.getpid()}-{os.urandom(2).hex()}"
            os.environ["RAY_TMPDIR"] = self.ray_folder

    def make_room(self) -> None:
        """End this process's children and give up its place, before another process runs the rest of a stuck session."""
        self.belongings.end_all_but_ray()
        if self.ray_folder is not None:
            os.environ.pop("RAY_TMPDIR", None)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.item, self.looks_behind, self.put_back = item, False, []
        self.belongings.begin()
        self.surroundings.begin()  # for a test that is skipped before the hook above
        self.gpu_bytes = gpu_bytes_allocated()
        self.before = None
        if self.measures_all or closest_mark(item, "leak_check") is not None:
            from rlcanary.cleanup.leaks import measure

            self.before = measure(self.belongings.kept_commands)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        if fixturedef.scope == "function" and not self.looks_behind:
            # The first finalizer of a test runs last: behind its own fixtures and before those that it shares.
            self.looks_behind = True
            self.item.addfinalizer(self.look_behind)
        if fixturedef.scope == "function" or self.in_shared_setup:
            return (yield)
        self.in_shared_setup = True
        try:
            with self.belongings.shared(), self.surroundings.shared(), self.measured_apart():
                return (yield)
        finally:
            self.in_shared_setup = False

    @contextmanager
    def measured_apart(self) -> Iterator[None]:
        """Exclude growth while entered, which is not that of the test that happens to need it first."""
        if self.before is None:
            yield
            return
        from rlcanary.cleanup.leaks import measure

        kept = self.belongings.kept_commands
        before = measure(kept)
        try:
            yield
        finally:
            self.before = self.before.with_growth(before, measure(kept))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None]:
        # Pytest keeps the exception of this test's call there, that of an expected failure too. (`getattr` of a missing name
        # takes as long as all else here.)
        if (error := vars(sys).get("last_value")) is not None:
            self.let_go(error)
        if not self.looks_behind:
            self.look_behind()
        try:
            result = yield
        finally:
            broken = self.end_left(item)
        if broken:
            pytest.fail("the test left more than its leak_check allows: " + "; ".join(broken), pytrace=False)
        return result

    def look_behind(self) -> None:
        self.put_back = self.surroundings.put_back()

    def end_left(self, item: pytest.Item) -> list[str]:
        broken: list[str] = []
        if os.getpid() != self.pid:
            return broken
        if gpu_bytes_allocated() - self.gpu_bytes > GPU_LEAK_BYTES:
            gc.collect()
            empty_gpu_caches()
        before, self.before = self.before, None
        if before is not None:
            from rlcanary.cleanup.leaks import exceeded, growth, measure

            gc.collect()
            after = measure(self.belongings.kept_commands)
            item.stash[GREW] = [{"resource": g.resource, "text": str(g)} for g in growth(before, after)]
            broken = exceeded(before, after, allowed_growth(item))
        if left := self.put_back + self.belongings.end_left():
            item.stash[LEFT] = left
        if left or before is not None:
            self.report_left()
        return broken

    @pytest.hookimpl(trylast=True)
    def pytest_exception_interact(self, call: pytest.CallInfo[None]) -> None:
        if call.excinfo is not None:
            self.let_go(call.excinfo.value)

    def let_go(self, error: BaseException) -> None:
        if not self.keeps_tracebacks:
            from rlcanary.cleanup.frames import clear_tracebacks

            clear_tracebacks(error)

    def report_left(self) -> None:
        """Register the hooks that report leftovers; most sessions have none and need not pay for these hooks."""
        manager = self.config.pluginmanager
        if not manager.hasplugin(LEFT_ATTACHER):
            manager.register(LeftAttacher(), LEFT_ATTACHER)
        if not manager.hasplugin(LEFT_REPORTER):
            manager.register(LeftReporter(self.config), LEFT_REPORTER)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if os.getpid() != self.pid:
            return
        if self.config.stash.get(GIVEN_UP, False):
            self.belongings.end_session_processes()
            return
        self.belongings.end_session()

    def pytest_unconfigure(self) -> None:
        if os.getpid() != self.pid:
            return
        if BELONGINGS in self.config.stash:
            self.belongings.close()
        if self.guardian is not None:
            self.guardian.close()
        if self.ray_folder is not None:
            os.environ.pop("RAY_TMPDIR", None)
            shutil.rmtree(self.ray_folder, ignore_errors=True)


def allowed_growth(item: pytest.Item) -> dict[str, float]:
    """Read the limits of the closest `leak_check` marker; none without one."""
    marker = closest_mark(item, "leak_check")
    if marker is None:
        return {}
    from rlcanary.cleanup.leaks import NOTABLE

    unknown = marker.kwargs.keys() - NOTABLE.keys()
    if unknown or marker.args:
        raise pytest.UsageError(f"{item.nodeid}: leak_check takes {', '.join(f'{name}=' for name in NOTABLE)}")
    return dict(marker.kwargs or UNMARKED_LIMITS)


class LeftAttacher(Hooks):
    """Puts a test's leftovers on the report of its tear-down, in the process that runs tests."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "teardown":
            if left := item.stash.get(LEFT, None):
                setattr(report, LEFT_ATTRIBUTE, left)
                del item.stash[LEFT]  # a plugin may run the test once more
            if grew := item.stash.get(GREW, None):
                setattr(report, GREW_ATTRIBUTE, grew)
        return report


class LeftReporter(Hooks):
    """Lists tests' leftovers at the end of the session, in the controller under xdist."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.left: list[tuple[str, list[str]]] = []
        self.grew: list[tuple[str, list[str]]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "teardown":
            return
        if left := getattr(report, LEFT_ATTRIBUTE, None):
            self.left.append((report.nodeid, left))
        if grew := getattr(report, GREW_ATTRIBUTE, None):
            self.grew.append((report.nodeid, [entry["text"] for entry in grew]))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for title, entries in (
            ("left behind, and ended or put back", self.left),
            ("grew during a test", self.grew if self.config.getoption("leak_report") else []),
        ):
            if entries:
                terminalreporter.section(title, sep="-")
                for nodeid, lines in entries:
                    terminalreporter.line(nodeid)
                    for line in lines:
                        terminalreporter.line(f"    {line}")
        if self.config.getoption("leak_report") and not self.grew:
            terminalreporter.section("grew during a test", sep="-")
            terminalreporter.line("nothing")
