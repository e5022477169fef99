"""Assign threads, and work handed to a pool of threads, to the context that started them."""

from __future__ import annotations

import _thread
import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

from .core import Recorder, current

# Threads of these do no work for a test, and some never end.
NOT_WORK = {"ray", "grpc", "execnet", "rlcanary_recorder", "rlcanary", "pytest_rlcanary"}

# These import modules for pytest, or for one name that is spelled, as unittest.mock does.
ASK_FOR_NAMES = {"_pytest", "pkgutil"}


def patch_threading(recorder: Recorder, _module: Any) -> None:
    start = threading.Thread.start

    def start_in_context(thread: threading.Thread) -> None:
        context, run = recorder.context(), thread.run
        target = getattr(thread, "_target", None) or thread.run
        counts = str(getattr(target, "__module__", "")).partition(".")[0] not in NOT_WORK

        def run_in_context() -> None:
            current.set(context)
            if counts:
                recorder.begin(context)
            else:
                recorder.backend.rearm()
            try:
                run()
            finally:
                thread.__dict__.pop("run", None)
                if counts:
                    recorder.end(context)

        thread.run = run_in_context  # type: ignore[method-assign]
        start(thread)

    threading.Thread.start = start_in_context  # type: ignore[assignment, method-assign]


def patch_thread_pool(recorder: Recorder, module: Any) -> None:
    submit: Callable[..., Any] = module.ThreadPoolExecutor.submit

    def run_for(context: str, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
        outer = current.get()
        current.set(context)
        recorder.begin(context)
        try:
            return function(*arguments, **options)
        finally:
            recorder.end(context)
            current.set(outer)

    def submit_in_context(executor: Any, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
        return submit(executor, run_for, recorder.context(), function, *arguments, **options)

    module.ThreadPoolExecutor.submit = submit_in_context


def patch_bare_threads(recorder: Recorder, _module: Any) -> None:
    begin: Callable[..., int] = _thread.start_new_thread

    def start_new_thread(function: Callable[..., Any], *arguments: Any) -> int:
        context = recorder.context()

        def run_in_context(*given: Any, **named: Any) -> Any:
            current.set(context)
            recorder.begin(context)
            try:
                return function(*given, **named)
            finally:
                recorder.end(context)

        return begin(run_in_context, *arguments)

    _thread.start_new_thread = functools.update_wrapper(start_new_thread, begin)


def patch_callbacks(recorder: Recorder, ctypes: Any) -> None:
    """Watch the callbacks of threads that no Python code started: before Python 3.12, each thread sets its own hook."""
    if sys.version_info >= (3, 12):
        return

    def watching(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*types: Any, **options: Any) -> Any:
            kind = make(*types, **options)
            if "__new__" not in vars(kind):
                kind.__new__ = new
            return kind

        return functools.update_wrapper(made, make)

    def new(kind: Any, *arguments: Any) -> Any:
        if arguments and callable(arguments[0]):
            arguments = (watched(arguments[0]), *arguments[1:])
        return super(kind, kind).__new__(kind, *arguments)

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            recorder.backend.rearm()
            return function(*arguments)

        return call

    ctypes.CFUNCTYPE, ctypes.PYFUNCTYPE = watching(ctypes.CFUNCTYPE), watching(ctypes.PYFUNCTYPE)


def patch_imports_by_name(recorder: Recorder, importlib: Any) -> None:
    find: Callable[..., Any] = importlib.import_module

    def import_module(name: str, package: str | None = None) -> Any:
        module = find(name, package)
        recorder.uses_module(module.__name__)
        asking, file = sys._getframe(1), getattr(module, "__file__", None) or ""
        is_outside = not recorder.is_project(asking.f_code.co_filename) and recorder.is_project(file)
        if is_outside and asking.f_globals.get("__name__", "").partition(".")[0] not in ASK_FOR_NAMES:
            recorder.say("h", recorder.context(), recorder.relative(file) or "")
        return module

    importlib.import_module = functools.update_wrapper(import_module, find)


PATCHES: dict[str, Callable[[Recorder, Any], None]] = {
    "threading": patch_threading,
    "_thread": patch_bare_threads,
    "ctypes": patch_callbacks,
    "importlib": patch_imports_by_name,
    "concurrent.futures.thread": patch_thread_pool,
}
