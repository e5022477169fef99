"""Running the checks on mutants, each in a forked process, until the first one fails."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, Literal

from rlcanary.checks import run_check
from rlcanary.checks.tally import Fingerprint, Found
from rlcanary.contract.adapter import Adapter
from rlcanary.mutants.mutant import Mutant, Run

# A mutant that takes so much longer than its checks took on the original has stopped working, which is not silent.
TIME_LIMIT_FACTOR, TIME_LIMIT_SECONDS = 20.0, 60.0
# A mutant on which so many checks raise, and none fails, is one that merely crashes.
ENOUGH_RAISED = 5

Verdict = Literal["killed", "crashed", "hung", "survived", "unreached"]


@dataclass(frozen=True)
class Trial:
    """A mutant and the checks that judge it.

    Attributes:
        name: the adapter's name.
        adapter: the original.
        mutant: the mistake.
        runs: the checks that run the mutated place on the original.
    """

    name: str
    adapter: Adapter
    mutant: Mutant
    runs: Sequence[Run]

    @property
    def capabilities(self) -> frozenset[str]:
        """The capabilities through which some check runs the mutated place."""
        return frozenset().union(*(self.mutant.reached_by(run) for run in self.runs))


@dataclass(frozen=True)
class Fate:
    """The verdict on a mutant.

    Attributes:
        verdict: "killed" (a check fails), "crashed" (checks only raise), "hung", "survived", or "unreached" where no check
            runs what the mistake changes.
        check: the check that failed or raised first, "" if none did.
        seconds: the time it took.
    """

    verdict: Verdict
    check: str = ""
    seconds: float = 0.0


@dataclass
class _Worker:
    trial: Trial
    process: ForkProcess
    started: float
    limit: float

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def kill(trials: Sequence[Trial], workers: int | None = None) -> Iterator[tuple[Trial, Fate]]:
    """Judge each mutant in a process of its own; yield the trials with their fates as they end.

    The checks that killed other mutants of the same function come first, then the quick ones.

    Args:
        trials: the mutants and their checks.
        workers: processes at once; by default one per processor.
    """
    context = multiprocessing.get_context("fork")
    limit = workers or len(os.sched_getaffinity(0))
    kills: Counter[tuple[str, str]] = Counter()
    waiting = list(trials)[::-1]
    running: dict[Connection[Any, Any], _Worker] = {}
    try:
        while waiting or running:
            while waiting and len(running) < limit:
                trial = waiting.pop()
                if not trial.runs:
                    yield trial, Fate("unreached")
                    continue
                where = trial.mutant.where
                runs = sorted(trial.runs, key=lambda run: (-kills[where, run.check.id], run.seconds))
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_judge, args=(replace(trial, runs=runs), sender), daemon=True)
                process.start()
                sender.close()
                seconds = TIME_LIMIT_SECONDS + TIME_LIMIT_FACTOR * sum(run.seconds for run in runs)
                running[receiver] = _Worker(trial, process, time.monotonic(), seconds)
            for trial, fate in _ended(running):
                if fate.verdict == "killed":
                    kills[trial.mutant.where, fate.check] += 1
                yield trial, fate
    finally:
        for worker in running.values():
            worker.kill()


def _ended(running: dict[Connection[Any, Any], _Worker]) -> Iterator[tuple[Trial, Fate]]:
    """Take out of `running`, and yield, the trials that ended or ran out of time."""
    for ready in wait(list(running), timeout=0.5):
        assert isinstance(ready, Connection)
        worker = running.pop(ready)
        # A process that ends without a word was killed by what the mutant did.
        fate = Fate("crashed", seconds=time.monotonic() - worker.started)
        with suppress(EOFError):
            fate = ready.recv()
        # It has said all: what a fork of a process with threads does at its end may take for ever.
        worker.kill()
        yield worker.trial, fate
    for receiver, worker in list(running.items()):
        if time.monotonic() - worker.started > worker.limit:
            del running[receiver]
            worker.kill()
            yield worker.trial, Fate("hung", seconds=worker.limit)


def _judge(trial: Trial, sender: Connection[Any, Any]) -> None:
    # The parent ends this process when it is interrupted.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    sender.send(judge(trial))


def judge(trial: Trial) -> Fate:
    """Run the checks on the mutant in this process, until one fails with a finding that the original does not have."""
    started = time.perf_counter()
    adapter, raised = trial.mutant.planted_in(trial.adapter), list[str]()
    for run in trial.runs:
        result = run_check(run.check, adapter, trial.name, until=partial(_kills, run.known))
        new = [found for found in result.findings if _is_new(run.known, found)]
        if any(not found.is_error for found in new):
            return Fate("killed", run.check.id, time.perf_counter() - started)
        raised += [run.check.id] if new else []
        if len(raised) == ENOUGH_RAISED:
            break
    return Fate("crashed" if raised else "survived", "".join(raised[:1]), time.perf_counter() - started)


def _kills(known: tuple[Fingerprint, ...], found: Found) -> bool:
    return not found.is_error and _is_new(known, found)


def _is_new(known: tuple[Fingerprint, ...], found: Found) -> bool:
    return not any(each.covers(found.fingerprint) for each in known)
