"""Assign threads, and work handed to a pool of threads, to the context that started them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from .core import Recorder, current

# Threads of these do no work for a test, and some never end.
NOT_WORK = {"ray", "grpc", "execnet", "rlcanary_recorder", "rlcanary", "pytest_rlcanary"}


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


PATCHES: dict[str, Callable[[Recorder, Any], None]] = {
    "threading": patch_threading,
    "concurrent.futures.thread": patch_thread_pool,
}
