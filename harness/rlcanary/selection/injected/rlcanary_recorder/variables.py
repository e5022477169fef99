"""Record which environment variables the project's code reads."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from .core import SESSION, Recorder
from .files import digest

ENVIRONMENT = "environment"
BETWEEN = ("os", "collections.abc", "_collections_abc")  # `os.environ.get` is a method of these


def patch_variables(recorder: Recorder, os: Any) -> None:
    read: Callable[[Any, str], str] = os._Environ.__getitem__

    def get_item(environ: Any, name: str) -> str:
        value = None
        try:
            value = read(environ, name)
            return value
        finally:
            asked(name, value)

    def asked(name: str, value: str | None) -> None:
        context = recorder.context()
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_globals.get("__name__") in BETWEEN:
            frame = frame.f_back
        if context.startswith(SESSION) or frame is None or not recorder.is_project(frame.f_code.co_filename):
            return
        answer = "" if value is None else digest(value.encode(errors="surrogateescape"))
        recorder.say("q", context, ENVIRONMENT, name, answer, *recorder.place(frame))

    get_item.__name__ = "__getitem__"
    os._Environ.__getitem__ = get_item


PATCHES: dict[str, Callable[[Recorder, Any], None]] = {"os": patch_variables}
