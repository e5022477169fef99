"""Record the processes that a recorded process starts, under contexts of their own which the parent uses."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from .core import ANYTHING, CONTEXT, Recorder
from .files import signature

START = "start"
POOLS = ("multiprocessing.pool", "concurrent.futures.process")  # tell by themselves who hands them work


def child_context(recorder: Recorder, kind: str, text: str) -> str:
    context = f"{recorder.process}.{os.getpid()}.{next(recorder.children)}"
    recorder.write("l", context, kind, text)
    recorder.uses(context)
    return context


def patch_subprocess(recorder: Recorder, subprocess: ModuleType) -> None:
    initialise = subprocess.Popen.__init__
    names = initialise.__code__.co_varnames[2 : initialise.__code__.co_argcount]

    def started(process: Any, args: Any, *positional: Any, **options: Any) -> None:
        options.update(zip(names, positional, strict=False))
        command = words(args, options.get("executable"))
        context = child_context(recorder, "subprocess", " ".join(command)[:200])
        folder = os.path.abspath(os.fsdecode(options.get("cwd") or "."))
        report_command(recorder, context, command, folder)
        given = options.get("env")
        environment = {
            os.fsdecode(name): os.fsdecode(value) for name, value in (os.environ if given is None else given).items()
        }
        options["env"] = environment | recorder.environment(context, environment.get("PYTHONPATH", ""))
        initialise(process, args, **options)
        recorder.outlasting(context, process.pid, pipe=not process.stdin is process.stdout is None)

    subprocess.Popen.__init__ = started


def words(command: Any, executable: Any) -> list[str]:
    if isinstance(command, str | bytes | os.PathLike):
        parts: Sequence[Any] = os.fsdecode(command).split()
    else:
        parts = list(command or ())
    return [os.fsdecode(part) for part in ([executable] if executable else []) + list(parts)]


def report_command(recorder: Recorder, context: str, command: list[str], folder: str) -> None:
    """Record the project files that a command names: scripts, which report themselves, and other files, which cannot."""
    scripts: list[str] = []
    for before, word in zip(["", *command], command, strict=False):
        if before == "-m":
            word = os.path.join(*word.split(".")) + ".py"
        path = os.path.join(folder, word)
        file = recorder.relative(path) if word and not word.startswith("-") else None
        if file is None or not os.path.isfile(path):
            continue
        if file.endswith(".py"):
            scripts.append(file)
        else:
            recorder.say("d", context, file, signature(os.stat(path)))
    if not scripts and os.path.basename(command[0] if command else "").startswith("python") and "-c" in command:
        scripts = [ANYTHING]
    if scripts:
        recorder.write("s", context, START, *scripts)


def patch_multiprocessing(recorder: Recorder, process: ModuleType) -> None:
    base = process.BaseProcess
    start: Callable[[Any], None] = base.start
    bootstrap: Callable[..., int] = base._bootstrap

    def started(child: Any) -> None:
        context = child_context(recorder, "process", child.name)
        target = getattr(child, "_target", None)
        file = recorder.relative(getattr(getattr(target, "__code__", None), "co_filename", "<>"))
        recorder.write("s", context, START, *([file] if file else []))
        # With it the child knows its context, whichever way it is started; the environment serves its first imports.
        child._rlcanary_context = context
        outer = os.environ.get(CONTEXT)
        os.environ[CONTEXT] = context
        try:
            start(child)
            if getattr(target, "__module__", "") not in POOLS:
                recorder.outlasting(context, child.pid, pipe=True)
        finally:
            os.environ.pop(CONTEXT) if outer is None else os.environ.update({CONTEXT: outer})

    def run(child: Any, *arguments: Any, **options: Any) -> int:
        if context := getattr(child, "_rlcanary_context", None):
            recorder.become(context)
            recorder.write("r", context, START)
        return bootstrap(child, *arguments, **options)

    base.start, base._bootstrap = started, run


def patch_pool(recorder: Recorder, pool: ModuleType) -> None:
    """Make a test that gives work to a pool use the pool's processes, whichever context started them."""
    check: Callable[[Any], None] = pool.Pool._check_running

    def checked(given: Any) -> None:
        check(given)
        use_processes(recorder, given._pool)

    pool.Pool._check_running = checked


def patch_process_pool(recorder: Recorder, futures: ModuleType) -> None:
    submit: Callable[..., Any] = futures.ProcessPoolExecutor.submit

    def submitted(executor: Any, /, *arguments: Any, **options: Any) -> Any:
        future = submit(executor, *arguments, **options)
        use_processes(recorder, (executor._processes or {}).values())
        return future

    futures.ProcessPoolExecutor.submit = submitted


def use_processes(recorder: Recorder, processes: Any) -> None:
    for child in list(processes):
        if context := getattr(child, "_rlcanary_context", None):
            recorder.uses(context)


PATCHES: dict[str, Callable[[Recorder, Any], None]] = {
    "subprocess": patch_subprocess,
    "multiprocessing.process": patch_multiprocessing,
    "multiprocessing.pool": patch_pool,
    "concurrent.futures.process": patch_process_pool,
}
