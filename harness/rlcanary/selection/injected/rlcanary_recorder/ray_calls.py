"""Make calls of Ray tasks and actor methods carry their context, and bring the recorder along.

The context travels in the name of the task. The recorder travels with the pickled function or class, so that nothing has to
be installed or configured where it runs, and no actor starts more slowly. All names of Ray that are private are used here.
"""

from __future__ import annotations

import functools
import inspect
import marshal
import os
import pickle
import sys
from collections.abc import AsyncGenerator, Callable, Generator
from types import ModuleType
from typing import Any

from .core import MODULE_PREFIX, PACKAGE, UNKNOWN, Recorder, current
from .ray_texts import PATCHES as TEXT_PATCHES
from .ray_texts import context_in, tagged

START = "start"
MODULES = (
    *("backends", "files", "writing", "core"),
    *("children", "threads", "variables", "ray_texts", "ray_calls", "process"),
)

# Evaluated where a function or class is unpickled, with nothing of ours installed there.
UNPICKLE = "exec(bootstrap) or received"
BOOTSTRAP = """
import marshal, pickle, sys, types
try:
    if "rlcanary_recorder" not in sys.modules:
        package = sys.modules["rlcanary_recorder"] = types.ModuleType("rlcanary_recorder")
        package.__path__ = []
        for name, code in codes.items():
            full = "rlcanary_recorder." + name
            module = sys.modules[full] = types.ModuleType(full)
            module.__package__ = "rlcanary_recorder"
            exec(marshal.loads(code), module.__dict__)
            setattr(package, name, module)
        package.codes = codes
    from rlcanary_recorder.process import start_in_ray_worker
    from rlcanary_recorder.ray_calls import receive
    recorder = start_in_ray_worker(folder, root, injected)
except Exception as error:
    print("rlcanary: this process is not recorded:", repr(error), file=sys.stderr)
    received = pickle.loads(pickled)
else:
    received = receive(recorder, callee, pickled)
"""


class Carried:
    """A pickled function or class that starts the recorder where it is unpickled."""

    def __init__(self, recorder: Recorder, callee: str, pickled: bytes) -> None:
        self.names = {
            "bootstrap": BOOTSTRAP,
            "codes": codes(),
            "folder": recorder.folder,
            "root": recorder.root,
            "injected": recorder.injected,
            "callee": callee,
            "pickled": pickled,
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, (UNPICKLE, self.names)


@functools.cache
def codes() -> dict[str, bytes]:
    """Return this package compiled, so that no worker compiles it again; without files, as it came."""
    compiled = {}
    for name in MODULES:
        file = getattr(sys.modules[f"{__package__}.{name}"], "__file__", None)
        if file is None:
            return dict(sys.modules[PACKAGE].codes)
        with open(file, encoding="utf-8") as stream:
            compiled[name] = marshal.dumps(compile(stream.read(), f"<{PACKAGE}.{name}>", "exec", dont_inherit=True))
    return compiled


def receive(recorder: Recorder, callee: str, pickled: bytes) -> Any:
    """Unpickle a function, whose loading belongs to its callers, or an actor's class."""
    if callee == "class":
        return pickle.loads(pickled)
    recorder.say("l", recorder.process, "Ray worker", f"(pid {os.getpid()})")
    loading = f"f:{callee}"
    outer = current.get()
    current.set(loading)
    recorder.begin(loading)
    try:
        function = pickle.loads(pickled)
    finally:
        recorder.end(loading)
        current.set(outer)
    code = getattr(inspect.unwrap(function), "__code__", None)
    answers = code is not None and recorder.is_project(code.co_filename)
    return recorded(recorder, function, function, f"task:{callee}" if answers else "", loading)


def recorded(recorder: Recorder, run: Callable[..., Any], source: Any, callee: str, *uses: str) -> Callable[..., Any]:
    """Wrap `run`, with code in `source`, to record each call under its context and its arrival as `callee`."""
    known: set[str] = set()

    def arrive() -> tuple[str, str | None]:
        context = caller()
        if context not in known:
            known.add(context)
            recorder.say("u", context, recorder.process)
            for used in uses:
                recorder.say("u", context, used)
            if callee:
                recorder.say("r", context, callee)
        outer = current.get()
        current.set(context)
        recorder.begin_call(context)
        return context, outer

    def leave(context: str, outer: str | None) -> None:
        recorder.end_call(context)
        current.set(outer)

    kind: Callable[..., Any]
    if inspect.iscoroutinefunction(source):

        async def coroutine(*arguments: Any, **options: Any) -> Any:
            recorder.always = True  # work that it leaves running goes on beside the next call
            here = arrive()
            try:
                return await run(*arguments, **options)
            finally:
                leave(*here)

        kind = coroutine
    elif inspect.isasyncgenfunction(source):

        async def generate(*arguments: Any, **options: Any) -> AsyncGenerator[Any]:
            recorder.always = True
            here = arrive()
            try:
                async for item in run(*arguments, **options):
                    yield item
            finally:
                leave(*here)

        kind = generate
    elif inspect.isgeneratorfunction(source):

        def iterate(*arguments: Any, **options: Any) -> Generator[Any, Any, Any]:
            here = arrive()
            try:
                return (yield from run(*arguments, **options))
            finally:
                leave(*here)

        kind = iterate
    else:

        def plain(*arguments: Any, **options: Any) -> Any:
            here = arrive()
            try:
                return run(*arguments, **options)
            finally:
                leave(*here)

        kind = plain
    return functools.update_wrapper(kind, run)


def caller() -> str:
    """Return the context that made the call which this worker runs now."""
    from ray._private.worker import global_worker

    return context_in(global_worker.core_worker.get_current_task_name() or "")


def project_file(recorder: Recorder, module_name: str, code: Any = None) -> list[str]:
    """Find the file with the callee's code; a module that is not loaded here is looked up when it is needed."""
    path = getattr(code, "co_filename", None) or getattr(sys.modules.get(module_name), "__file__", None)
    if path is None:
        return [MODULE_PREFIX + module_name]
    file = recorder.relative(path)
    return [file] if file else []


def patch_actors(recorder: Recorder, actor: ModuleType) -> None:
    call: Callable[..., Any] = actor.ActorHandle._actor_method_call
    create: Callable[..., Any] = actor.ActorClass._remote
    if "name" not in inspect.signature(call).parameters:
        raise AttributeError("ActorHandle._actor_method_call takes no name")

    names: dict[tuple[Any, ...], str] = {}

    def called(handle: Any, method_name: str, *arguments: Any, **options: Any) -> Any:
        if not handle._ray_is_cross_language:
            context, given = recorder.context(), options.get("name")
            key = (handle._ray_actor_id, method_name, given, context)
            name = names.get(key)
            if name is None:
                made_by = handle._ray_actor_creation_function_descriptor
                own = made_by.class_name.split(".")[-1]
                name = names[key] = tagged(given or f"{own}.{method_name}", context)
                callee = f"actor:{handle._ray_actor_id.hex()}"
                recorder.say("u", context, callee)
                if ("s", context, callee) not in recorder.said:
                    recorder.said.add(("s", context, callee))
                    recorder.write("s", context, callee, *project_file(recorder, made_by.module_name))
            options["name"] = name
        return call(handle, method_name, *arguments, **options)

    def created(actor_class: Any, *arguments: Any, **options: Any) -> Any:
        handle = create(actor_class, *arguments, **options)
        made = actor_class.__ray_metadata__.modified_class
        identity = getattr(handle, "_ray_actor_id", None)
        context = f"actor:{identity.hex()}" if identity is not None else f"actor:{os.urandom(4).hex()}"
        recorder.uses(context)
        if ("l", context) not in recorder.said:
            recorder.said.add(("l", context))
            recorder.write("l", context, "actor", actor_class.__ray_metadata__.class_name)
            recorder.write("s", context, START, *project_file(recorder, made.__module__))
        return handle

    actor.ActorHandle._actor_method_call = called
    actor.ActorClass._remote = functools.update_wrapper(created, create)


def patch_tasks(recorder: Recorder, remote_function: ModuleType) -> None:
    submit: Callable[..., Any] = remote_function.RemoteFunction._remote

    def submitted(function: Any, *arguments: Any, **options: Any) -> Any:
        if not function._is_cross_language:
            original = function._function
            context, callee = recorder.context(), f"task:{name_of(original)}"
            options["name"] = tagged(options.get("name") or function._function_name.split(".")[-1], context)
            if ("s", context, callee) not in recorder.said:
                recorder.said.add(("s", context, callee))
                code = getattr(inspect.unwrap(original), "__code__", None)
                recorder.write("s", context, callee, *project_file(recorder, original.__module__, code))
        return submit(function, *arguments, **options)

    remote_function.RemoteFunction._remote = functools.update_wrapper(submitted, submit)


def name_of(function: Any) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def patch_functions(recorder: Recorder, function_manager: Any) -> None:
    manager = function_manager.FunctionActorManager
    export: Callable[..., None] = manager.export
    make: Callable[..., Any] = manager._make_actor_method_executor
    dumps: Callable[..., bytes] = function_manager.pickle_dumps

    def dumped(value: Any, message: str) -> bytes:
        pickled = dumps(value, message)
        return pickle.dumps(Carried(recorder, "class", pickled)) if inspect.isclass(value) else pickled

    def exported(this: Any, remote: Any) -> None:
        plain = remote._pickled_function
        remote._pickled_function = pickle.dumps(Carried(recorder, name_of(remote._function), plain))
        try:
            export(this, remote)
        finally:
            remote._pickled_function = plain

    def made(this: Any, name: str, method: Callable[..., Any]) -> Any:
        execute = make(this, name, method)
        worker = this._worker
        wrap = constructing if name == "__init__" else actor_method
        wrapped: Any = wrap(recorder, worker, execute, method)
        wrapped.name, wrapped.method = name, method
        return wrapped

    manager.export, manager._make_actor_method_executor = exported, made
    function_manager.pickle_dumps = dumped


def constructing(
    recorder: Recorder, worker: Any, execute: Callable[..., Any], _method: Callable[..., Any]
) -> Callable[..., Any]:
    """Assign the constructor to the actor's process, and thus to every context that uses it."""

    def construct(this: Any, *arguments: Any, **options: Any) -> Any:
        identity = f"actor:{worker.actor_id.hex()}"
        recorder.say("u", identity, recorder.process)
        recorder.write("l", recorder.process, "actor", f"{type(this).__name__} (pid {os.getpid()})")
        if is_recorded_class(recorder, type(this)):
            recorder.say("r", identity, START)
        return execute(this, *arguments, **options)

    return construct


def is_recorded_class(recorder: Recorder, made: type) -> bool:
    functions = (value for base in made.__mro__ for value in vars(base).values())
    codes = (getattr(function, "__code__", None) for function in functions)
    return any(code is not None and recorder.is_project(code.co_filename) for code in codes)


def actor_method(
    recorder: Recorder, worker: Any, execute: Callable[..., Any], method: Callable[..., Any]
) -> Callable[..., Any]:
    by_actor: dict[str, Callable[..., Any]] = {}

    def wrapper_for(this: Any) -> Callable[..., Any]:
        identity = f"actor:{worker.actor_id.hex()}"
        if identity not in by_actor:
            callee = identity if is_recorded_class(recorder, type(this)) else ""
            by_actor[identity] = recorded(recorder, execute, method, callee)
        return by_actor[identity]

    if inspect.iscoroutinefunction(method):

        async def coroutine(this: Any, *arguments: Any, **options: Any) -> Any:
            return await wrapper_for(this)(this, *arguments, **options)

        return coroutine

    def run(this: Any, *arguments: Any, **options: Any) -> Any:
        return wrapper_for(this)(this, *arguments, **options)

    return run


def patch_compiled_graphs(recorder: Recorder, compiled_dag_node: ModuleType) -> None:
    """Record compiled graphs: their loops belong to the context that compiled them, and executing one uses that."""
    graph = compiled_dag_node.CompiledDAG
    initialise: Callable[..., None] = graph.__init__

    def initialised(this: Any, *arguments: Any, **options: Any) -> None:
        initialise(this, *arguments, **options)
        this._rlcanary_context = recorder.context()

    def using(execute: Callable[..., Any]) -> Callable[..., Any]:
        def executed(this: Any, *arguments: Any, **options: Any) -> Any:
            recorder.uses(getattr(this, "_rlcanary_context", UNKNOWN))
            return execute(this, *arguments, **options)

        return functools.update_wrapper(executed, execute)

    graph.__init__ = functools.update_wrapper(initialised, initialise)
    graph.execute, graph.execute_async = using(graph.execute), using(graph.execute_async)


def guarded(patch: Callable[[Recorder, Any], None]) -> Callable[[Recorder, Any], None]:
    """Apply a patch; if Ray moved something it needs, count all code as used, since calls cannot be followed."""

    def apply(recorder: Recorder, module: Any) -> None:
        try:
            patch(recorder, module)
        except AttributeError as error:
            recorder.write(
                "p", f"calls cannot be recorded in this version of Ray ({error}): tests that load it depend on all code"
            )
            recorder.say("a", recorder.context())
            recorder.blind = True

    return apply


PATCHES: dict[str, Callable[[Recorder, Any], None]] = {
    "ray.actor": guarded(patch_actors),
    "ray.remote_function": guarded(patch_tasks),
    "ray._private.function_manager": guarded(patch_functions),
    **{name: guarded(patch) for name, patch in TEXT_PATCHES.items()},
    "ray.dag.compiled_dag_node": guarded(patch_compiled_graphs),
}
