"""Sampling, scoring and buffering together on a real Ray cluster: whatever fails, each item ends once, on the books."""

import asyncio
from collections import Counter
from contextlib import closing

import pytest
from waiting import HANG_S, QUICK_S

from rlcanary.contract.adapter import Item
from rlcanary.contract.engine import InProcessEngine
from rlcanary.grpo.data.items import ItemIterator
from rlcanary.grpo.rewards.pool import VerifierPool
from rlcanary.grpo.rewards.verifier import Reward, Tallied
from rlcanary.grpo.rollout.buffer import start_buffer
from rlcanary.grpo.rollout.collector import Collector
from rlcanary.tiny_models import EOS_ID, tiny_llama

pytestmark = pytest.mark.ray

ITEMS = 24
SAMPLING = {"n": 2, "max_new_tokens": 6, "seed": 3, "eos_token_ids": (EOS_ID,)}


def sometimes_broken():
    """A verifier that hangs on one item, dies on another and raises on a third; local, so that workers can take it."""

    def make():
        import os

        from rlcanary.grpo.rewards.verifier import Score

        class SometimesBroken:
            bounds = (0.0, 1.0)

            def verify(self, completion, target):
                if target == 5:
                    while True:
                        pass
                if target == 6:
                    os._exit(1)
                if target == 7:
                    raise LookupError(target)
                return Score(float(len(completion) % 2))

        return SometimesBroken()

    return make


class DiesLater:
    """An engine that answers a few requests and then none."""

    def __init__(self, engine, answers):
        self.engine, self.answers = engine, answers

    @property
    def version(self):
        return self.engine.version

    async def agenerate(self, prompt, sampling):
        if not self.answers:
            raise ConnectionError("engine gone")
        self.answers -= 1
        return await self.engine.agenerate(prompt, sampling)


@pytest.fixture
def ray(ray_cluster):
    return ray_cluster


async def run(ray, verifier, engines, buffer):
    """A producer and a trainer on one event loop; the trainer syncs after each batch and tells each item's fate."""
    items = ItemIterator([Item(index, [1, 5 + index], Reward(verifier, index)) for index in range(ITEMS)], retries=1)
    items.start_epoch()
    collector = Collector([DiesLater(engines[0], answers=4), engines[1]], items, SAMPLING, slots=4, patience=2)
    trained, evicted = Counter(), Counter()

    async def produce():
        async def put(group):
            await buffer.put.remote(group)

        await collector.feed(put)

    async def train():
        version = 0
        while not items.is_complete:
            left = items.counts()["pending"] + items.counts()["in flight"]
            try:
                taken = await buffer.take.remote(min(4, max(1, left)), version, 1.0)
            except TimeoutError:
                continue
            for group in taken.groups:
                trained[group.item_id] += 1
                items.mark_done(group.item_id)
            for group in taken.stale:
                evicted[group.item_id] += 1
                items.mark_pending(group.item_id)
            if not taken.groups:
                continue
            async with collector.paused():
                version += 1
                for engine in engines:
                    engine.version = version

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(produce())
        tasks.create_task(train())
    return items, collector, trained, evicted


def test_each_item_ends_once_although_an_engine_dies_and_verifiers_break(ray):
    engines = [InProcessEngine(tiny_llama()) for _ in range(2)]
    buffer = start_buffer(capacity=8, max_staleness=1)
    with closing(VerifierPool(sometimes_broken(), workers=2, timeout_s=QUICK_S)) as pool:
        tallied = Tallied(pool)
        items, collector, trained, evicted = asyncio.run(asyncio.wait_for(run(ray, tallied, engines, buffer), HANG_S))
    failures = items.failures()
    assert failures.keys() >= {5, 6, 7}
    # Others run out of tries where both went to the engine that is gone, or on a machine too busy for the limit.
    assert all("engine gone" in reason or "could not be scored" in reason for reason in failures.values())
    assert trained == {index: 1 for index in range(ITEMS) if index not in failures}
    account = ray.get(buffer.account.remote())
    assert account.fates["used"] == ITEMS - len(failures)
    assert account.fates["stale"] == evicted.total()
    assert account.entered == account.fates["used"] + account.fates["stale"] == collector.counts["yielded"]
    assert account.waiting == 0
    problems = tallied.tally.problems
    assert problems.keys() >= {"timeout", "worker died", "exception"}
    assert tallied.tally.calls == tallied.tally.scored + sum(problems.values())
    assert collector.counts["failed request"] >= 2
