"""A time limit for foreign code."""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# Seconds after which code that catches everything is interrupted again.
AGAIN_SECONDS = 1.0


class TookTooLong(BaseException):
    """The limit has passed. A BaseException, so that code which catches Exception does not swallow it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TookTooLong` in the block once it has run this long.

    The main thread is interrupted by a signal, which also ends sleeps and waits for locks. In another thread the
    exception is raised at the next line of Python. Neither interrupts a single call of native code: the limit takes
    effect at its end.

    Args:
        seconds: 0 for no limit.
    """
    if not seconds:
        yield
    elif threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer"):
        with _by_signal(seconds):
            yield
    else:
        with _by_thread(seconds):
            yield


@contextmanager
def _by_signal(seconds: float) -> Iterator[None]:
    is_inside = True

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        if is_inside:
            raise TookTooLong

    previous = signal.signal(signal.SIGALRM, interrupt)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_SECONDS)
    try:
        yield
    finally:
        is_inside = False
        signal.setitimer(signal.ITIMER_REAL, left, interval)
        signal.signal(signal.SIGALRM, previous)


@contextmanager
def _by_thread(seconds: float) -> Iterator[None]:
    thread = ctypes.c_ulong(threading.get_ident())
    ended = threading.Event()

    def interrupt() -> None:
        waited = seconds
        while not ended.wait(waited):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(TookTooLong))
            waited = AGAIN_SECONDS

    watcher = threading.Thread(target=interrupt, name="rlcanary-time-limit", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, None)
