"""A limit on foreign code: it ends what runs in Python, in any thread, and leaves nothing behind."""

import math
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from waiting import HANG_S, QUICK_S

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.checks import Result, all_checks, run_check
from rlcanary.checks.time_limit import TookTooLong, time_limit

CHECK = next(check for check in all_checks() if check.id == "advantage.constant_reward_is_zero")


class Loops(ReferenceAdapter):
    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        while True:
            torch.rand(64, 64) @ torch.rand(64, 64)


class CatchesEverything(ReferenceAdapter):
    """Catches the first interruption, as a loop with a bare except does."""

    caught = False

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        while True:
            try:
                while True:
                    pass
            except BaseException:
                if self.caught:
                    raise
                self.caught = True


class Waits(ReferenceAdapter):
    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        threading.Event().wait()
        return rewards


class FailsThenTakesTooLong(ReferenceAdapter):
    """Wrong for two completions; for three the limit passes."""

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        if len(rewards) > 2:
            signal.raise_signal(signal.SIGALRM)
        return rewards + 1


def run(adapter: ReferenceAdapter, timeout: float = 2) -> Result:
    return run_check(CHECK, adapter, "mine", timeout=timeout)


@pytest.mark.parametrize("adapter", [Loops(), CatchesEverything(), Waits()], ids=lambda each: type(each).__name__)
def test_check_that_takes_too_long_is_an_error_of_one_line(adapter: ReferenceAdapter) -> None:
    result = run(adapter)
    assert (result.status, result.message) == ("error", "took longer than 2 s: advantages([2], [2])")


@pytest.mark.parametrize("adapter", [Loops(), CatchesEverything()], ids=lambda each: type(each).__name__)
def test_the_limit_holds_in_other_threads(adapter: ReferenceAdapter) -> None:
    results: list[Result] = []
    thread = threading.Thread(target=lambda: results.append(run(adapter)))
    thread.start()
    thread.join()
    assert [result.status for result in results] == ["error"]
    assert results[0].message.startswith("took longer than 2 s")


def test_what_was_found_before_the_limit_is_kept() -> None:
    result = run(FailsThenTakesTooLong(), timeout=1000)
    assert result.status == "fail"
    assert result.message.splitlines()[-1].endswith("takes too long")


def test_alarm_of_the_caller_is_left_as_it_was() -> None:
    rang: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: rang.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 1000)
        with time_limit(500):
            pass
        left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
        assert 500 < left <= 1000
        signal.raise_signal(signal.SIGALRM)
        assert rang == [signal.SIGALRM]
    finally:
        signal.signal(signal.SIGALRM, before)


def test_gradients_are_on_again_where_the_limit_came_before_they_were_put_on() -> None:
    def change_modes_and_wait() -> None:
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        time.sleep(HANG_S)

    with pytest.raises(TookTooLong), time_limit(0.01):
        change_modes_and_wait()
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() == torch.float32


def test_no_limit_is_none() -> None:
    with time_limit(0):
        time.sleep(0.01)
    with pytest.raises(TookTooLong), time_limit(0.01):
        time.sleep(60)


class WrongThenWaits(ReferenceAdapter):
    """Wrong in this many calls, and waits in the ones after them."""

    calls = 0

    def __init__(self, calls_before: float = math.inf) -> None:
        super().__init__()
        self.calls_before = calls_before

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        if self.calls == self.calls_before:
            threading.Event().wait()
        self.calls += 1
        return rewards + 1


def test_search_for_another_declaration_has_the_limit_of_its_check() -> None:
    check = next(check for check in all_checks() if check.id == "advantage.declared_formula")
    alone = WrongThenWaits()
    plain = run_check(replace(check, alternatives=lambda _: ()), alone, "mine", timeout=HANG_S)
    waiting = WrongThenWaits(alone.calls)
    result = run_check(check, waiting, "mine", timeout=QUICK_S)
    assert waiting.calls == alone.calls
    assert (result.status, result.message) == (plain.status, plain.message)


IN_A_THREAD = """
import sys, threading
from rlcanary.checks.time_limit import TookTooLong, time_limit

def work():
    with time_limit(60):
        pass
    try:
        with time_limit(0.01):
            while True:
                pass
    except TookTooLong:
        print("took too long")

thread = threading.Thread(target=work)
thread.start()
thread.join()
sys.settrace(lambda *_: None)
threading.settrace(None)
print("traced")
"""


def test_limit_in_a_thread_leaves_an_interpreter_that_can_be_traced() -> None:
    """Python 3.11 goes on looking for a withdrawn exception: then no traced function gets past its first line."""
    done = subprocess.run([sys.executable, "-c", IN_A_THREAD], capture_output=True, text=True, timeout=HANG_S)
    assert (done.stdout, done.stderr) == ("took too long\ntraced\n", "")
