"""Workers that judge completions in a process of their own, which can be ended whatever it does: a child, or a Ray actor."""

from __future__ import annotations

import logging
import math
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Protocol

from rlcanary.errors import UserError
from rlcanary.grpo.rewards.verifier import Score, Verifier, judge

log = logging.getLogger(__name__)
log.addHandler(logging.NullHandler())

START_SECONDS = 600.0
ALARM_SECONDS = 30

Bounds = tuple[float, float]
Factory = Callable[[], Verifier]
"""Makes the verifier, in the worker."""


class DidNotStart(Exception):
    """A worker did not start or warm up, with the reason."""


class Worker(Protocol):
    """A process with a verifier. It is given a first completion and target to warm up, whose score does not matter."""

    def wait_ready(self, timeout_s: float) -> Bounds:
        """Wait until the worker has started -> the bounds of its verifier.

        Raises:
            DidNotStart: it has not, or not in time.
        """

    def verify(self, completion: str, target: Any, timeout_s: float) -> Score:
        """Score one completion; "timeout" and "worker died" are problems of a worker that is of no more use.

        Raises:
            UserError: as `Verifier.verify`.
        """

    def kill(self) -> None:
        """End the process."""


class ChildWorker:
    """A child process of this one. What it is sent has to be picklable."""

    def __init__(self, factory: Factory, completion: str, target: Any) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", __name__, str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self._connection = Connection(ours.detach())
        self._bounds: Bounds | None = None
        self._send(START_SECONDS, factory, completion, target)

    def wait_ready(self, timeout_s: float) -> Bounds:
        if self._bounds is None:
            try:
                if not self._connection.poll(timeout_s):
                    raise DidNotStart(f"it took more than {timeout_s:g} seconds")
                answer = self._connection.recv()
            except (EOFError, OSError) as error:
                raise DidNotStart(f"its process ended with exit code {self._process.wait()}") from error
            if isinstance(answer, Exception):
                raise DidNotStart(f"{type(answer).__name__}: {answer}")
            self._bounds = answer
        return self._bounds

    def verify(self, completion: str, target: Any, timeout_s: float) -> Score:
        try:
            self._send(timeout_s, completion, target)
            if not self._connection.poll(timeout_s):
                return Score(None, "timeout", detail=f"no score within {timeout_s:g} seconds")
            answer = self._connection.recv()
        except (EOFError, OSError):
            return Score(None, "worker died", detail=f"its process ended with exit code {self._process.wait()}")
        if isinstance(answer, UserError):
            raise answer
        score: Score = answer
        return score

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _send(self, *message: Any) -> None:
        self._connection.send_bytes(pickle.dumps(message))


class RayWorker:
    """An actor; Ray has to be connected."""

    def __init__(self, factory: Factory, completion: str, target: Any) -> None:
        import ray

        self._actor = ray.remote(_Judge).options(num_cpus=0).remote()
        self._is_ready = self._actor.get_ready.remote(factory, completion, target)

    def wait_ready(self, timeout_s: float) -> Bounds:
        import ray

        try:
            bounds: Bounds = ray.get(self._is_ready, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise DidNotStart(f"it took more than {timeout_s:g} seconds") from error
        except ray.exceptions.RayError as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            raise DidNotStart(lines[-1].strip()) from error
        return bounds

    def verify(self, completion: str, target: Any, timeout_s: float) -> Score:
        import ray

        try:
            score: Score = ray.get(self._actor.verify.remote(completion, target), timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            return Score(None, "timeout", detail=f"no score within {timeout_s:g} seconds")
        except ray.exceptions.RayActorError as error:
            return Score(None, "worker died", detail=str(error).partition("\n")[0])
        return score

    def kill(self) -> None:
        import ray

        ray.kill(self._actor)


class _Judge:
    """Runs a verifier."""

    _verifier: Verifier

    def get_ready(self, factory: Factory, completion: str, target: Any) -> Bounds:
        # Not in the constructor: of one that fails Ray sometimes reports only that the process has ended.
        self._verifier = factory()
        judge(self._verifier, completion, target)
        return self._verifier.bounds

    def verify(self, completion: str, target: Any) -> Score:
        return judge(self._verifier, completion, target)


def _serve(connection: Connection) -> None:
    """Answer the messages of a `ChildWorker` until it is gone.

    The kernel's alarm ends this process where a call hangs and nobody is left to kill it: no Python has to run for that.
    """
    judge_here = _Judge()
    call: Callable[..., Any] = judge_here.get_ready
    while True:
        try:
            limit_s, *message = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        signal.alarm(math.ceil(limit_s) + ALARM_SECONDS)
        try:
            answer = call(*message)
        except Exception as error:
            log.warning("the verifier could not be made, or was set up wrongly", exc_info=True)
            answer = error if isinstance(error, UserError) else RuntimeError(f"{type(error).__name__}: {error}")
        signal.alarm(0)
        connection.send(answer)
        call = judge_here.verify


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
