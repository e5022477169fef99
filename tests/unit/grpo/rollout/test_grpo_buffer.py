"""The buffer: first in, first out, nothing stale, and each group has exactly one fate."""

import asyncio
import random
from contextlib import suppress

import pytest
from waiting import HANG_S

from rlcanary.contract.batch import Completion, Group
from rlcanary.grpo.rollout.buffer import FATES, BufferClosed, GroupBuffer


def group_of(id, version=0, tokens=None):
    completion = Completion([5, 6], token_versions=tokens)
    return Group([1], [completion], [1.0], item_id=id, policy_version=version)


def ids(groups):
    return [group.item_id for group in groups]


def run(scenario):
    return asyncio.run(asyncio.wait_for(scenario, HANG_S))


async def balance(buffer):
    account = await buffer.account()
    assert account.entered == account.waiting + sum(account.fates.values())
    assert account.fates == {fate: sum(counts.get(fate, 0) for counts in account.by_version.values()) for fate in FATES}
    return account


async def filled(ids, *, capacity=8, max_staleness=1, **settings):
    buffer = GroupBuffer(capacity, max_staleness, **settings)
    for id in ids:
        await buffer.put(group_of(id))
    return buffer


def test_groups_come_out_in_the_order_they_went_in():
    async def scenario():
        buffer = await filled("abc")
        return ids((await buffer.take(2, 0)).groups) + ids((await buffer.take(1, 0)).groups)

    assert run(scenario()) == ["a", "b", "c"]


def test_stale_groups_are_evicted_counted_and_returned_once():
    async def scenario():
        buffer = GroupBuffer(8, max_staleness=1)
        for id, version in [("a", 0), ("b", 1), ("c", 2)]:
            await buffer.put(group_of(id, version))
        taken = await buffer.take(1, trainer_version=2)
        assert (ids(taken.groups), ids(taken.stale)) == (["b"], ["a"])
        assert (await buffer.take(1, trainer_version=3)).stale == []
        return await balance(buffer)

    account = run(scenario())
    assert (account.entered, account.waiting) == (3, 0)
    assert account.by_version == {0: {"stale": 1}, 1: {"used": 1}, 2: {"used": 1}}


def test_one_stale_token_makes_its_group_stale():
    async def scenario():
        buffer = GroupBuffer(8, max_staleness=0)
        await buffer.put(group_of("straddles", 1, tokens=[0, 1]))
        await buffer.put(group_of("fresh", 1))
        return await buffer.take(1, trainer_version=1)

    taken = run(scenario())
    assert (ids(taken.groups), ids(taken.stale)) == (["fresh"], ["straddles"])


def test_versions_below_zero_are_counted_as_any_other():
    async def scenario():
        buffer = GroupBuffer(8, max_staleness=0)
        await buffer.put(group_of("before the first sync", -1))
        assert ids((await buffer.take(1, trainer_version=0)).stale) == ["before the first sync"]
        return (await balance(buffer)).by_version

    assert run(scenario()) == {-1: {"stale": 1}}


def test_group_from_the_future_is_an_error_and_stays():
    async def scenario():
        buffer = GroupBuffer(8, max_staleness=1)
        await buffer.put(group_of("a", 3))
        with pytest.raises(ValueError, match=r"version 3, .* at 2"):
            await buffer.take(1, trainer_version=2)
        assert ids((await buffer.take(1, trainer_version=3)).groups) == ["a"]

    run(scenario())


def test_who_puts_too_much_waits_for_room():
    async def scenario():
        buffer = await filled("ab", capacity=2)
        putting = asyncio.create_task(buffer.put(group_of("c")))
        await asyncio.sleep(0.01)
        assert not putting.done()
        assert ids((await buffer.take(1, 0)).groups) == ["a"]
        await putting
        assert (await balance(buffer)).waiting == 2

    run(scenario())


def test_eviction_makes_room_for_those_who_wait():
    async def scenario():
        buffer = await filled("ab", capacity=2, max_staleness=0)
        putting = [asyncio.create_task(buffer.put(group_of(id, 1))) for id in "cd"]
        await asyncio.sleep(0.01)
        taken = await buffer.take(2, trainer_version=1)
        assert (taken.groups, ids(taken.stale)) == ([], ["a", "b"])
        await asyncio.gather(*putting)
        return await buffer.take(2, trainer_version=1)

    taken = run(scenario())
    assert (ids(taken.groups), taken.stale) == (["c", "d"], [])


def test_who_takes_waits_for_enough_and_takes_nothing_in_vain():
    async def scenario():
        buffer = await filled("a")
        with pytest.raises(TimeoutError):
            await buffer.take(2, 0, timeout_s=0.01)
        assert (await balance(buffer)).waiting == 1
        taking = asyncio.create_task(buffer.take(2, 0))
        await asyncio.sleep(0.01)
        await buffer.put(group_of("b"))
        assert ids((await taking).groups) == ["a", "b"]

    run(scenario())


def test_who_waits_for_an_item_that_grew_stale_is_told():
    async def scenario():
        buffer = await filled("ab", max_staleness=0)
        await buffer.put(group_of("c", 1))
        return await buffer.take(3, trainer_version=1)

    taken = run(scenario())
    assert (taken.groups, ids(taken.stale)) == ([], ["a", "b"])


def test_what_waits_is_counted_by_version():
    async def scenario():
        buffer = GroupBuffer(8, max_staleness=3)
        for version in (2, 0, 2, 1):
            await buffer.put(group_of(version, version))
        before = (await balance(buffer)).waiting_by_version
        await buffer.take(2, 2)
        return before, (await balance(buffer)).waiting_by_version

    assert run(scenario()) == ({0: 1, 1: 1, 2: 2}, {1: 1, 2: 1})


def test_reset_gives_back_what_was_not_taken_and_accounts_for_it():
    async def scenario():
        buffer = await filled("abc")
        await buffer.take(1, 0)
        assert sorted(ids(await buffer.reset())) == ["b", "c"]
        account = await balance(buffer)
        assert (account.waiting, account.fates["used"], account.fates["dropped"]) == (0, 1, 2)

    run(scenario())


def test_groups_that_never_enter_are_accounted_for():
    async def scenario():
        buffer = await filled("a")
        await buffer.settle("flat", 0, "filtered")
        await buffer.settle("hung", 0, "unscored")
        with pytest.raises(ValueError, match="'used' is not one of filtered"):
            await buffer.settle("b", 0, "used")
        assert (await balance(buffer)).entered == 3
        await buffer.take(1, 0)
        records = await buffer.drain_records()
        assert [(record.item_id, record.fate) for record in records] == [
            ("flat", "filtered"),
            ("hung", "unscored"),
            ("a", "used"),
        ]
        assert await buffer.drain_records() == []

    run(scenario())


def test_books_are_gone_on_with_and_what_waited_was_dropped():
    async def scenario():
        buffer = await filled("abc")
        await buffer.settle("flat", 0, "filtered")
        await buffer.take(1, 0)
        await buffer.drain_records()
        await buffer.settle("hung", 0, "unscored")
        later = GroupBuffer(8, 1, state=await buffer.state())
        assert [(record.item_id, record.fate) for record in await later.drain_records()] == [
            ("hung", "unscored"),
            ("b", "dropped"),
            ("c", "dropped"),
        ]
        await later.put(group_of("d"))
        await later.take(1, 0)
        assert [record.number for record in await later.drain_records()] == [5]
        return await balance(later)

    account = run(scenario())
    assert (account.entered, account.waiting) == (6, 0)
    assert {fate: count for fate, count in account.fates.items() if count} == {
        "used": 2,
        "dropped": 2,
        "filtered": 1,
        "unscored": 1,
    }


def test_closing_wakes_everyone():
    async def scenario():
        buffer = await filled("a", capacity=1)
        waiting = [asyncio.create_task(buffer.put(group_of("b")))]
        empty = GroupBuffer(1, 0)
        waiting.append(asyncio.create_task(empty.take(1, 0)))
        await asyncio.sleep(0.01)
        await buffer.close(), await empty.close()
        for task in waiting:
            with pytest.raises(BufferClosed):
                await task
        assert (await balance(buffer)).waiting == 1

    run(scenario())


@pytest.mark.parametrize("settings", [(0, 0), (1, -1)])
def test_impossible_buffer_is_refused(settings):
    with pytest.raises(ValueError, match="out of range"):
        GroupBuffer(*settings)


def test_taking_more_than_fits_would_wait_for_ever_and_is_refused():
    with pytest.raises(ValueError, match=r"3 groups .* holds 2"):
        run(GroupBuffer(2, 0).take(3, 0))


def test_every_group_has_one_fate_under_any_interleaving():
    async def scenario(seed):
        source = random.Random(seed)
        buffer = GroupBuffer(5, max_staleness=1)
        version, put, sent = 0, [], 0
        for _ in range(200):
            step = source.choice(["put", "put", "put", "take", "sync", "settle", "reset"])
            if step == "put":
                put.append(asyncio.create_task(buffer.put(group_of(sent, version))))
                sent += 1
            elif step == "take":
                with suppress(TimeoutError):
                    await buffer.take(source.randint(1, 3), version, timeout_s=0)
            elif step == "sync":
                version += 1
            elif step == "settle":
                await buffer.settle(sent, version, "filtered")
                sent += 1
            elif source.random() < 0.1:
                await buffer.reset()
            await asyncio.sleep(0)
            await balance(buffer)
        while not all(task.done() for task in put):
            await buffer.reset()
            await asyncio.sleep(0)
        account = await balance(buffer)
        records = await buffer.drain_records()
        assert account.entered == sent
        assert len({record.number for record in records}) == len(records) == sent - account.waiting
        assert len({record.item_id for record in records}) == len(records)

    for seed in range(5):
        run(scenario(seed))
