"""Record what the tests of a session with `--testmon` run, and save it in testmon's database."""

from __future__ import annotations

import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_rlcanary.hooks import Hooks

if TYPE_CHECKING:
    from rlcanary.selection.injected.rlcanary_recorder.core import Recorder
    from rlcanary.selection.native import NativeOpens
    from rlcanary.selection.saving import Saver

RUN = "RLCANARY_SELECTION_RUN"
DECIDED = "rlcanary_selection_decided"
FOLDER = pytest.StashKey[Path]()
RECORDER = pytest.StashKey["Recorder"]()
ENVIRONMENT = pytest.StashKey[dict[str, str | None]]()
SAID = pytest.StashKey[list[str]]()
VARIABLES = pytest.StashKey[dict[str, str]]()  # of the environment, before a conftest.py changed any


def is_worker() -> bool:
    return "PYTEST_XDIST_WORKER" in os.environ and RUN in os.environ


def is_controller(options: Any) -> bool:
    """Tell if xdist will hand tests to workers, before it reads its options: not with `--dist` alone, nor with `--pdb`."""
    distributes = getattr(options, "numprocesses", None) or getattr(options, "tx", None)
    return bool(distributes) and not getattr(options, "usepdb", False)


def begin(config: pytest.Config) -> None:
    """Start the recorder, in a process that runs tests, before the first conftest is imported."""
    from rlcanary.selection import run_folders
    from rlcanary.selection.injected.rlcanary_recorder import process

    if process.recorder() is not None:
        return  # a session inside a recorded session, in one process
    config.add_cleanup(functools.partial(end, config))
    config.stash[VARIABLES] = dict(os.environ)
    root = config.rootpath
    if is_worker():
        folder = Path(os.environ.pop(RUN))
    else:
        folder = config.stash[FOLDER] = run_folders.new_run(root)
        if is_controller(config.known_args_namespace):
            os.environ[RUN] = str(folder)
            return
    start_recorder(config, folder, root)


def start_recorder(config: pytest.Config, folder: Path, root: Path) -> None:
    from _pytest.assertion.rewrite import AssertionRewritingHook

    from rlcanary.selection.injected.rlcanary_recorder import core, process

    session = f"{core.SESSION}:{os.environ.get('PYTEST_XDIST_WORKER', '')}"
    outer = sys.modules.get("rlcanary_recorder.process")
    if outer is not None and outer.recorder() is not None:
        # This pytest is the child of a recorded test, which from here on does not record this pytest.
        recorder = outer.recorder()
        recorder.say("a", recorder.context())
        recorder.move(str(folder), str(root), session)
    else:
        may_trace = not getattr(config.known_args_namespace, "cov_source", None)
        recorder = process.start(str(folder), str(root), session, may_trace=may_trace)
    AssertionRewritingHook.exec_module = recorder.importing(AssertionRewritingHook.exec_module)  # type: ignore[method-assign]
    environment = recorder.environment(session, os.environ.get("PYTHONPATH", ""))
    config.stash[ENVIRONMENT] = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    config.stash[RECORDER] = recorder
    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    if early := sorted(name for name, file in files.items() if file and recorder.is_project(file)):
        named = f"{', '.join(early[:3])}{' …' if early[3:] else ''}"
        recorder.write("p", f"what plugins did while they were imported, before recording began, is not seen: {named}")


@contextmanager
def prepared(config: pytest.Config) -> Iterator[None]:
    """Let testmon start, and see rlcanary's own source tree, while entered."""
    from rlcanary.selection import testmon_data

    # testmon looks at the option of the cacheprovider plugin even where that is switched off.
    config.option.lf = getattr(config.option, "lf", False)
    with ExitStack() as stack:
        stack.enter_context(testmon_data.own_source_tree(config.stash.get(VARIABLES, None)))
        config.stash[SAID] = [] if is_worker_config(config) else prepare_database(config, stack)
        yield


def is_worker_config(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def prepare_database(config: pytest.Config, stack: ExitStack) -> list[str]:
    """Let testmon start whatever state its database is in; return messages for the user."""
    from rlcanary.selection import testmon_data

    path = testmon_data.datafile(config.rootpath)
    if problem := testmon_data.damage(path):
        testmon_data.remove(path)
        return [f"{path.name} was damaged ({problem}) and is rebuilt: every test runs"]
    try:
        handle, name = tempfile.mkstemp(prefix=".testmondata-", dir=path.parent)
    except OSError as error:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rlcanary-testmon-")))
        copy = folder / path.name
        for suffix in ("", "-wal"):
            if Path(f"{path}{suffix}").exists():
                shutil.copyfile(f"{path}{suffix}", f"{copy}{suffix}")
        previous = os.environ.get("TESTMON_DATAFILE")
        os.environ["TESTMON_DATAFILE"] = str(copy)
        stack.callback(restore, {"TESTMON_DATAFILE": previous})
        return [f"{path.parent} cannot be written ({error.strerror}): the records of this run are not kept"]
    os.close(handle)
    Path(name).unlink()
    return []


def restore(environment: dict[str, str | None]) -> None:
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def select_and_record(config: pytest.Config, data: Any) -> None:
    """Select among the tests by what testmon knows, and register the hooks that record what they run."""
    from rlcanary.selection import testmon_data

    manager = config.pluginmanager
    select = manager.getplugin("TestmonSelect")
    if is_worker_config(config):
        if select is not None and (decided := config.workerinput.get(DECIDED)) is not None:  # type: ignore[attr-defined]
            testmon_data.decide_as(select, decided)
    else:
        said = distrust(config, data)
        config.stash[SAID] += said
        if (testmon_data.share_packages(data) or said) and select is not None:
            data.determine_stable()
            manager.unregister(select)
            select = type(select)(config, data)
            manager.register(select, "TestmonSelect")
        if select is not None and is_controller(config.option):
            manager.register(SharedDecision(testmon_data.decision(select)), "rlcanary-selection-decision")
    collect = manager.getplugin("TestmonCollect")
    if collect is None or config.option.collectonly:
        return
    recorder = config.stash.get(RECORDER, None)
    if recorder is not None:
        collect.testmon = testmon_data.NoCollector()
        manager.register(RecordedTests(config, recorder), "rlcanary-selection-tests")
    folder = config.stash.get(FOLDER, None)
    if folder is not None:
        unwatched = nullcontext if recorder is None else recorder.unwatched
        manager.register(SavedTests(config, collect, folder, unwatched), "rlcanary-selection-saver")


def distrust(config: pytest.Config, data: Any) -> list[str]:
    """Make testmon select the tests whose records are known to be incomplete; return messages for the user."""
    from rlcanary.selection import run_folders, testmon_data

    said = []
    if without := testmon_data.recorded_without_us(data):
        testmon_data.invalidate(data, without)
        said.append(f"tests recorded without their other processes run again: {len(without)}")
    if killed := run_folders.killed_runs(config.rootpath):
        from rlcanary.selection import recording
        from rlcanary.selection.source_map import SourceMap
        from rlcanary.selection.stored import stored

        saved = {
            test: {(file, name) for file, name, _ in found["through"]} for test, found in stored(data.db.con).items()
        }
        sources = SourceMap(config.rootpath, sys.path)
        late: set[str] = set()
        for folder in killed:
            late.update(recording.tests_with_late_records(folder, sources, saved))
            run_folders.discard(folder)
        testmon_data.invalidate(data, late & set(data.all_tests))
        if late:
            said.append(f"tests of a killed run with incomplete records run again: {len(late)}")
    return said


def end(config: pytest.Config) -> None:
    restore(config.stash.get(ENVIRONMENT, {}))
    folder = config.stash.get(FOLDER, None)
    if folder is not None:
        from rlcanary.selection.run_folders import discard

        os.environ.pop(RUN, None)
        discard(folder)


class SharedDecision(Hooks):
    """Give every xdist worker the tests that the controller deselected, and the order of the others.

    A worker that starts late, or in place of one that died, would read other records than the first ones did. xdist
    tells the workers only the positions of their tests: all workers must have the same tests in the same order.
    """

    def __init__(self, decided: dict[str, Any]) -> None:
        self.decided = decided

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[DECIDED] = self.decided


class RecordedTests(Hooks):
    """Hooks of a process that runs tests: they tell the recorder which test it works for."""

    def __init__(self, config: pytest.Config, recorder: Recorder) -> None:
        self.config, self.recorder = config, recorder
        self.worker = os.environ.get("PYTEST_XDIST_WORKER", "")
        self.session = recorder.default
        self.number = 0
        self.fixtures: dict[Any, str] = {}
        self.native: NativeOpens | None = None
        self.loaded_before = self.native_modules()
        self.execute = pytest.FixtureDef.execute
        pytest.FixtureDef.execute = self.executing()  # type: ignore[method-assign]

    def executing(self) -> Callable[..., Any]:
        """Record each use of a shared fixture, also one that another fixture asks for when it is set up already."""
        execute = self.execute

        @functools.wraps(execute)
        def executed(fixturedef: pytest.FixtureDef[Any], request: Any) -> Any:
            value = execute(fixturedef, request)
            if (context := self.fixtures.get(fixturedef)) is not None:
                self.recorder.uses(context)
            return value

        return executed

    def pytest_unconfigure(self) -> None:
        pytest.FixtureDef.execute = self.execute  # type: ignore[method-assign]
        if self.native is not None:
            self.recorder.at_handover = lambda: None
            self.native.close()

    def watch_native_code(self) -> None:
        """Watch the project's folders from the first file with tests on: where all are deselected, nothing is opened."""
        if self.native is None:
            from rlcanary.selection.native import NativeOpens

            self.native = NativeOpens(self.recorder)
            self.recorder.at_handover = self.native.report

    def native_modules(self) -> set[str]:
        """List the packages with native code that are loaded; none from Python 3.12 on, where all threads are seen."""
        if sys.version_info >= (3, 12):
            return set()
        return {
            name.partition(".")[0]
            for name, module in list(sys.modules.items())
            if "-packages/" in (file := getattr(module, "__file__", None) or "") and file.endswith((".so", ".pyd"))
        }

    def relative(self, path: Path) -> str | None:
        return self.recorder.relative(str(path))

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Generator[None, Any, Any]:
        file = self.relative(collector.path) if isinstance(collector, pytest.File) else None
        if file is None:
            return (yield)
        self.watch_native_code()
        with self.recorder.within(f"m:{file}", used=False):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self.watch_native_code()
        self.number += 1
        context = f"t:{self.worker}:{self.number}"
        recorder = self.recorder
        recorder.write("l", context, "test", item.nodeid)
        recorder.switch(context)
        recorder.uses(self.session)
        if (file := self.relative(item.path)) is not None:
            recorder.uses(f"m:{file}")
        for folder in (item.path.parent, *item.path.parent.parents):
            if (folder / "conftest.py").is_file() and (file := self.relative(folder / "conftest.py")) is not None:
                recorder.uses(f"m:{file}")
        if (code := getattr(getattr(item, "function", None), "__code__", None)) is not None:
            recorder.note_test(context, code)
        if recorder.blind:
            recorder.write("a", context)
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        """Record a fixture that several tests share as a context: its code runs once, for all of them."""
        if fixturedef.scope == "function":
            return (yield)
        self.number += 1
        context = self.fixtures[fixturedef] = f"x:{self.worker}:{self.number}"
        recorder, tear_down = self.recorder, ExitStack()
        recorder.write("l", context, "fixture", fixturedef.argname)
        # Finalizers run in reverse order, so that the tear-down lies between these two.
        fixturedef.addfinalizer(tear_down.close)
        try:
            with recorder.within(context):
                return (yield)
        finally:
            fixturedef.addfinalizer(lambda: tear_down.enter_context(recorder.within(context, used=False)))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        if loaded := self.native_modules() - self.loaded_before:
            modules = ", ".join(sorted(loaded)[:3])
            self.recorder.write("p", f"callbacks of threads that native code starts by itself are not seen: {modules}")
        self.recorder.switch(f"{self.session} end")  # no test uses what runs from here on

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        if call.when in ("setup", "call"):
            requested = getattr(getattr(item, "_request", None), "_fixture_defs", {})
            for fixturedef in requested.values():
                if fixturedef in self.fixtures:
                    self.recorder.uses(self.fixtures[fixturedef])
        return (yield)


class SavedTests(Hooks):
    """Hooks of the process that owns testmon's database."""

    def __init__(
        self, config: pytest.Config, collect: Any, folder: Path, unwatched: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.config, self.collect, self.folder, self.unwatched = config, collect, folder, unwatched
        self.search = list(sys.path)
        self.saver: Saver | None = None

    def begun(self) -> Saver:
        """Return the saver, which is made when the first test is over: a run without tests needs none."""
        if self.saver is None:
            from rlcanary.selection.recording import Recording
            from rlcanary.selection.saving import Saver
            from rlcanary.selection.source_map import SourceMap

            sources = SourceMap(self.config.rootpath, self.search)
            recording = Recording(self.folder, sources, self.config.stash.get(VARIABLES, None))
            self.saver = Saver(self.config.testmon_data, recording)  # type: ignore[attr-defined]
        return self.saver

    @pytest.hookimpl(trylast=True)  # testmon has stored the report by then
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown" and report.nodeid in self.collect.reports:
            with self.unwatched():
                self.begun().save({report.nodeid: self.collect.reports[report.nodeid]})

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # outermost: the processes of the run have ended
    def pytest_sessionfinish(self) -> Generator[None]:
        from rlcanary.selection import testmon_data

        try:
            return (yield)
        finally:
            with self.unwatched():
                if self.saver is not None:
                    self.saver.save_late(self.collect.reports)
                data = self.config.testmon_data  # type: ignore[attr-defined]
                testmon_data.forget_all_but(data, data.all_tests)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.saver is None:
            return
        with self.unwatched():
            self.saver.save_late(self.collect.reports)
            lines = self.saver.summary()
        for line in lines:
            terminalreporter.line(f"rlcanary: selection: {line}")
