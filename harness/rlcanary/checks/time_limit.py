"""A time limit for foreign code."""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

# Seconds after which code that catches everything is interrupted again.
AGAIN_SECONDS = 1.0


class TookTooLong(BaseException):
    """The limit has passed. A BaseException, so that code which catches Exception does not swallow it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TookTooLong` in the block once it has run this long.

    The main thread is interrupted by a signal, which also ends sleeps and waits for locks. In another thread the
    exception is raised at the next line of Python. Neither interrupts a single call of native code: the limit takes
    effect at its end. What comes between `torch.no_grad` and the line that ends it leaves the gradients off, so torch's
    grad mode and default dtype are those of the beginning again.

    Args:
        seconds: 0 for no limit.
    """
    grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    try:
        if not seconds:
            yield
        elif threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer"):
            with _by_signal(seconds):
                yield
        else:
            with _by_thread(seconds):
                yield
    except TookTooLong:
        torch.set_grad_enabled(grad)
        torch.set_default_dtype(dtype)
        raise


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
    watcher = _Watcher(seconds)
    watcher.start()
    try:
        try:
            yield
        finally:
            watcher.ended.set()
    finally:
        watcher.take_back()


class _Watcher(threading.Thread):
    """Raises `TookTooLong` in the thread that made it, each time that the limit has passed again."""

    def __init__(self, seconds: float) -> None:
        super().__init__(name="rlcanary-time-limit", daemon=True)
        self.seconds = seconds
        self.watched = ctypes.c_ulong(threading.get_ident())
        self.ended = threading.Event()
        self.has_raised = False

    def run(self) -> None:
        waited = self.seconds
        while not self.ended.wait(waited):
            self.has_raised = True
            self.interrupt()
            waited = AGAIN_SECONDS

    def interrupt(self) -> None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(self.watched, ctypes.py_object(TookTooLong))

    def take_back(self) -> None:
        """End, in the watched thread, with no exception on its way to it.

        An exception on its way can be replaced and caught, but not withdrawn: Python 3.11 would go on looking for it, at
        each call of a function, and never get past the first line of one that is traced.
        """
        is_over = False
        while not is_over:
            try:
                self.ended.set()
                self.join()
                if self.has_raised:
                    self.interrupt()
                    while True:
                        pass
                is_over = True
            except TookTooLong:
                is_over = not self.is_alive()
