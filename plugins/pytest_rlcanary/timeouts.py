"""A limit for every test that holds inside `ray.get`, locks, subprocesses and native code.

pytest-timeout reads `--timeout`, the `timeout` marker and the ini file; this plugin takes over its timer (the hooks that it
offers for this). A test for which none of them sets a limit has one of 300 seconds for set-up and call, shared fixtures
have a limit of their own, and tear-down has the test's limit again, because a test that timed out is still cleaned up.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Generator, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.outcomes import Failed  # what pytest.fail raises, under a name that can be subclassed

from pytest_rlcanary.cleanup import BELONGINGS, GIVEN_UP
from pytest_rlcanary.marks import closest_mark
from rlcanary.cleanup import ray_cluster
from rlcanary.cleanup.watchdog import Expiry, TimedOut, Watchdog

if TYPE_CHECKING:
    import pytest_timeout

DEFAULT_SECONDS = "300"
LAST_WORDS_SECONDS = 15
EXPIRY = pytest.StashKey[Expiry]()
STACKS = "rlcanary-timeout-stacks"


class TestTimedOut(Failed):
    """The failure of a test that passed its limit."""

    __module__ = "builtins"  # reports then show the bare name
    __test__ = False


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("rlcanary_timeout", "limit in seconds of a test that has no other (0: none)", default=DEFAULT_SECONDS)
    parser.addini(
        "rlcanary_fixture_timeout",
        "limit in seconds of the set-up of one fixture wider than a test, which does not count as the test's time",
        default=DEFAULT_SECONDS,
    )


@pytest.hookimpl(tryfirst=True)  # pytest-timeout reads its options in the same hook
def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin("timeout"):
        return
    from pytest_timeout import get_env_settings

    default = seconds(config, "rlcanary_timeout")
    fixtures = seconds(config, "rlcanary_fixture_timeout")
    settings = get_env_settings(config)
    if settings.timeout is not None:
        default = 0
    elif not (settings.method == "signal" and settings.func_only is False and in_main_thread()):
        config.option.timeout, default = default, 0
    config.pluginmanager.register(
        Timeouts(config, settings._replace(timeout=default), fixtures), "rlcanary-timeout-hooks"
    )


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
    """The hook of a phase, which runs it so that it can be interrupted, and makes a failure of what that led to."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def hook(self: Timeouts, item: pytest.Item) -> Generator[None]:
        __tracebackhide__ = True
        self.when = when
        if when == "setup" and self.default.timeout > 0 and not has_own_limit(item):
            self.start(item, self.default)
        watchdog = self.watchdog
        if watchdog is None:
            return (yield)
        if when == "teardown" and self.item is item:
            watchdog.start(self.nodeid, max(self.settings.timeout, self.fixture_limit))
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


class Timeouts:
    """The hooks of a session in which pytest-timeout is active.

    default: the limit of tests for which pytest-timeout sets none, because its hooks take longer than all the rest; 0: none.
    """

    def __init__(self, config: pytest.Config, default: pytest_timeout.Settings, fixture_limit: float) -> None:
        self.config = config
        self.default = self.settings = default
        self.fixture_limit = fixture_limit
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
        if self.watchdog is None:
            own_faulthandler = float(self.config.getini("faulthandler_timeout") or 0) == 0
            stderr = self.stderr if own_faulthandler else None
            self.watchdog = Watchdog(self.release, self.give_up, self.is_debugged, stderr)
        self.item, self.settings, self.nodeid = item, settings, item.nodeid
        self.watchdog.start(self.nodeid, settings.timeout)

    pytest_runtest_setup = interruptible("setup")
    pytest_runtest_call = interruptible("call")
    pytest_runtest_teardown = interruptible("teardown")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any], request: Any) -> Generator[None, object, object]:
        if self.watchdog is None or fixturedef.scope == "function":
            return (yield)
        with self.watchdog.own_limit(f"the fixture {fixturedef.argname}", self.fixture_limit):
            try:
                return (yield)
            except TimedOut as error:
                # Kept as any failed set-up is, so that the next test does not wait for the same fixture again.
                failure = TestTimedOut(f"{error} did not come up within its limit of {self.fixture_limit:g} seconds")
                fixturedef.cached_result = (None, fixturedef.cache_key(request), (failure, None))
                raise

    def failure(self, item: pytest.Item, expiry: Expiry) -> TestTimedOut:
        """The failure of a test whose limit has passed, the stacks of which its report will show."""
        assert self.watchdog is not None
        self.watchdog.stop()
        item.stash[EXPIRY] = expiry
        if not self.config.pluginmanager.hasplugin(STACKS):
            self.config.pluginmanager.register(Stacks(), STACKS)
        return TestTimedOut(f"{expiry.what} was still running after {expiry.limit:g} seconds, its limit ({self.when})")

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
        """End what the test runs in its Ray cluster; in tear-down that is the fixtures' own work, and stays."""
        belongings = self.config.stash.get(BELONGINGS, None)
        if belongings is None or self.when == "teardown" or not ray_cluster.connected():
            return {}
        from rlcanary.cleanup.ray_stacks import end_what_hangs

        return end_what_hangs(belongings.kept_in_ray(), frame)

    def give_up(self, expiry: Expiry) -> None:
        """Report the test that cannot be stopped, let every plugin finish its session, and end the process."""
        faulthandler.dump_traceback_later(LAST_WORDS_SECONDS, exit=True, file=self.stderr)
        assert self.item is not None
        assert self.session is not None
        self.config.stash[GIVEN_UP] = True
        capture = self.config.pluginmanager.getplugin("capturemanager")
        if capture is not None:
            capture.suspend(in_=True)
        where = "\n\n".join(f"{name}\n{stack}" for name, stack in expiry.stacks().items())
        message = (
            f"{expiry.what} was still running after {expiry.limit:g} seconds, its limit ({self.when}), "
            "in native code that nothing interrupts"
        )
        report = pytest.TestReport(
            nodeid=self.item.nodeid,
            location=self.item.location,
            keywords=dict.fromkeys(self.item.keywords, 1),
            outcome="failed",
            longrepr=f"{message}\n\n{where}",
            when="call",
            duration=expiry.limit,
        )
        self.config.hook.pytest_runtest_logreport(report=report)
        self.save_testmon()
        self.session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if not hasattr(self.config, "workerinput"):
            self.config.hook.pytest_sessionfinish(session=self.session, exitstatus=pytest.ExitCode.TESTS_FAILED)
            done = self.session.items.index(self.item) + 1
            print(
                f"\nrlcanary: {message}: the process ends here, {len(self.session.items) - done} tests did not run. "
                "With `-n 1` only the worker would end.",
                file=sys.stderr,
            )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(pytest.ExitCode.TESTS_FAILED)

    def save_testmon(self) -> None:
        """Write what testmon has collected and would otherwise write at the end of its batch."""
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


class Stacks:
    """Shows the stacks of tests that timed out; a session without one does not pay for this hook."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        expiry = item.stash.get(EXPIRY, None)
        if expiry is not None and call.excinfo is not None and call.excinfo.errisinstance(TestTimedOut):
            del item.stash[EXPIRY]
            add_stacks(report, expiry)
        return report


def is_our_doing(error: BaseException) -> bool:
    """Whether an exception is the interruption, or what Ray says of an actor or a task that was ended."""
    return isinstance(error, TimedOut) or type(error).__module__.startswith("ray.")


def above_ray(trace: TracebackType | None) -> TracebackType | None:
    """The traceback down to the call into Ray: where a test hangs inside Ray is of no interest."""
    entry = trace
    while entry is not None and entry.tb_next is not None:
        if entry.tb_next.tb_frame.f_globals.get("__name__", "").split(".")[0] == "ray":
            entry.tb_next = None
        entry = entry.tb_next
    return trace


def add_stacks(report: pytest.TestReport, expiry: Expiry) -> None:
    """Put the stacks below the failure, so that they reach the terminal, the XML file and the controller of xdist."""
    add_section = getattr(report.longrepr, "addsection", None)
    if add_section is None:
        report.longrepr = f"{report.longreprtext}\n" + "\n".join(expiry.threads.values())
        return
    for name, stack in expiry.stacks().items():
        add_section(f"stack of {name}", stack)
