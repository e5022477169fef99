"""Carry a context in the name of a Ray task, and hide it wherever code under test can read that name."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from .core import PACKAGE, UNKNOWN, Recorder

TAG = " rlc:"
TAGGED = re.compile(re.escape(TAG) + r"[^\s()'\",\[\]]*")
FRAMES = re.compile(r'  File "[^"\n]*rlcanary_recorder[^"\n]*", line .*\n(?:    .*\n?)*')
SPECIAL = re.compile(r"[^\w.:/-]")


@functools.cache
def tagged(name: str, context: str) -> str:
    """Return a task's name that carries a context."""
    return name.partition(TAG)[0] + TAG + SPECIAL.sub(lambda found: f"%{ord(found[0]):x};", context)


@functools.cache
def context_in(name: str) -> str:
    text = name.rpartition(TAG)[2] if TAG in name else UNKNOWN
    return re.sub(r"%([0-9a-f]+);", lambda found: chr(int(found[1], 16)), text)


def without_tags(value: Any) -> Any:
    """Return a text, or a container of texts, without contexts and without the recorder's lines of a traceback."""
    if isinstance(value, str):
        value = TAGGED.sub("", value) if TAG in value else value
        return FRAMES.sub("", value) if PACKAGE in value else value
    if isinstance(value, dict):
        return {without_tags(name): without_tags(each) for name, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(without_tags, value))
    return value


def clean(error: Any) -> None:
    """Remove the contexts from an error of Ray, and from those of Ray that caused it."""
    for name, value in vars(error).items():
        if isinstance(value, str):
            setattr(error, name, without_tags(value))
    error.args = without_tags(error.args)
    if type(getattr(error, "cause", None)).__module__ == "ray.exceptions":
        clean(error.cause)


def patch_errors(_recorder: Recorder, serialization: Any) -> None:
    context_class = serialization.SerializationContext
    read: Callable[..., Any] = context_class._deserialize_object
    error_class: type = serialization.RayError

    def deserialize(this: Any, *arguments: Any, **options: Any) -> Any:
        value = read(this, *arguments, **options)
        if isinstance(value, error_class):
            clean(value)
        return value

    context_class._deserialize_object = functools.update_wrapper(deserialize, read)


def patch_output(_recorder: Recorder, worker: Any) -> None:
    write: Callable[..., Any] = worker.print_worker_logs

    def print_worker_logs(data: Any, *arguments: Any, **options: Any) -> Any:
        names = {name: without_tags(data[name]) for name in ("actor_name", "task_name") if name in data}
        return write({**data, **names}, *arguments, **options)

    worker.print_worker_logs = functools.update_wrapper(print_worker_logs, write)


def patch_state(_recorder: Recorder, api: Any) -> None:
    client = api.StateApiClient
    request: Callable[..., Any] = client._make_http_get_request

    def answered(this: Any, *arguments: Any, **options: Any) -> Any:
        return without_tags(request(this, *arguments, **options))

    client._make_http_get_request = functools.update_wrapper(answered, request)


def patch_names(_recorder: Recorder, runtime_context: Any) -> None:
    context_class = runtime_context.RuntimeContext
    read: Callable[[Any], str | None] = context_class.get_task_name

    def get_task_name(this: Any) -> str | None:
        name: str | None = without_tags(read(this))
        return name

    context_class.get_task_name = functools.update_wrapper(get_task_name, read)


PATCHES: dict[str, Callable[[Recorder, Any], None]] = {
    "ray._private.serialization": patch_errors,
    "ray._private.worker": patch_output,
    "ray.util.state.api": patch_state,
    "ray.runtime_context": patch_names,
}
