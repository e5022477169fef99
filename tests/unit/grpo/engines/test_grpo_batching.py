"""Calls from many threads: every caller gets its own result, a failure stays with its batch, nothing waits for ever."""

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

import pytest
from waiting import HANG_S, wait_for

from rlcanary.grpo.engines.batching import Batcher


class Recorder:
    """Squares numbers, fails on negative ones, and remembers its batches; holds them back while `gate` is closed."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, items: Sequence[int]) -> list[int]:
        self.batches.append(list(items))
        assert self.gate.wait(HANG_S)
        if min(items) < 0:
            raise ValueError(f"negative: {min(items)}")
        return [item * item for item in items]


@pytest.fixture
def run() -> Iterator[Recorder]:
    recorder = Recorder()
    yield recorder
    recorder.gate.set()


def waiting(batcher: Batcher[Any, Any], run: Recorder, items: Sequence[int]) -> list[Future[Any]]:
    """A batch of 0 is held back while these items queue behind it."""
    run.gate.clear()
    first = batcher.submit(0)
    wait_for(lambda: batcher.state().running == 1)
    return [first, *(batcher.submit(item) for item in items)]


def test_every_thread_gets_the_result_of_its_own_item(run: Recorder) -> None:
    batcher = Batcher(run, min_batch_size=4, max_batch_size=7, timeout=0.01)
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(batcher, range(500))) == [item * item for item in range(500)]
    assert sorted(item for batch in run.batches for item in batch) == list(range(500))
    assert max(map(len, run.batches)) <= 7
    assert len(run.batches) < 500


def test_items_that_wait_share_a_batch_of_at_most_the_maximum(run: Recorder) -> None:
    batcher = Batcher(run, max_batch_size=3)
    futures = waiting(batcher, run, [1, 2, 3, 4])
    run.gate.set()
    assert [future.result(HANG_S) for future in futures] == [0, 1, 4, 9, 16]
    assert run.batches == [[0], [1, 2, 3], [4]]


def test_a_failing_batch_fails_its_own_callers_only_and_later_calls_work(run: Recorder) -> None:
    batcher = Batcher(run, max_batch_size=2)
    futures = waiting(batcher, run, [-1, 2, 3, 4])
    run.gate.set()
    assert isinstance(futures[1].exception(HANG_S), ValueError)
    assert isinstance(futures[2].exception(HANG_S), ValueError)
    assert [future.result(HANG_S) for future in futures[3:]] == [9, 16]
    # torchrl leaves the failed items in its queue, after which every call raises InvalidStateError.
    assert [batcher(item) for item in (5, 6)] == [25, 36]
    assert batcher.state().failed == 1


def test_fewer_callers_than_the_minimum_are_served_after_the_timeout(run: Recorder) -> None:
    # torchrl waits for ever.
    batcher = Batcher(run, min_batch_size=8, timeout=0.05)
    start = time.monotonic()
    assert batcher(3, timeout=HANG_S) == 9
    assert time.monotonic() - start >= 0.05


def test_minimum_is_waited_for_within_the_timeout(run: Recorder) -> None:
    batcher = Batcher(run, min_batch_size=3, timeout=HANG_S)
    futures = [batcher.submit(item) for item in (1, 2)]
    time.sleep(0.05)
    assert run.batches == []
    assert batcher.state().waiting == 2
    assert batcher(3) == 9
    assert [future.result(HANG_S) for future in futures] == [1, 4]
    assert run.batches == [[1, 2, 3]]


def test_items_of_different_keys_never_share_a_batch(run: Recorder) -> None:
    # torchrl runs everybody's items with the arguments of whoever holds the lock.
    batcher = Batcher(run, key=lambda item: item % 2)
    futures = waiting(batcher, run, [1, 2, 3, 4])
    run.gate.set()
    assert [future.result(HANG_S) for future in futures] == [0, 1, 4, 9, 16]
    assert run.batches == [[0], [1, 3], [2, 4]]


def test_wrong_number_of_results_is_an_error_of_that_batch() -> None:
    batcher: Batcher[int, int] = Batcher(lambda items: [1, 2, 3])
    with pytest.raises(RuntimeError, match="1 items gave 3 results"):
        batcher(1)


def test_cleanup_drops_what_waits_and_the_batcher_can_be_used_again(run: Recorder) -> None:
    batcher = Batcher(run, min_batch_size=5, timeout=HANG_S)
    futures = [batcher.submit(item) for item in (1, 2)]
    batcher.cleanup()
    for future in futures:
        with pytest.raises(CancelledError, match="dropped by cleanup"):
            future.result(HANG_S)
    assert run.batches == []
    later = batcher.submit(4)
    batcher.cleanup(flush=True)
    assert later.result(0) == 16


def test_cleanup_with_flush_runs_what_waits_without_waiting_for_the_minimum(run: Recorder) -> None:
    batcher = Batcher(run, min_batch_size=5, timeout=HANG_S)
    futures = [batcher.submit(item) for item in (1, 2)]
    batcher.cleanup(flush=True)
    assert [future.result(0) for future in futures] == [1, 4]
    assert batcher.state().waiting == 0
    later = batcher.submit(3)
    time.sleep(0.05)
    assert not later.done()
    batcher.cleanup(flush=True)
    assert later.result(0) == 9


def test_a_failing_flush_fails_the_waiting_callers(run: Recorder) -> None:
    batcher = Batcher(run, min_batch_size=5, timeout=HANG_S)
    future = batcher.submit(-1)
    batcher.cleanup(flush=True)
    assert isinstance(future.exception(0), ValueError)


def test_a_caller_that_gives_up_withdraws_its_item(run: Recorder) -> None:
    batcher = Batcher(run)
    held = waiting(batcher, run, [])
    with pytest.raises(TimeoutError):
        batcher(7, timeout=0.02)
    run.gate.set()
    assert held[0].result(HANG_S) == 0
    assert batcher(8) == 64
    assert 7 not in [item for batch in run.batches for item in batch]


def test_a_batch_that_calls_its_own_batcher_is_an_error_not_a_deadlock() -> None:
    batcher: Batcher[int, int] = Batcher(lambda items: [batcher(item - 1) for item in items])
    with pytest.raises(RuntimeError, match="would wait for ever"):
        batcher(3, timeout=HANG_S)


def test_no_thread_is_left_when_there_is_no_work(run: Recorder) -> None:
    batcher = Batcher(run)
    assert batcher(2) == 4
    wait_for(lambda: not any(thread.name == "rlcanary-batcher" for thread in threading.enumerate()))


def test_state_tells_what_waits_runs_and_ran(run: Recorder) -> None:
    batcher = Batcher(run)
    futures = waiting(batcher, run, [1, 2])
    state = batcher.state()
    assert (state.waiting, state.running, state.batches, state.failed) == (2, 1, 0, 0)
    assert state.oldest_wait > 0
    run.gate.set()
    futures[-1].result(HANG_S)
    wait_for(lambda: batcher.state().batches == 2)


@pytest.mark.parametrize("flush", [False, True])
def test_cleanup_ends_where_an_item_was_withdrawn(run: Recorder, flush: bool) -> None:
    batcher = Batcher(run, min_batch_size=5, timeout=HANG_S)
    assert batcher.submit(1).cancel()
    batcher.submit(2)
    batcher.cleanup(flush=flush)
    assert run.batches == ([[2]] if flush else [])


def test_cleanup_ends_while_others_keep_calling(run: Recorder) -> None:
    batcher = Batcher(run)
    stop = threading.Event()

    def keep_calling() -> None:
        while not stop.is_set():
            batcher(1)

    with ThreadPoolExecutor(2) as pool:
        callers = [pool.submit(keep_calling) for _ in range(2)]
        batcher.cleanup(flush=True)
        stop.set()
        for caller in callers:
            caller.result(HANG_S)


@pytest.mark.parametrize(
    "options", [{"min_batch_size": 0}, {"min_batch_size": 3, "max_batch_size": 2}, {"timeout": -1}]
)
def test_sizes_that_make_no_sense_are_refused(run: Recorder, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Batcher(run, **options)
