"""The oracle's buffer against enumeration: every short history, every start of a run that keeps within its bound."""

from itertools import product

import pytest

from rlcanary.checks.worlds.buffers import group, numbers
from rlcanary.contract.records.buffering import BufferSettings
from rlcanary.reference.buffering import Buffer, rollout_seed


@pytest.mark.parametrize("order", ["oldest_first", "newest_first"])
@pytest.mark.parametrize(("per_batch", "max_staleness"), [(1, 0), (1, 1), (2, 0), (2, 1)])
def test_every_history_of_six_steps_trains_what_is_next_fresh_and_waits(order, per_batch, max_staleness):
    for steps in product(("put", "take", "move"), repeat=6):
        buffer, version, ends = Buffer(BufferSettings(per_batch, max_staleness), order, "refuse"), 0, {}
        born = {}
        for number, step in enumerate(steps):
            if step == "put":
                assert buffer.put([group(number, version)]) == 1
                born[number] = version
            elif step == "move":
                version += 1
            else:
                taken = buffer.take(version)
                old = [each for each in born if each not in ends and version - born[each] > max_staleness]
                assert numbers(taken.stale) == old
                ends |= dict.fromkeys(old, "stale")
                waiting = [each for each in born if each not in ends]
                following = waiting[::-1] if order == "newest_first" else waiting
                expected = sorted(following[:per_batch]) if len(waiting) >= per_batch else []
                assert numbers(taken.groups) == expected
                ends |= dict.fromkeys(expected, "trained")
        assert numbers(buffer.waiting) == [each for each in born if each not in ends]


@pytest.mark.parametrize(
    ("when_full", "took", "kept"), [("refuse", [1, 1, 0, 0], [0, 1]), ("drop_oldest", [1, 1, 1, 1], [2, 3])]
)
def test_full_buffer_refuses_or_drops_the_oldest(when_full, took, kept):
    one_by_one, at_once = (Buffer(BufferSettings(1, capacity=2), "oldest_first", when_full) for _ in range(2))
    assert [one_by_one.put([group(number)]) for number in range(4)] == took
    assert at_once.put([group(number) for number in range(4)]) == sum(took)
    assert numbers(one_by_one.waiting) == numbers(at_once.waiting) == kept


def test_groups_without_signal_take_no_room():
    buffer = Buffer(BufferSettings(1, capacity=1, dynamic_sampling=True), "oldest_first", "refuse")
    assert buffer.put([group(0, rewards=[0.1, 0.1]), group(1), group(2, rewards=[1.0, 1.0]), group(3)]) == 3
    assert numbers(buffer.waiting) == [1]


def spread(per_batch, max_staleness, ahead, updates):
    """The largest staleness in a run that starts groups up to `ahead` beyond those trained, at once and whenever it may."""
    started, trained, worst = [], 0, 0
    for version in range(updates):
        while len(started) - trained < ahead(False):
            started.append(version)
        batch = started[trained : trained + per_batch]
        worst = max([worst, *(version - age for age in batch)])
        trained += per_batch
        while len(started) - trained < ahead(True):
            started.append(version)
    return worst


@pytest.mark.parametrize(("per_batch", "max_staleness"), list(product((1, 2, 3), (0, 1, 2, 3))))
def test_bound_on_started_groups_is_the_largest_that_keeps_the_staleness(per_batch, max_staleness):
    def ahead(more):
        def of(has_taken):
            buffer = Buffer(BufferSettings(per_batch, max_staleness), "oldest_first", "refuse")
            buffer.trained = 5 if has_taken else 4
            return buffer.room(5, running=0) + more

        return of

    assert spread(per_batch, max_staleness, ahead(0), 12) == max_staleness
    assert spread(per_batch, max_staleness, ahead(1), 12) == max_staleness + 1


def test_waiting_and_running_groups_and_the_capacity_leave_less_room():
    buffer = Buffer(BufferSettings(2, max_staleness=2, capacity=5), "oldest_first", "refuse")
    buffer.put([group(0), group(1)])
    assert [buffer.room(0, running) for running in (0, 2, 3, 9)] == [3, 1, 0, 0]


def test_seeds_of_many_requests_differ_and_fit_into_63_bits():
    places = list(product(range(2), range(10), range(50), range(100)))
    seeds = {rollout_seed(*place) for place in places}
    assert len(seeds) == len(places)
    assert 0 <= min(seeds) <= max(seeds) < 2**63
    assert rollout_seed(1, 23, 4, 5) != rollout_seed(12, 3, 4, 5)


def test_settings_out_of_range_are_refused():
    for settings in (BufferSettings(0), BufferSettings(1, -1), BufferSettings(3, capacity=2)):
        with pytest.raises(ValueError, match="batch"):
            Buffer(settings, "oldest_first", "refuse")
