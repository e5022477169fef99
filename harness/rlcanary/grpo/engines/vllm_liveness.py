"""End calls to a vLLM engine when the engine ends: vLLM itself waits forever for a process that was killed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from rlcanary.grpo.engines.engine_pool import EngineDied

Result = TypeVar("Result")
# Seconds between two looks at the engine while it is busy.
LOOK = 0.2


def while_alive(llm: Any, call: Callable[[], Result]) -> Result:
    """Call a function of a `vllm.LLM`; return its result or raise its error.

    It runs in a thread of its own, which is given up with the engine: nothing else ends a wait inside vLLM.

    Raises:
        EngineDied: the engine's process ended before or during the call.
    """
    outcome: Future[Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            outcome.set_exception(error)

    if not _is_dead(llm):
        threading.Thread(target=run, name="vllm call", daemon=True).start()
    while True:
        was_dead = _is_dead(llm)
        try:
            return outcome.result(timeout=LOOK)
        except TimeoutError:
            if outcome.done():
                raise
            if was_dead:
                raise EngineDied("the vLLM engine's process has ended: start another one") from None


def _is_dead(llm: Any) -> bool:
    """Read vLLM's own note, which its monitor writes within moments of the end of a process."""
    resources = getattr(llm.llm_engine.engine_core, "resources", None)
    return bool(getattr(resources, "engine_dead", False))
