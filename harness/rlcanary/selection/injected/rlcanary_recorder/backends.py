"""Notice when a function of the project begins to run or is resumed."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.machinery import PathFinder
from types import CodeType, FrameType, ModuleType
from typing import Any, Protocol

FINDER, WATCHER = 3, 4  # the unassigned tool numbers of sys.monitoring


class Noticing(Protocol):
    """The recorder's methods that a backend calls."""

    is_project_file: dict[str, bool]

    def is_project(self, filename: str) -> bool: ...

    def hit(self, code: CodeType) -> bool: ...

    def lose_sight(self) -> None: ...


class Backend(Protocol):
    def start(self) -> None: ...

    def rearm(self) -> None:
        """Watch all code again when work changes hands."""

    def check(self) -> None:
        """Make sure that this thread is watched."""

    def resting_here(self) -> AbstractContextManager[None]:
        """Stop watching while a module from elsewhere is imported: much of its code is not the project's."""


def choose_backend(recorder: Noticing, may_trace: bool) -> Backend:
    """Choose the backend.

    `sys.monitoring` from Python 3.12 on; before, coverage's C tracer, or a profile function if that is not free.
    """
    monitoring: Any = getattr(sys, "monitoring", None)
    if monitoring is not None and all(monitoring.get_tool(tool) is None for tool in (FINDER, WATCHER)):
        return Monitoring(recorder, monitoring)
    tracer = c_tracer() if may_trace and sys.version_info < (3, 12) and sys.gettrace() is None else None
    return Profile(recorder) if tracer is None else CTracer(recorder, tracer)


class Monitoring:
    """Watches with Python 3.12's `sys.monitoring`.

    One tool finds project code and never looks at other code again; the other watches the code found. Watching is
    switched off code by code, and on again only for the code that was switched off, so that a new test costs nothing
    for everything else that runs in the process.
    """

    def __init__(self, recorder: Noticing, monitoring: Any) -> None:
        self.recorder, self.monitoring = recorder, monitoring
        self.resting: list[CodeType] = []
        self.watched = monitoring.events.PY_START | monitoring.events.PY_RESUME

    def start(self) -> None:
        monitoring, events, recorder = self.monitoring, self.monitoring.events, self.recorder
        is_project_file, is_project, not_again = recorder.is_project_file, recorder.is_project, monitoring.DISABLE

        def find(code: CodeType, _offset: int) -> Any:
            known = is_project_file.get(code.co_filename)
            if known or (known is None and is_project(code.co_filename)):
                if recorder.hit(code):
                    self.resting.append(code)
                else:
                    monitoring.set_local_events(WATCHER, code, self.watched)
            return not_again

        def watch(code: CodeType, _offset: int) -> None:
            if recorder.hit(code):
                monitoring.set_local_events(WATCHER, code, 0)
                self.resting.append(code)

        monitoring.use_tool_id(FINDER, "rlcanary-finder")
        monitoring.use_tool_id(WATCHER, "rlcanary-watcher")
        monitoring.register_callback(FINDER, events.PY_START, find)
        for event in (events.PY_START, events.PY_RESUME):
            monitoring.register_callback(WATCHER, event, watch)
        monitoring.set_events(FINDER, events.PY_START)

    def resting_here(self) -> AbstractContextManager[None]:
        return nullcontext()

    def check(self) -> None: ...

    def rearm(self) -> None:
        if self.resting:
            resting, self.resting = self.resting, []
            for code in resting:
                self.monitoring.set_local_events(WATCHER, code, self.watched)


class Hook:
    """A function that Python calls in each thread that sets it, and that code under test may replace or remove.

    Every thread sets it when its work begins (`threads.patch_threading`).
    """

    def __init__(self, recorder: Noticing) -> None:
        self.recorder = recorder
        self.here = threading.local()
        self.renew_lock()
        os.register_at_fork(after_in_child=self.renew_lock)  # the thread that held it is not in the child

    def renew_lock(self) -> None:
        # A thread cannot set its hook while another sets its own, which takes as long as the audit hooks. So no hook is set
        # by `threading.settrace`, where Python would do it without this lock, and end the thread.
        self.setting = threading.RLock()

    def start(self) -> None:
        self.start_here()

    def is_set(self) -> bool:
        raise NotImplementedError

    def is_taken(self) -> bool:
        """Tell if a function of other code is set."""
        raise NotImplementedError

    def set_here(self) -> None:
        raise NotImplementedError

    def remove_here(self) -> None:
        raise NotImplementedError

    def start_here(self) -> None:
        with self.setting:
            self.set_here()
        self.here.started = True

    @contextmanager
    def resting_here(self) -> Iterator[None]:
        if not self.is_set():
            yield
            return
        self.here.started = False
        with self.setting:
            self.remove_here()
        try:
            yield
        finally:
            if not self.is_taken():
                self.start_here()

    def rearm(self) -> None:
        self.check()

    def check(self) -> None:
        if self.is_set():
            return
        if self.is_taken() or getattr(self.here, "started", False):
            self.recorder.lose_sight()
        if not self.is_taken():
            self.start_here()


class Profile(Hook):
    """A profile function: slow where much other code runs, but it leaves `sys.settrace` to coverage and debuggers."""

    def __init__(self, recorder: Noticing) -> None:
        super().__init__(recorder)
        is_project_file, hit, is_project = recorder.is_project_file, recorder.hit, recorder.is_project

        def profile(frame: FrameType, event: str, _argument: object) -> None:
            if event == "call":
                code = frame.f_code
                known = is_project_file.get(code.co_filename)
                if known or (known is None and is_project(code.co_filename)):
                    hit(code)

        self.profile = profile

    def is_set(self) -> bool:
        return sys.getprofile() is self.profile

    def is_taken(self) -> bool:
        return sys.getprofile() not in (None, self.profile)

    def set_here(self) -> None:
        sys.setprofile(self.profile)

    def remove_here(self) -> None:
        sys.setprofile(None)


class CTracer(Hook):
    """Watches with coverage's tracer on Python 3.11: it passes over other code in C and asks about project calls.

    It asks because a file may have a "dynamic source filename", for templates; told that there is none, it records no
    lines. Thus a function is known when it begins to run, not when its lines are collected: a kill loses nothing.
    """

    _coverage_plugin_name = "rlcanary"

    def __init__(self, recorder: Noticing, module: Any) -> None:
        super().__init__(recorder)
        self.module = module
        self.dispositions: dict[str, Any] = {}
        # A tracer that is collected switches tracing off in whatever thread that happens.
        self.tracers: list[Any] = []
        self._coverage_plugin = self
        self.resting: set[tuple[str, int]] = set()
        self.dynamic_source_filename = looking(recorder, self.resting)

    def disposition(self, filename: str, frame: FrameType) -> Any:
        is_project = self.recorder.is_project(filename)
        found = self.module.CFileDisposition()
        found.original_filename = found.canonical_filename = found.source_filename = filename
        found.trace = found.has_dynamic_filename = is_project
        found.reason, found.file_tracer = "", self if is_project else None
        return found

    def rearm(self) -> None:
        self.resting.clear()
        super().rearm()

    def new_tracer(self) -> Any:
        tracer = self.module.CTracer()
        tracer.data, tracer.file_tracers, tracer.trace_arcs = {}, {}, False
        tracer.should_trace, tracer.should_trace_cache = self.disposition, self.dispositions
        tracer.concur_id_func = tracer.should_start_context = tracer.switch_context = None
        tracer.warn = tracer.check_include = tracer.disable_plugin = lambda *_, **__: False
        tracer.lock_data = tracer.unlock_data = lambda: None
        return tracer

    def is_set(self) -> bool:
        tracer = getattr(self.here, "tracer", None)
        return tracer is not None and sys.gettrace() is tracer

    def is_taken(self) -> bool:
        return sys.gettrace() is not None and not self.is_set()

    def set_here(self) -> None:
        tracer = getattr(self.here, "tracer", None)
        if tracer is None:
            tracer = self.here.tracer = self.new_tracer()
            self.tracers.append(tracer)
        tracer.start()

    def remove_here(self) -> None:
        sys.settrace(None)


def looking(recorder: Noticing, resting: set[tuple[str, int]]) -> Callable[[str, FrameType], None]:
    """Make the function that the tracer calls at every call: what it does for resting code is what recording costs.

    Code is told apart by its line, because Python calls all audit hooks where `f_code` is read. A lambda that begins on
    the line of a function counts as that function (`SourceFile.blocks_at`).
    """
    hit = recorder.hit

    def look(filename: str, frame: FrameType) -> None:
        if (filename, frame.f_lineno) not in resting and hit(frame.f_code):
            resting.add((filename, frame.f_lineno))

    return look


def c_tracer() -> ModuleType | None:
    """Import coverage's C tracer without the rest of coverage, whose import takes long; None if it is missing."""
    package = PathFinder.find_spec("coverage")
    if package is None or not package.submodule_search_locations:
        return None
    spec = PathFinder.find_spec("coverage.tracer", package.submodule_search_locations)
    if spec is None or spec.loader is None:
        return None
    module = sys.modules.get("coverage.tracer")
    if module is None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module if hasattr(module, "CFileDisposition") else None
