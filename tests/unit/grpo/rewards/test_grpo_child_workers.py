"""Verifiers in child processes: whatever a completion makes of them, the trainer goes on and says what happened."""

import functools
import os
import signal
from collections.abc import Iterator
from contextlib import closing

import pytest
from waiting import HANG_S, QUICK_S

from rlcanary.errors import UserError
from rlcanary.grpo.rewards.by_name import CAN_HANG, VerifiersByName
from rlcanary.grpo.rewards.exact import ExactVerifier
from rlcanary.grpo.rewards.gsm8k import GSM8KVerifier
from rlcanary.grpo.rewards.math import MathVerifier
from rlcanary.grpo.rewards.pool import VerifierPool
from rlcanary.grpo.rewards.workers import ALARM_SECONDS, ChildWorker

HANGS = "<answer>9^{9^{9^9}}</answer>"


@pytest.fixture
def math() -> Iterator[VerifierPool]:
    with closing(
        VerifierPool(MathVerifier, make_worker=ChildWorker, workers=1, timeout_s=QUICK_S, start_timeout_s=HANG_S)
    ) as pool:
        yield pool


def test_a_power_of_powers_is_a_timeout_and_the_next_completion_is_judged(math: VerifierPool) -> None:
    score = math.verify(HANGS, "42")
    assert (score.value, score.problem) == (None, "timeout")
    assert math.verify("<answer>42</answer>", "42").value == 1.0
    assert [span.problem for span in math.drain_spans()] == ["timeout", None]


def test_a_worker_that_dies_is_told_and_replaced(math: VerifierPool) -> None:
    (worker,) = math._workers
    assert isinstance(worker, ChildWorker)
    os.kill(worker._process.pid, signal.SIGKILL)
    score = math.verify("<answer>42</answer>", "42")
    assert (score.value, score.problem, score.detail) == (None, "worker died", "its process ended with exit code -9")
    assert math.verify("<answer>42</answer>", "42").value == 1.0


def test_a_child_that_hangs_ends_itself_where_nobody_is_left_to_kill_it() -> None:
    worker = ChildWorker(MathVerifier, "", "")
    worker.wait_ready(HANG_S)
    worker.verify(HANGS, "42", 1 - ALARM_SECONDS)
    assert worker._process.wait(HANG_S) == -signal.SIGALRM


def test_a_verifier_that_cannot_be_made_is_refused_with_the_reason() -> None:
    broken = functools.partial(GSM8KVerifier, no_such_option=1)
    with pytest.raises(UserError, match=r"did not start: RuntimeError: TypeError: .*no_such_option"):
        VerifierPool(broken, make_worker=ChildWorker, workers=1)


def test_the_verifiers_that_can_hang_get_a_process_without_being_asked() -> None:
    with closing(VerifiersByName(workers=None)) as verifiers:
        made = {name: verifiers[name].verifier for name in ("exact", *CAN_HANG)}
    assert isinstance(made.pop("exact"), ExactVerifier)
    assert {type(each) for each in made.values()} == {VerifierPool}
