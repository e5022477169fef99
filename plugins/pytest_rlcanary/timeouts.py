"""Limit the time of every test, also inside `ray.get`, locks, subprocesses and native code.

pytest-timeout reads `--timeout`, the `timeout` marker and the ini file; this plugin takes over its timer (the hooks that it
offers for this). A test for which none of them sets a limit has one of 300 seconds for set-up and call, shared fixtures
have a limit of their own, and tear-down has the test's limit again, because a test that timed out is still cleaned up. So
has the collection of each file. A test that cannot be interrupted costs its process, in which the session does not go on.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import traceback
from collections.abc import Generator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from pytest_rlcanary import fixtures
from pytest_rlcanary.hooks import Hooks, hooks_in
from pytest_rlcanary.marks import closest_mark
from pytest_rlcanary.stash import BELONGINGS, GIVEN_UP, REST_INPUT
from pytest_rlcanary.timeout_report import EXPIRY, Stacks, TestTimedOut, above_ray, is_our_doing, sentence
from rlcanary.cleanup import ray_cluster
from rlcanary.cleanup.watchdog import Expiry, TimedOut, Watchdog

if TYPE_CHECKING:
    import pytest_timeout

DEFAULT_SECONDS = "300"
GRACE_SECONDS = "30"
LAST_WORDS_SECONDS = 120
STACKS = "rlcanary-timeout-stacks"


def __dir__() -> list[str]:
    return hooks_in(globals())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("rlcanary_timeout", "limit in seconds of a test that has no other (0: none)", default=DEFAULT_SECONDS)
    parser.addini(
        "rlcanary_fixture_timeout",
        "limit in seconds of the set-up of one fixture wider than a test, which does not count as the test's time",
        default=DEFAULT_SECONDS,
    )
    parser.addini(
        "rlcanary_collection_timeout",
        "limit in seconds of the collection of one file or folder (0: none)",
        default=DEFAULT_SECONDS,
    )
    parser.addini(
        "rlcanary_timeout_grace",
        "seconds that a test has to end after its limit, before the session continues in another process",
        default=GRACE_SECONDS,
    )


@pytest.hookimpl(tryfirst=True)  # pytest-timeout reads its options in the same hook
def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin("timeout"):
        return
    from pytest_timeout import get_env_settings

    default = seconds(config, "rlcanary_timeout")
    limits = Limits(
        seconds(config, "rlcanary_fixture_timeout"),
        seconds(config, "rlcanary_collection_timeout"),
        seconds(config, "rlcanary_timeout_grace"),
    )
    settings = get_env_settings(config)
    if settings.timeout is not None:
        default = 0
    elif not (settings.method == "signal" and settings.func_only is False and in_main_thread()):
        config.option.timeout, default = default, 0
    if settings.method != "signal" or not in_main_thread():
        limits = limits._replace(collection=0)
    config.pluginmanager.register(
        Timeouts(config, settings._replace(timeout=default), limits), "rlcanary-timeout-hooks"
    )


class Limits(NamedTuple):
    """Limits in seconds, beside a test's own limit."""

    fixture: float
    collection: float
    grace: float


def seconds(config: pytest.Config, name: str) -> float:
    try:
        return float(config.getini(name))
    except ValueError as error:
        raise pytest.UsageError(f"{name} must be a number of seconds, got {config.getini(name)!r}") from error


def in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def has_own_limit(item: pytest.Item) -> bool:
    mark = closest_mark(item, "timeout")
    return mark is not None and (*mark.args, mark.kwargs.get("timeout"))[0] is not None


def interruptible(when: str) -> Any:
    """Run the hook of a phase so that it can be interrupted, and turn the interruption into a failure."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def hook(self: Timeouts, item: pytest.Item) -> Generator[None]:
        __tracebackhide__ = True
        self.when = when
        if when == "setup" and self.default.timeout > 0 and not has_own_limit(item):
            self.start(item, self.default)
        elif when == "setup" and self.item is item and not self.settings.func_only:
            self.start(
                item, self.settings
            )  # perhaps another attempt, as of pytest-rerunfailures, with a limit of its own
        watchdog = self.watchdog
        if watchdog is None:
            return (yield)
        if when == "teardown" and self.item is item:
            watchdog.start(self.nodeid, max(self.settings.timeout, self.limits.fixture))
        try:
            watchdog.allow_interruption()
            result = yield
            expiry = watchdog.forbid_interruption()
        except BaseException as error:
            expiry = watchdog.forbid_interruption()
            if expiry is None:
                raise
            failure = self.failure(item, expiry).with_traceback(above_ray(error.__traceback__))
            raise failure from (None if is_our_doing(error) else error)
        finally:
            if when == "teardown" and self.settings is self.default:
                watchdog.stop()
        if expiry is not None:
            raise self.failure(item, expiry)
        return result

    return hook


class Timeouts(Hooks):
    """Hooks of a session in which pytest-timeout is active.

    Args:
        default: the limit of tests for which pytest-timeout sets none; 0: none. Its hooks take longer than all the rest.
    """

    def __init__(self, config: pytest.Config, default: pytest_timeout.Settings, limits: Limits) -> None:
        self.config = config
        self.default = self.settings = default
        self.limits = limits
        self.watchdog: Watchdog | None = None
        self.item: pytest.Item | None = None
        self.nodeid = ""
        self.session: pytest.Session | None = None
        self.when = "setup"
        # pytest suspends its capture around this moment, so that this is the terminal.
        self.stderr = os.dup(2)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self.session = session

    def pytest_report_header(self) -> str | None:
        return f"timeout: {self.default.timeout}s" if self.default.timeout > 0 else None

    @pytest.hookimpl(tryfirst=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: pytest_timeout.Settings) -> bool | None:
        if settings.method != "signal" or not in_main_thread():
            return None  # pytest-timeout's own timer
        self.start(item, settings)
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_timeout_cancel_timer(self, item: pytest.Item) -> bool | None:
        if self.watchdog is None or self.item is not item:
            return None
        self.watchdog.stop()
        return True

    def start(self, item: pytest.Item, settings: pytest_timeout.Settings) -> None:
        self.item, self.settings, self.nodeid = item, settings, item.nodeid
        self.awake_watchdog().start(self.nodeid, settings.timeout)

    def awake_watchdog(self) -> Watchdog:
        if self.watchdog is None:
            theirs = self.config.pluginmanager.hasplugin("faulthandler") and self.config.getini("faulthandler_timeout")
            stderr = None if float(theirs or 0) else self.stderr
            self.watchdog = Watchdog(self.release, self.give_up, self.is_debugged, stderr, self.limits.grace)
        return self.watchdog

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Limit the collection of a file: passing the limit is an error, and the other files are collected."""
        if self.limits.collection <= 0 or isinstance(collector, pytest.Session):  # which only walks to the others
            return (yield)
        self.when, watchdog = "collection", self.awake_watchdog()
        watchdog.start(collector.nodeid, self.limits.collection)
        try:
            watchdog.allow_interruption()
            report = yield
            expiry = watchdog.forbid_interruption()
        except BaseException:
            expiry = watchdog.forbid_interruption()
            if expiry is None:
                raise
        finally:
            watchdog.stop()
        if expiry is None:
            return report
        text = f"{sentence(expiry, self.when)}\n\n{expiry.text()}"
        return pytest.CollectReport(collector.nodeid, "failed", text, [])

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out the tests that the session has already run, in the worker that runs the rest of it."""
        workerinput: Mapping[str, Any] = getattr(config, "workerinput", {})
        if REST_INPUT in workerinput:
            rest = set(workerinput[REST_INPUT])
            items[:] = [item for item in items if item.nodeid in rest]

    pytest_runtest_setup = interruptible("setup")
    pytest_runtest_call = interruptible("call")
    pytest_runtest_teardown = interruptible("teardown")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any], request: Any) -> Generator[None, object, object]:
        is_shared = fixturedef.scope != "function"
        # The time that our own fixtures take, `ray.init` above all, is not the test's either.
        if self.watchdog is None or not (is_shared or fixturedef.func.__module__ == fixtures.__name__):
            return (yield)
        with self.watchdog.own_limit(f"the fixture {fixturedef.argname}", self.limits.fixture):
            try:
                return (yield)
            except TimedOut as error:
                if not is_shared:
                    raise
                # Kept as any failed set-up is, so that the next test does not wait for the same fixture again.
                failure = TestTimedOut(f"{error} did not start within its limit of {self.limits.fixture:g} seconds")
                fixturedef.cached_result = (None, fixturedef.cache_key(request), (failure, None))
                raise

    def failure(self, item: pytest.Item, expiry: Expiry) -> TestTimedOut:
        """Build the failure of a test whose limit has passed; its report will show the stacks."""
        assert self.watchdog is not None
        self.watchdog.stop()
        item.stash[EXPIRY] = expiry
        if not self.config.pluginmanager.hasplugin(STACKS):
            self.config.pluginmanager.register(Stacks(), STACKS)
        return TestTimedOut(sentence(expiry, self.when))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self) -> Generator[None]:
        if self.watchdog is not None and not self.config.stash.get(GIVEN_UP, False):
            self.watchdog.stop()
            self.watchdog.close()
            self.watchdog = None
        return (yield)

    def is_debugged(self) -> bool:
        from pytest_timeout import is_debugging

        return not self.settings.disable_debugger_detection and bool(is_debugging())

    def release(self, frame: FrameType | None) -> Mapping[str, str]:
        """End the test's calls in its Ray cluster; in tear-down those are the fixtures' own work, and stay."""
        belongings = self.config.stash.get(BELONGINGS, None)
        if belongings is None or self.when == "teardown" or not ray_cluster.connected():
            return {}
        from rlcanary.cleanup.ray_stacks import end_what_hangs

        return end_what_hangs(belongings.kept_in_ray(), frame)

    def give_up(self, expiry: Expiry, why: str) -> None:
        """Report the test that cannot be stopped, run the others elsewhere, and end the process."""
        assert self.session is not None
        # In the place of the watchdog's timer, which on a busy machine would go off before the test is reported.
        faulthandler.dump_traceback_later(LAST_WORDS_SECONDS, exit=True, file=self.stderr)
        self.config.stash[GIVEN_UP] = True
        capture = self.config.pluginmanager.getplugin("capturemanager")
        if capture is not None:
            capture.suspend(in_=True)
        message = f"{sentence(expiry, self.when)}, and {why}"
        code = pytest.ExitCode.INTERNAL_ERROR
        try:
            if self.when == "collection":
                report = pytest.CollectReport(expiry.what, "failed", f"{message}\n\n{expiry.text()}", [])
                self.config.hook.pytest_collectreport(report=report)
                print(f"\nrlcanary: {message}: no test ran", file=sys.stderr)
            else:
                self.report_given_up(expiry, message)
                if not hasattr(self.config, "workerinput"):  # xdist replaces a worker by itself
                    self.run_rest(message)
            code = pytest.ExitCode.TESTS_FAILED
            faulthandler.dump_traceback_later(LAST_WORDS_SECONDS, exit=True, file=self.stderr)
            self.save_testmon()
            self.session.exitstatus = code
            if not hasattr(self.config, "workerinput"):
                self.config.hook.pytest_sessionfinish(session=self.session, exitstatus=code)
        finally:
            if sys.exc_info()[0] is not None:  # nothing above this thread would show it
                traceback.print_exc()
                code = pytest.ExitCode.INTERNAL_ERROR
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def report_given_up(self, expiry: Expiry, message: str) -> None:
        assert self.item is not None
        report = pytest.TestReport(
            nodeid=self.item.nodeid,
            location=self.item.location,
            keywords=dict.fromkeys(self.item.keywords, 1),
            outcome="failed",
            longrepr=f"{message}\n\n{expiry.text()}",
            when="call",
            duration=expiry.limit,
        )
        self.config.hook.pytest_runtest_logreport(report=report)

    def run_rest(self, message: str) -> None:
        """Run the tests behind the one that is stuck, if possible, and report it."""
        assert self.session is not None
        assert self.item is not None
        rest = [item.nodeid for item in self.session.items[self.session.items.index(self.item) + 1 :]]
        if not rest or self.session.shouldfail or self.session.shouldstop:
            return
        if why_not := self.cannot_run_rest():
            print(f"\nrlcanary: {message}: {len(rest)} tests did not run, because {why_not}", file=sys.stderr)
            return
        from pytest_rlcanary.rest import RestOfSession

        print(f"\nrlcanary: {message}: the remaining tests ({len(rest)}) run in a new process", file=sys.stderr)
        cleanup = self.config.pluginmanager.getplugin("rlcanary-cleanup-hooks")
        if cleanup is not None:
            cleanup.make_room()
        # The timer of a test that keeps the interpreter is not that of a session which goes on.
        faulthandler.cancel_dump_traceback_later()
        RestOfSession(self.session, rest).run()

    def cannot_run_rest(self) -> str:
        """Explain why the session cannot go on in another process, or ""."""
        if not self.config.pluginmanager.hasplugin("xdist"):
            return "pytest-xdist is switched off"
        if self.config.pluginmanager.hasplugin("TestmonCollect"):
            return "only this process can write testmon's data; the next run of --testmon selects them"
        return ""

    def save_testmon(self) -> None:
        """Write testmon's collected data, which it would otherwise write at the end of its batch."""
        plugin = self.config.pluginmanager.getplugin("TestmonCollect")
        if plugin is None or hasattr(self.config, "workerinput"):
            return
        from testmon.db import DB
        from testmon.testmon_core import get_data_file_path

        # An SQLite connection belongs to the thread that opened it, and that one is stuck.
        data = plugin.testmon_data
        data.db = DB(str(Path(data.rootdir) / get_data_file_path()))
        plugin.testmon.discard_current()
        plugin.pytest_keyboard_interrupt(None)
