"""The recorder of one process.

Work belongs to a *context*: a test (`t:…`), the set-up of a shared fixture (`x:…`), the import of a module (`m:path`), or a
process of its own (`p:…`). Contexts use one another: a test uses an actor's process, which uses the modules it imported.
"""

from __future__ import annotations

import contextvars
import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from types import CodeType, FrameType, ModuleType
from typing import Any

from .backends import choose_backend
from .files import Files, callers, is_own, signature
from .writing import JournalWriter

PACKAGE = "rlcanary_recorder"
SETTINGS = "RLCANARY_SELECTION"
CONTEXT = "RLCANARY_SELECTION_CONTEXT"
UNKNOWN = "unknown"
SESSION = "session"
MODULE_PREFIX = "module:"  # of a callee's file, where only the name of the module is known
ANYTHING = "*"  # as a callee's file: any code of the project
NOT_PROJECT = ("/site-packages/", "/dist-packages/", "/.venv/", "/node_modules/")
TEST = "t:"  # begins the context of a test
OUTLIVES = (
    "a process outlived the test that started it: what a later test hands it otherwise than by a pipe is not seen"
)
CALLS = 50  # of a function in a context are looked at for who calls it; most tests have fewer
REMEMBERED = 20_000  # of them at a time, so that none is written twice
UPLOADED = "/_ray_pkg_"  # where Ray unpacks a working_dir and py_modules

current: contextvars.ContextVar[str | None] = contextvars.ContextVar("rlcanary_context", default=None)


class Recorder(JournalWriter):
    """Records the code that this process ran, appended to `folder/<process>.journal`.

    Args:
        folder: the folder of the run, shared by all processes of this machine.
        root: the project; code and data elsewhere are not recorded.
        context: owner of work that no call from elsewhere began; by default the process itself.
        injected: the folder that children need on PYTHONPATH; by default the one that this module was loaded from.
        may_trace: true if no other code in this process will use `sys.settrace`.
    """

    def __init__(
        self, folder: str, root: str, context: str | None = None, injected: str | None = None, may_trace: bool = True
    ) -> None:
        self.root = root
        self.injected = injected or injected_folder()
        self.roots = tuple({root + "/", os.path.realpath(root) + "/"})
        super().__init__(folder, f"p:{os.getpid()}-{os.urandom(3).hex()}")
        self.default = context or self.process
        self.always = False
        self.blind = False  # where calls into other processes cannot be followed
        self.children = itertools.count()
        self.running: Counter[str] = Counter()
        self.resting_for: str | None = None  # the context for which code that was seen is not watched
        self.calls: Counter[str] = Counter()  # those of them that came from other processes
        self.started: dict[tuple[str, int], str] = {}  # processes that are handed work, also by later tests
        self.connectable: list[tuple[str, int]] = []  # processes that are, once this one connects to something
        self.at_handover: Callable[[], None] = nothing
        self.files = Files(self, SESSION)
        self.is_project_file: dict[str, bool] = {}
        self.codes: dict[int, CodeType] = {}  # keeps them alive, so that an id stays a name
        self.seen: dict[str, dict[int, int]] = {}  # by context, how many calls of a code object were looked at
        # A context's code object, and the code and the place in it that called.
        self.called: set[tuple[str, int, int, int]] = set()
        self.backend = choose_backend(self, may_trace)

    def context(self) -> str:
        return current.get() or self.default

    def uses(self, context: str) -> None:
        if (user := self.context()) != context:
            self.say("u", user, context, *self.place(sys._getframe(1)))

    def uses_module(self, name: str) -> None:
        """Note that code got hold of a module, or a class in it, that may have been imported long before."""
        path = getattr(sys.modules.get(name), "__file__", None)
        if path is not None and self.is_project(path) and not self.context().startswith(SESSION):
            self.uses(f"m:{self.relative(path)}")

    def place(self, frame: FrameType | None) -> tuple[str, str]:
        """Return the file and the line of the nearest code of the project."""
        found = self.caller(frame)
        return ("", "0") if found is None else (self.relative(found.f_code.co_filename) or "", str(found.f_lineno))

    def caller(self, frame: FrameType | None) -> FrameType | None:
        """Return the frame of the nearest code of the project; None if there is none."""
        for each in callers(frame, 100):
            if self.is_project(each.f_code.co_filename) and not is_own(each):
                return each
        return None

    def is_project(self, filename: str) -> bool:
        known = self.is_project_file.get(filename)
        if known is None:
            known = self.is_project_file[filename] = self.relative(filename) is not None
        return known

    def relative(self, path: str) -> str | None:
        """Return the path inside the project, or inside a folder that Ray uploaded; None for any other path."""
        if path.startswith("<"):
            return None
        if not path.startswith("/") or "/.." in path or "/./" in path:
            try:
                path = os.path.abspath(path)
            except FileNotFoundError:  # the current folder was removed
                return None
        if any(part in path for part in NOT_PROJECT):
            return None
        if UPLOADED in path:
            return UPLOADED + path.split(UPLOADED, 1)[1]
        for root in self.roots:
            if path.startswith(root):
                return path[len(root) :] or "."
        return "." if path + "/" in self.roots else None

    def hit(self, code: CodeType) -> bool:
        """Record a code object of the project; return true if it can be ignored until work changes hands."""
        context = current.get() or self.default
        frame = sys._getframe(2).f_back  # over the backend's function and the code itself
        enough = self.note(context, code, frame)
        if context != self.default and context.startswith(TEST):
            if self.default.startswith(TEST):
                # An earlier test began this, and the present one may have handed it work.
                enough &= self.note(self.default, code, frame)
            elif context not in self.calls:
                # It outlives its call, so that every user of this process may need it.
                enough &= self.note(self.default, code, frame)
        if context not in self.running and context != self.default:
            self.always = True  # something that an earlier test began is still running
        return enough and not self.always and len(self.running) == 1 and context in self.running

    def note(self, context: str, code: CodeType, frame: FrameType | None) -> bool:
        """Record a code object for a context, with the place of the call; return true once no more calls are looked at.

        Who called one that was called more often is not all known, and a record without a place says so.
        """
        seen = self.seen.get(context)
        if seen is None:
            seen = self.seen[context] = {}
        calls = seen.get(id(code), 0)
        if calls >= CALLS:
            return True
        seen[id(code)] = calls + 1
        enough = calls + 1 == CALLS
        caller = None if enough else self.caller(frame)
        key = (context, id(code), int(enough), 0)
        if caller is not None:
            calling = caller.f_code
            self.codes[id(calling)] = calling
            key = (context, id(code), id(calling), caller.f_lasti)
        if key not in self.called:
            self.codes[id(code)] = code
            if len(self.called) >= REMEMBERED:
                self.called.clear()
            self.called.add(key)
            file = self.relative(code.co_filename)
            if file is not None:
                self.write("c", context, file, str(code.co_firstlineno), code.co_qualname, *self.place(caller))
        return enough

    def note_test(self, context: str, code: CodeType) -> None:
        """Record the function of a test, also where it is skipped. pytest calls it, and that counts as a known place."""
        self.codes[id(code)] = code
        self.called.add((context, id(code), 0, 0))
        file = self.relative(code.co_filename)
        if file is not None:
            self.write("c", context, file, str(code.co_firstlineno), code.co_qualname, file, "0")

    def lose_sight(self) -> None:
        """Note that the hook which shows running code was removed."""
        self.say("a", self.context())

    def begin(self, context: str) -> None:
        self.running[context] += 1
        self.hand_over()

    def end(self, context: str) -> None:
        self.running[context] -= 1
        if self.running[context] <= 0:
            del self.running[context]
        self.hand_over()

    def hand_over(self) -> None:
        """Watch all code again, unless the only work is for the context whose code rests already, or there is none."""
        only = next(iter(self.running), self.resting_for) if len(self.running) < 2 else None
        if only is not None and only == self.resting_for:
            self.backend.check()
        else:
            self.resting_for = only
            self.backend.rearm()

    def watch_again(self) -> None:
        self.resting_for = None
        self.backend.rearm()

    def begin_call(self, context: str) -> None:
        self.calls[context] += 1
        self.begin(context)

    def end_call(self, context: str) -> None:
        if self.started:
            self.use_active()
        self.calls[context] -= 1
        if self.calls[context] <= 0:
            del self.calls[context]
        self.end(context)

    def outlasting(self, context: str, pid: int, pipe: bool) -> None:
        """Note a process that a test started, and that a later test may hand work, through a pipe or a connection."""
        if self.context().startswith(TEST):
            if pipe:
                self.started[context, pid] = ""
            else:
                self.connectable.append((context, pid))

    def use_active(self) -> None:
        """Note that the present work used the processes, started by earlier work, that did anything since the last call."""
        for child, before in list(self.started.items()):
            now = self.started[child] = switches(child[1])
            if now != before or now == "":
                self.uses(child[0])
            if not is_running(child[1]):
                del self.started[child]

    def switch(self, context: str) -> None:
        """Switch this process to work for another test."""
        self.at_handover()
        self.use_active()
        if any(is_running(pid) for _, pid in self.connectable):
            self.say("p", OUTLIVES)
        self.running.pop(self.default, None)
        self.default = context
        current.set(None)
        os.environ[CONTEXT] = context
        self.begin(context)

    @contextmanager
    def within(self, context: str, used: bool = True) -> Iterator[None]:
        """Record this thread's work under another context, which the present one uses unless told otherwise."""
        if used:
            self.uses(context)
        self.at_handover()
        outer = current.get()
        current.set(context)
        self.begin(context)
        try:
            yield
        finally:
            self.at_handover()
            self.end(context)
            current.set(outer)

    def importing(self, execute: Callable[[Any, ModuleType], None]) -> Callable[[Any, ModuleType], None]:
        """Wrap a loader's `exec_module` to record the import of a project module as a context of its own."""

        def exec_module(loader: Any, module: ModuleType) -> None:
            path = getattr(module.__spec__, "origin", None) or ""
            if self.is_project(path):
                # Which tests a conftest.py belongs to follows from its folder, not from when it was loaded.
                used = not (path.endswith("/conftest.py") and self.context().startswith(SESSION))
                self.version(path)
                with self.within(f"m:{self.relative(path)}", used):
                    execute(loader, module)
            else:
                with self.backend.resting_here():
                    execute(loader, module)
            if patch := self.patches.get(module.__name__):
                patch(self, module)

        return exec_module

    def version(self, path: str) -> None:
        """Note which version of a module's file is about to be imported."""
        try:
            self.say("v", self.relative(path) or "", signature(self.files.stat(path)))
        except OSError:  # imported from a zip file, or removed just now
            return

    def start(self, patches: dict[str, Callable[[Recorder, Any], None]]) -> None:
        """Begin to record. `patches` are applied to modules of the given names, now or when they are imported."""
        self.patches = patches
        os.register_at_fork(after_in_child=self.after_fork)
        SourceFileLoader.exec_module = self.importing(SourceFileLoader.exec_module)  # type: ignore[assignment, method-assign]
        self.files.start()
        sys.addaudithook(auditing({**self.files.audited(), **self.audited()}))
        for name, patch in patches.items():
            module = sys.modules.get(name)
            if module is not None and not getattr(module.__spec__, "_initializing", False):
                patch(self, module)
        self.backend.start()

    def after_fork(self) -> None:
        self.running.clear()
        self.calls.clear()
        self.watch_again()

    def move(self, folder: str, root: str, context: str) -> None:
        """Continue in the folder of another run: a recorded test started this process, and it is a recorded run itself."""
        os.close(self.descriptor)
        self.folder, self.root = folder, root
        self.roots = tuple({root + "/", os.path.realpath(root) + "/"})
        self.is_project_file.clear()
        self.seen.clear()
        self.called.clear()
        self.files.asked.clear()
        self.files.written.clear()
        self.default = context
        self.begin_anew()
        self.watch_again()

    def become(self, context: str) -> None:
        """Assign this process's work from here on to `context`, for which it was started."""
        current.set(None)
        self.default = context
        self.running.clear()
        self.watch_again()

    def audited(self) -> dict[str, Callable[..., None]]:
        return {
            "pickle.find_class": lambda module, _name: self.uses_module(str(module)),
            "socket.connect": lambda *_: self.use_connected(),
        }

    def use_connected(self) -> None:
        """Note that this process talks to something, which may be any process that it started."""
        for context, pid in self.connectable:
            if is_running(pid):
                self.started[context, pid] = ""
        self.connectable.clear()

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Record nothing of what this thread does."""
        self.at_handover()
        self.use_active()
        with self.backend.resting_here(), self.files.pausing():
            yield
            self.at_handover()

    def environment(self, context: str, python_path: str = "") -> dict[str, str]:
        """Return variables with which a child, otherwise given this PYTHONPATH, records its work under `context`."""
        paths = python_path.split(os.pathsep)
        if self.injected is not None and self.injected not in paths:
            paths.insert(0, self.injected)
        return {
            SETTINGS: f"{self.folder}\n{self.root}",
            CONTEXT: context,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }


def auditing(functions: dict[str, Callable[..., None]]) -> Callable[[str, tuple[Any, ...]], None]:
    """Make an audit hook: there is one, as each slows down all that Python audits."""
    find = functions.get

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        function = find(event)
        if function is not None:
            function(*arguments)

    return hook


def nothing() -> None: ...


def switches(pid: int) -> str:
    """Return a text that changes whenever a waiting process wakes up; empty where the system does not tell."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8") as status:
            return "".join(line for line in status if "ctxt_switches" in line)
    except OSError:
        return ""


def is_running(pid: int) -> bool:
    """Tell if a child process has not ended, without waiting for it in its owner's place."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def injected_folder() -> str | None:
    """Return the folder with this package; None if the package came as text."""
    file = globals().get("__file__")
    return None if file is None else os.path.dirname(os.path.dirname(os.path.abspath(file)))
