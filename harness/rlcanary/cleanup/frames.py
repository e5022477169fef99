"""Release the objects that a failed test's traceback holds."""

from __future__ import annotations

import traceback


def clear_tracebacks(error: BaseException) -> None:
    """Clear the local variables of every finished frame behind an exception, its causes, contexts and group members.

    A traceback holds each frame's variables, and so every tensor and actor handle of a failed test, for as long as pytest
    holds the exception.
    """
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        current = waiting.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        for frame, _ in traceback.walk_tb(current.__traceback__):
            try:
                frame.clear()
            except RuntimeError:  # it has not finished
                continue
            frame.f_locals  # noqa: B018 - brings the copy up to date that Python 3.11 and 3.12 keep of an earlier look
        waiting += [current.__cause__, current.__context__]
        if isinstance(current, BaseExceptionGroup):
            waiting += current.exceptions
