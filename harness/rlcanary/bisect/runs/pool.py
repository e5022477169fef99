"""Run probes in parallel, each with its own thread and place. Worthless probes are cancelled."""

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from rlcanary.bisect.record.journal import Observation
from rlcanary.bisect.runs.places import Place
from rlcanary.bisect.runs.probe import Probe
from rlcanary.system.git import Commit
from rlcanary.system.sessions import LOOK_SECONDS, Cancellation, Interrupts, Stopped


@dataclass(frozen=True)
class Running:
    """A running probe."""

    number: int
    commit: Commit
    place: Place
    cancellation: Cancellation
    thread: threading.Thread


@dataclass(frozen=True)
class Finished:
    number: int
    commit: Commit
    observation: Observation | None
    """The probe's result. None if it was cancelled."""


class Pool:
    """The running probes. Use it from one thread. `wait` raises again what a probe raised."""

    def __init__(self, probe: Probe, places: Sequence[Place], interrupts: Interrupts, first_number: int) -> None:
        self._probe = probe
        self._free = list(reversed(places))
        self._interrupts = interrupts
        self._running: dict[int, Running] = {}
        self._results: queue.Queue[tuple[int, Observation | None, BaseException | None]] = queue.Queue()
        self._next_number = first_number

    @property
    def free(self) -> int:
        """The number of probes that may start now."""
        return len(self._free)

    @property
    def running(self) -> list[Running]:
        """The running probes that are not cancelled, oldest first."""
        return [running for running in self._running.values() if not running.cancellation.is_cancelled]

    @property
    def is_idle(self) -> bool:
        return not self._running

    def start(self, commit: Commit) -> int:
        """Start a probe of the commit and return the number of its run."""
        number, place = self._next_number, self._free.pop()
        self._next_number += 1
        cancellation = Cancellation(self._interrupts)

        def work() -> None:
            observation: Observation | None = None
            failure: BaseException | None = None
            try:
                observation = self._probe.run(commit, number, place, cancellation)
            except Stopped:
                pass
            except BaseException as error:  # noqa: BLE001 - raised again by `wait`
                failure = error
            self._results.put((number, observation, failure))

        thread = threading.Thread(target=work, name=f"probe {number}")
        self._running[number] = Running(number, commit, place, cancellation, thread)
        thread.start()
        return number

    def wait(self, seconds: float = LOOK_SECONDS) -> list[Finished]:
        """Return the finished probes. Wait up to `seconds` for the first.

        An exception of a probe is raised again.
        """
        finished: list[Finished] = []
        try:
            result = self._results.get(timeout=seconds)
            while True:
                number, observation, failure = result
                if failure is not None and finished:
                    self._results.put(result)  # raised by the next call: what has finished is kept first
                    return finished
                running = self._running.pop(number)
                running.thread.join()
                self._free.append(running.place)
                if failure is not None:
                    raise failure
                finished.append(Finished(number, running.commit, observation))
                result = self._results.get_nowait()
        except queue.Empty:
            return finished

    def stop(self) -> list[Finished]:
        """Stop all running probes and return those that finished before the stop."""
        for running in self._running.values():
            running.cancellation.cancel()
        for running in self._running.values():
            running.thread.join()
        finished: list[Finished] = []
        while not self._results.empty():
            number, observation, _ = self._results.get_nowait()
            finished.append(Finished(number, self._running.pop(number).commit, observation))
        self._running.clear()
        return finished
