"""End a call that runs for too long in the main thread, wherever it hangs.

A thread waits for the limit, because a signal handler alone does not do: Python runs handlers in the main thread between
two bytecodes, and `ray.get` swallows an ordinary exception raised in one. At the limit the thread

1. takes the stacks of all threads and lets `release` end the calls that the main thread waits for,
2. raises TimedOut in the main thread, and again while nothing ends,
3. calls `give_up` if the test is still running after the grace period: in native code that a signal does not interrupt, or
   because it catches the exception and goes on. The main thread then never leaves the signal handler.

Native code that never lets go of the interpreter stops this thread as well; faulthandler's timer then ends the process.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

AGAIN_SECONDS = 2.5  # Ray runs signal handlers every two seconds
# Threads that Ray keeps in every driver and the tracker beside a test, which only wait and say nothing about a hang.
UNINVOLVED = {"ray_print_logs", "ray_listen_error_messages", "PythonGCThread", "rlcanary-memory"}
NATIVE = "it is in native code, which cannot be interrupted"
PYTEST_PACKAGES = {"_pytest", "pluggy", "pytest_rlcanary"}
FROZEN_SLACK_SECONDS = 20.0  # that a busy machine may keep a process which does run Python from its turn
RELEASE_SECONDS = 60.0

# A real-time signal, because tests and libraries have uses of their own for SIGALRM and SIGUSR1.
SIGNAL: signal.Signals | int = getattr(signal, "SIGRTMIN", signal.SIGALRM)


class TimedOut(KeyboardInterrupt):
    """Raised in the main thread at the limit. Only a KeyboardInterrupt gets out of `ray.get` and past `except Exception`."""


class Expiry:
    """A limit that was passed: the stacks at that moment, by thread, and those of busy Ray workers."""

    def __init__(self, what: str, limit: float, threads: Mapping[str, str]) -> None:
        self.what, self.limit, self.threads = what, limit, threads
        self.workers: Mapping[str, str] = {}

    def stacks(self) -> dict[str, str]:
        return {**self.threads, **self.workers}

    def text(self) -> str:
        return "\n\n".join(f"{name}\n{stack}" for name, stack in self.stacks().items())


class Watchdog:
    """One clock for the main thread. Its methods are called in the main thread.

    Args:
        release: called in the watchdog's thread at the limit with the main thread's frame; returns stacks of Ray workers.
        give_up: called in the watchdog's thread if the main thread cannot be stopped, with the reason; does not return.
        is_debugged: checked before anything is done; a test in a debugger has no limit.
        stderr: file descriptor for the stacks of a process that no longer runs Python.
        grace: seconds that a test has to end after its limit, and a process to run Python again.
    """

    def __init__(
        self,
        release: Callable[[FrameType | None], Mapping[str, str]],
        give_up: Callable[[Expiry, str], None],
        is_debugged: Callable[[], bool],
        stderr: int | None,
        grace: float,
    ) -> None:
        self._release, self._give_up, self._is_debugged = release, give_up, is_debugged
        self._stderr, self._grace = stderr, grace
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._deadline: float | None = None
        self._wakes = float("inf")
        self._what, self._limit = "", 0.0
        self._expiry: Expiry | None = None
        self._frozen_at = 0.0
        self._released = threading.Event()
        self._interruptible = False
        self._heard = False
        self._given_up = False
        self._closed = False
        self._main = threading.main_thread()
        self._previous = signal.signal(SIGNAL, self._raise)
        self._thread = threading.Thread(target=self._watch, name="rlcanary-timeouts", daemon=True)
        self._thread.start()
        _watchdogs.add(self)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        signal.signal(SIGNAL, self._previous)

    def start(self, what: str, limit: float) -> None:
        """Start the clock: `what` has `limit` seconds from now on."""
        self._what, self._limit, self._expiry, self._heard = what, limit, None, False
        self._set_deadline(time.monotonic() + limit)

    def stop(self) -> None:
        with self._lock:
            self._deadline = None

    def _set_deadline(self, deadline: float) -> None:
        with self._lock:
            self._deadline = deadline
            # Nothing to tell a thread that wakes before the new deadline: it looks again by itself.
            if deadline < self._wakes:
                self._changed.notify()
        self._guard_frozen(deadline)

    def _guard_frozen(self, deadline: float) -> None:
        """Let faulthandler's timer, a thread of its own, end a process that does not run Python at the deadline.

        The timer is left as it is while it goes off late enough and not too late, because starting one takes 0.1 ms. It
        cannot tell a process that is stuck from one that gets no processor, which is why it goes off some time later.
        """
        if self._stderr is None:
            return
        earliest = deadline + self._grace
        if not earliest <= self._frozen_at <= earliest + FROZEN_SLACK_SECONDS:
            self._frozen_at = earliest + FROZEN_SLACK_SECONDS
            faulthandler.dump_traceback_later(self._frozen_at - time.monotonic(), exit=True, file=self._stderr)

    def _leave_frozen(self) -> None:
        if self._stderr is not None:
            self._frozen_at = 0.0
            faulthandler.cancel_dump_traceback_later()

    def _before_fork(self) -> None:
        """Stop the timer: in the child its thread is missing, and every later use of the timer would wait for that."""
        if self._frozen_at and not self._given_up:
            faulthandler.cancel_dump_traceback_later()

    def _in_parent(self) -> None:
        if self._stderr is not None and self._frozen_at and not self._given_up:
            left = max(self._frozen_at - time.monotonic(), 0.001)
            faulthandler.dump_traceback_later(left, exit=True, file=self._stderr)

    def _in_child(self) -> None:
        """Set no limit from here on: there is no thread that waits for it, and the lock may be taken for ever."""
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._stderr, self._deadline, self._expiry, self._frozen_at = None, None, None, 0.0

    @contextmanager
    def own_limit(self, what: str, limit: float) -> Iterator[None]:
        """Stop the test's clock while entered; `what` has a limit of its own."""
        deadline, before = self._deadline, (self._what, self._limit)
        if deadline is None or self._expiry is not None:
            yield
            return
        began = time.monotonic()
        self.start(what, limit)
        try:
            yield
        finally:
            if self._expiry is None:
                self._what, self._limit = before
                self._set_deadline(deadline + time.monotonic() - began)

    def allow_interruption(self) -> None:
        """Allow TimedOut to be raised from here on, at once if the limit has already passed."""
        self._interruptible = True
        if self._expiry is not None:
            raise TimedOut(self._expiry.what)

    def forbid_interruption(self) -> Expiry | None:
        """Forbid TimedOut from here on; return the limit that was passed since `start`, once, when it is complete."""
        self._interruptible = False
        if self._expiry is None:
            return None
        self._released.wait()
        expiry, self._expiry = self._expiry, None
        return expiry

    def _raise(self, signum: int, frame: FrameType | None) -> None:
        __tracebackhide__ = True
        self._heard = True
        while self._given_up:
            time.sleep(3600)  # the process goes on without this thread
        if self._interruptible and self._expiry is not None:
            raise TimedOut(self._expiry.what)

    def _watch(self) -> None:
        while (expiry := self._wait_for_expiry()) is not None:
            # This thread runs, so the process is not frozen. It puts the timer off for as long as it does.
            self._guard_frozen(time.monotonic() + RELEASE_SECONDS)
            try:
                expiry.workers = self._release(sys._current_frames().get(self._main.ident or 0))
            finally:
                self._released.set()
            self._insist(expiry)

    def _wait_for_expiry(self) -> Expiry | None:
        """Wait until the deadline, wherever it moves, has passed; None when the watchdog is closed."""
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                if self._deadline is not None and self._deadline <= now:
                    self._deadline = None
                    if not self._is_debugged():
                        self._released.clear()
                        # From here on any end of the test is due to the limit.
                        self._expiry = Expiry(self._what, self._limit, thread_stacks(self._thread))
                        return self._expiry
                if self._deadline is None:
                    # This thread wakes at every deadline that the timer was started for, and so before the timer goes off.
                    self._leave_frozen()
                    self._wakes = float("inf")
                    self._changed.wait()
                else:
                    self._wakes = self._deadline
                    self._changed.wait(self._deadline - now)
            self._leave_frozen()
            return None

    def _insist(self, expiry: Expiry) -> None:
        """Interrupt the main thread until its call has ended."""
        ends = time.monotonic() + self._grace
        while self._expiry is expiry and not self._closed:
            signal.pthread_kill(self._main.ident or 0, SIGNAL)
            until = min(time.monotonic() + AGAIN_SECONDS, ends)
            while time.monotonic() < until:
                if self._expiry is not expiry:
                    return
                self._guard_frozen(time.monotonic())
                time.sleep(0.02)
            if time.monotonic() >= ends and self._expiry is expiry:
                why = "it catches every interruption and continues" if self._heard else NATIVE
                self._given_up = True
                signal.pthread_kill(self._main.ident or 0, SIGNAL)
                self._give_up(expiry, why)


_watchdogs = weakref.WeakSet[Watchdog]()


def _each(method: Callable[[Watchdog], None]) -> Callable[[], None]:
    def of_each() -> None:
        for watchdog in list(_watchdogs):
            method(watchdog)

    return of_each


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_each(Watchdog._before_fork),
        after_in_parent=_each(Watchdog._in_parent),
        after_in_child=_each(Watchdog._in_child),
    )


def thread_stacks(*without: threading.Thread) -> dict[str, str]:
    """Format the Python stack of every thread, most recent call last, the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    hidden = {thread.ident for thread in without}
    main = threading.main_thread().ident
    stacks = sorted(sys._current_frames().items(), key=lambda entry: entry[0] != main)
    return {
        f"thread {names.get(ident, 'unknown')} ({ident})": "".join(own_frames(frame).format())
        for ident, frame in stacks
        if ident not in hidden and names.get(ident) not in UNINVOLVED
    }


def own_frames(frame: FrameType) -> traceback.StackSummary:
    """Return the stack below pytest's own frames, or all of it if there is nothing below them."""
    stack = traceback.extract_stack(frame)
    of_pytest = [index for index, entry in enumerate(stack) if set(Path(entry.filename).parts) & PYTEST_PACKAGES]
    below = stack[of_pytest[-1] + 1 :] if of_pytest else stack
    return traceback.StackSummary.from_list(below or stack)
