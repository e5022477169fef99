"""The router: loads are what is really under way, whatever is released twice, late or never waited for."""

import asyncio
import random

import pytest
from waiting import HANG_S

from rlcanary.grpo.engines.router import LoadAwareRouter, NoReplicas


def run(scenario):
    return asyncio.run(asyncio.wait_for(scenario, HANG_S))


def place(slot):
    return slot.replica, slot.slot


def test_requests_go_to_the_least_loaded_replica_and_its_lowest_slot():
    async def scenario():
        router = LoadAwareRouter(replicas=2, slots=2)
        slots = [await router.acquire_slot() for _ in range(4)]
        assert [place(slot) for slot in slots] == [(0, 0), (1, 0), (0, 1), (1, 1)]
        router.release(slots[1])
        assert router.loads == [2, 1]
        assert place(await router.acquire_slot()) == (1, 0)

    run(scenario())


def test_second_release_frees_nothing():
    async def scenario():
        router = LoadAwareRouter(replicas=1, slots=2)
        first, _ = await router.acquire_slot(), await router.acquire_slot()
        assert router.release(first)
        third = await router.acquire_slot()
        assert place(third) == place(first)
        assert not router.release(first)
        assert router.loads == [2]

    run(scenario())


def test_release_after_a_reset_neither_goes_below_zero_nor_exceeds_capacity():
    async def scenario():
        router = LoadAwareRouter(replicas=1, slots=2)
        old = [await router.acquire_slot() for _ in range(2)]
        router.reset()
        assert router.loads == [0]
        assert not router.release(old[0])
        assert router.loads == [0]
        await router.acquire_slot(), await router.acquire_slot()
        router.release(old[1])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(router.acquire_slot(), 0.01)
        assert router.loads == [2]

    run(scenario())


def test_those_who_wait_are_served_in_turn():
    async def scenario():
        router = LoadAwareRouter(replicas=1, slots=1)
        held = await router.acquire_slot()
        served = []

        async def wait(name):
            slot = await router.acquire_slot()
            served.append(name)
            await asyncio.sleep(0)
            router.release(slot)

        waiting = [asyncio.create_task(wait(name)) for name in "abc"]
        await asyncio.sleep(0)
        router.release(held)
        await asyncio.gather(*waiting)
        assert served == ["a", "b", "c"]
        assert router.loads == [0]

    run(scenario())


@pytest.mark.parametrize("order", ["cancelled first", "released first"])
def test_slot_of_a_cancelled_wait_goes_to_the_next(order):
    async def scenario():
        router = LoadAwareRouter(replicas=1, slots=1)
        held = await router.acquire_slot()
        given_up, next_one = asyncio.create_task(router.acquire_slot()), asyncio.create_task(router.acquire_slot())
        await asyncio.sleep(0)
        for step in (given_up.cancel, lambda: router.release(held))[:: 1 if order == "cancelled first" else -1]:
            step()
        assert (await next_one).slot == 0
        assert given_up.cancelled()
        assert router.loads == [1]

    run(scenario())


def test_reset_serves_those_who_wait():
    async def scenario():
        router = LoadAwareRouter(replicas=1, slots=1)
        await router.acquire_slot()
        waiting = asyncio.create_task(router.acquire_slot())
        await asyncio.sleep(0)
        router.reset()
        await waiting
        assert router.loads == [1]

    run(scenario())


def test_removed_replica_gets_no_request():
    async def scenario():
        router = LoadAwareRouter(replicas=2, slots=1)
        on_first = await router.acquire_slot()
        router.remove(0)
        assert place(await router.acquire_slot()) == (1, 0)
        assert router.release(on_first)
        waiting = asyncio.create_task(router.acquire_slot())
        await asyncio.sleep(0)
        assert not waiting.done()
        router.remove(1)
        with pytest.raises(NoReplicas, match="replica 1 was the last"):
            await waiting
        with pytest.raises(NoReplicas):
            await router.acquire_slot()

    run(scenario())


def test_loads_hold_under_any_interleaving():
    async def scenario(seed):
        source = random.Random(seed)
        router = LoadAwareRouter(replicas=3, slots=2)
        held, waiting = [], []
        for _ in range(300):
            step = source.choice(
                ["acquire", "release", "again", "cancel", "reset"][: 5 if source.random() < 0.05 else 4]
            )
            if step == "acquire":
                waiting.append(asyncio.create_task(router.acquire_slot()))
            elif step == "release" and held:
                router.release(held.pop(source.randrange(len(held))))
            elif step == "again" and held:
                slot = held.pop(source.randrange(len(held)))
                router.release(slot), router.release(slot)
            elif step == "cancel" and waiting:
                waiting.pop(source.randrange(len(waiting))).cancel()
            elif step == "reset":
                router.reset()
                held.clear()
                # Those that were handed out but not yet received belong to the time before.
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            held += [task.result() for task in waiting if task.done()]
            waiting = [task for task in waiting if not task.done()]
            assert all(0 <= load <= 2 for load in router.loads)
            places = [place(slot) for slot in held]
            assert sum(router.loads) >= len(set(places))
            assert not waiting or sum(router.loads) == 6
        for task in waiting:
            task.cancel()

    for seed in range(20):
        run(scenario(seed))


@pytest.mark.parametrize(("replicas", "slots"), [(0, 1), (1, 0)])
def test_router_without_capacity_is_refused(replicas, slots):
    with pytest.raises(ValueError, match="can take no request"):
        LoadAwareRouter(replicas, slots)
