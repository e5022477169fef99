"""The iterator over items: every item of an epoch ends done or failed, once, and a resumed epoch goes on as before."""

import asyncio
import json
from dataclasses import dataclass

import pytest
from waiting import HANG_S

from rlcanary.errors import UserError
from rlcanary.grpo.data.items import ItemIterator, fixed, shuffled


@dataclass(frozen=True)
class Named:
    id: object


def items_of(*ids):
    return [Named(id) for id in ids]


def started(*ids, **settings):
    iterator = ItemIterator(items_of(*ids), **settings)
    iterator.start_epoch()
    return iterator


def drain(iterator):
    drawn = []
    while (item := iterator.next_item()) is not None:
        iterator.mark_done(item.id)
        drawn.append(item.id)
    return drawn


@pytest.mark.parametrize("ids", [("a", None, "c"), ("a", "", "c")])
def test_item_without_an_id_is_refused_and_not_dropped(ids):
    with pytest.raises(UserError, match="without an id: 1 of 3"):
        ItemIterator(items_of(*ids))


def test_items_that_share_an_id_are_refused_and_not_dropped():
    with pytest.raises(UserError, match="several items share: 'a'"):
        ItemIterator(items_of("a", "b", "a"))


def test_zero_is_an_id():
    assert drain(started(0, 1)) == [0, 1]


def test_no_items_are_refused():
    with pytest.raises(UserError, match="no items"):
        ItemIterator([])


def test_nothing_is_complete_before_the_first_epoch():
    iterator = ItemIterator(items_of("a"))
    assert not iterator.is_complete
    with pytest.raises(RuntimeError, match="start_epoch"):
        iterator.next_item()


def test_epoch_is_complete_when_every_item_is_done_or_failed():
    iterator = started("a", "b", retries=0)
    assert (iterator.next_item().id, iterator.next_item().id) == ("a", "b")
    assert iterator.next_item() is None
    assert iterator.counts() == {"pending": 0, "in flight": 2, "done": 0, "failed": 0}
    iterator.mark_done("a")
    assert not iterator.is_complete
    assert not iterator.mark_failed("b", "the engine died")
    assert iterator.is_complete
    assert iterator.failures() == {"b": "the engine died"}


def test_failing_item_is_tried_again_first_until_its_retries_are_spent():
    iterator = started("a", "b", retries=1)
    iterator.next_item()
    assert iterator.mark_failed("a", "once")
    assert iterator.next_item().id == "a"
    assert not iterator.mark_failed("a", "twice")
    assert iterator.status("a") == "failed"
    assert iterator.next_item().id == "b"


def test_final_failure_spends_all_retries():
    iterator = started("a", retries=5)
    iterator.next_item()
    assert not iterator.mark_failed("a", "hopeless", final=True)
    assert iterator.is_complete


def test_returned_item_is_next_and_costs_no_retry():
    iterator = started("a", "b", retries=0)
    for _ in range(3):
        assert iterator.next_item().id == "a"
        iterator.mark_pending("a")
    assert iterator.counts()["pending"] == 2


def test_failed_item_has_its_chance_again_in_the_next_epoch():
    iterator = started("a", retries=0)
    iterator.next_item()
    iterator.mark_failed("a", "why")
    iterator.start_epoch()
    assert iterator.next_item().id == "a"
    assert iterator.failures() == {}


@pytest.mark.parametrize("mark", ["mark_done", "mark_pending"])
def test_unknown_id_cannot_be_marked(mark):
    iterator = started("a")
    with pytest.raises(KeyError, match="'ghost' is no part of epoch 0"):
        getattr(iterator, mark)("ghost")
    assert iterator.counts()["pending"] == 1


def test_fate_of_an_item_is_told_once():
    iterator = started("a")
    with pytest.raises(ValueError, match="'a' is pending, not in flight"):
        iterator.mark_done("a")
    iterator.next_item()
    iterator.mark_done("a")
    for mark in (iterator.mark_done, iterator.mark_pending, lambda id: iterator.mark_failed(id, "late")):
        with pytest.raises(ValueError, match="'a' is done, not in flight"):
            mark("a")
    assert iterator.next_item() is None


def test_epoch_over_some_items_is_complete_without_the_others():
    iterator = ItemIterator(items_of("a", "b", "c"), order=lambda epoch: ["a", "b", "c"] if epoch == 0 else ["b"])
    iterator.start_epoch()
    iterator.next_item()
    iterator.mark_pending("a")
    iterator.start_epoch()
    assert drain(iterator) == ["b"]
    assert iterator.is_complete
    with pytest.raises(KeyError):
        iterator.status("a")


def test_waiting_ends_when_an_epoch_over_some_items_is_complete():
    iterator = ItemIterator(items_of("a", "b"), order=fixed(["b"]))
    iterator.start_epoch()

    async def visit():
        assert await iterator.wait_pending()
        iterator.next_item()
        waiting = asyncio.create_task(iterator.wait_pending())
        await asyncio.sleep(0)
        assert not waiting.done()
        iterator.mark_done("b")
        return await waiting

    assert asyncio.run(asyncio.wait_for(visit(), HANG_S)) is False


def test_waiting_ends_when_an_item_is_returned():
    iterator = started("a")
    iterator.next_item()

    async def visit():
        waiting = [asyncio.create_task(iterator.wait_pending()) for _ in range(2)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        iterator.mark_pending("a")
        return await waiting[1]

    assert asyncio.run(asyncio.wait_for(visit(), HANG_S)) is True


def test_new_epoch_waits_for_what_is_in_flight():
    iterator = started("a", "b", "c")
    iterator.next_item(), iterator.next_item()
    with pytest.raises(RuntimeError, match="still in flight: 'a', 'b'"):
        iterator.start_epoch()
    assert iterator.reclaim() == ["a", "b"]
    assert drain(iterator) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("order", "error"),
    [([], "empty"), (["a", "ghost"], "unknown ids: 'ghost'"), (["a", "b", "a"], "repeats ids: 'a'")],
)
def test_order_that_does_not_fit_the_items_is_refused(order, error):
    with pytest.raises(UserError, match=error):
        started("a", "b", order=fixed(order))


def test_shuffled_epochs_differ_and_repeat_from_the_seed():
    ids = [f"i{index}" for index in range(20)]
    order = shuffled(ids, seed=1)
    iterator = started(*ids, order=order)
    first = drain(iterator)
    iterator.start_epoch()
    second = drain(iterator)
    assert sorted(first) == sorted(second) == sorted(ids)
    assert first != second
    assert (first, second) == (shuffled(ids, seed=1)(0), order(1))
    assert shuffled(ids, seed=2)(0) != first


def test_resumed_iterator_goes_on_as_it_would_have():
    ids = [f"i{index}" for index in range(10)]

    def fresh():
        return ItemIterator(items_of(*ids), order=shuffled(ids), retries=0)

    whole = fresh()
    whole.start_epoch()
    expected = drain(whole)
    whole.start_epoch()
    expected_next = drain(whole)

    stopped = fresh()
    stopped.start_epoch()
    for id in [stopped.next_item().id for _ in range(4)][:2]:
        stopped.mark_done(id)
    saved = json.loads(json.dumps(stopped.state()))

    resumed = fresh()
    resumed.load_state(saved)
    assert resumed.counts() == {"pending": 8, "in flight": 0, "done": 2, "failed": 0}
    assert expected[:2] + drain(resumed) == expected
    resumed.start_epoch()
    assert drain(resumed) == expected_next


def test_resumed_iterator_knows_failures_and_spent_retries():
    iterator = started("a", "b", "c", retries=1)
    for reason in ("first", "second"):
        iterator.next_item()
        iterator.mark_failed("a", reason)
    iterator.next_item()
    iterator.mark_failed("b", "first")
    resumed = ItemIterator(items_of("a", "b", "c"), retries=1)
    resumed.load_state(iterator.state())
    assert resumed.failures() == {"a": "second"}
    assert resumed.next_item().id == "b"
    assert not resumed.mark_failed("b", "second")
    assert resumed.failures() == {"a": "second", "b": "second"}


def test_state_of_other_items_is_refused():
    with pytest.raises(UserError, match="to another order"):
        ItemIterator(items_of("a", "c")).load_state(started("a", "b").state())


def test_state_before_the_first_epoch_is_no_epoch():
    iterator = ItemIterator(items_of("a"))
    iterator.load_state(ItemIterator(items_of("a")).state())
    assert iterator.epoch == -1
