"""The collector: every item's group comes once, whatever fails, is aborted or stands still in between."""

import asyncio
from collections import Counter
from contextlib import aclosing

import pytest
from waiting import HANG_S

from rlcanary.contract.adapter import Item
from rlcanary.contract.batch import Completion
from rlcanary.contract.engine import InProcessEngine
from rlcanary.grpo.data.items import ItemIterator
from rlcanary.grpo.engines.engine_pool import EngineDied, EnginesLost, RequestRefused
from rlcanary.grpo.rollout.collector import Collector
from rlcanary.tiny_models import EOS_ID, tiny_llama


class FakeEngine:
    """Answers a prompt with its own last id, one token per turn of the loop, and does what it is told to on the way."""

    def __init__(self, *, version=0, turns=lambda prompt: 3):
        self.version = version
        self.turns = turns
        self.held = {}
        self.sent = []
        self.under_way = 0
        self.most_under_way = 0

    async def agenerate(self, prompt, sampling):
        self.sent.append((prompt[-1], sampling.get("seed")))
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            turns = self.turns(prompt)
            for _ in range(turns):
                await asyncio.sleep(0)
            if prompt[-1] in self.held:
                await self.held.pop(prompt[-1]).wait()
        finally:
            self.under_way -= 1
        return [Completion([prompt[-1]] * turns, text=str(prompt[-1]))] * sampling["n"]


def iterator_of(count, reward=lambda text: 1.0, **settings):
    items = ItemIterator([Item(f"i{index}", [7, index], reward) for index in range(count)], **settings)
    items.start_epoch()
    return items


def run(scenario):
    return asyncio.run(asyncio.wait_for(scenario, HANG_S))


async def all_groups(collector, **options):
    return [group async for group in collector.groups(**options)]


def ids(groups):
    return [group.item_id for group in groups]


def test_every_item_of_the_epoch_gives_one_group():
    items = iterator_of(20)
    collector = Collector([FakeEngine(), FakeEngine()], items, {"n": 3}, slots=2)
    groups = run(all_groups(collector))
    assert sorted(ids(groups)) == sorted(f"i{index}" for index in range(20))
    for group in groups:
        assert [completion.text for completion in group.completions] == [group.item_id[1:]] * 3
        assert group.rewards == [1.0] * 3
    assert items.counts()["in flight"] == 20


def test_groups_come_as_they_are_completed_and_replicas_share_the_load():
    engines = [FakeEngine(), FakeEngine()]
    collector = Collector(engines, iterator_of(6), {"n": 1}, slots=2)

    async def scenario():
        first_may_end = engines[0].held[0] = asyncio.Event()
        async with aclosing(collector.groups()) as stream:
            others = [(await anext(stream)).item_id for _ in range(5)]
            first_may_end.set()
            return others, (await anext(stream)).item_id

    others, last = run(scenario())
    assert sorted(others) == ["i1", "i2", "i3", "i4", "i5"]
    assert last == "i0"
    assert [engine.most_under_way for engine in engines] == [2, 2]
    assert sum(len(engine.sent) for engine in engines) == 6


def test_no_more_items_are_drawn_than_the_limit():
    items = iterator_of(10)
    groups = run(all_groups(Collector([FakeEngine()], items, {"n": 1}), limit=4))
    assert len(groups) == 4
    assert items.counts()["pending"] == 6


def test_collected_groups_are_in_the_order_of_the_items():
    engine = FakeEngine(turns=lambda prompt: 30 - 3 * prompt[-1])
    items = iterator_of(10)
    collector = Collector([engine], items, {"n": 1})
    assert ids(run(collector.collect(4))) == ["i0", "i1", "i2", "i3"]


def test_items_come_no_faster_than_the_consumer_takes_them():
    engine = FakeEngine()
    collector = Collector([engine], iterator_of(50), {"n": 1}, slots=4, ahead=4)

    async def slowly():
        async with aclosing(collector.groups()) as stream:
            await anext(stream)
            for _ in range(100):
                await asyncio.sleep(0)
            return len(engine.sent)

    assert run(slowly()) <= 5


def test_leaving_early_gives_the_items_back():
    items = iterator_of(8)
    engine = FakeEngine(turns=lambda prompt: 2 if prompt[-1] == 0 else 1000)
    collector = Collector([engine], items, {"n": 1})

    async def leave():
        async with aclosing(collector.groups()) as stream:
            return await anext(stream)

    assert run(leave()).item_id == "i0"
    assert items.counts() == {"pending": 7, "in flight": 1, "done": 0, "failed": 0}
    assert items.next_item().id == "i1"
    assert engine.under_way == 0


def test_group_is_tagged_with_the_version_at_sending_where_the_engine_does_not_say():
    engine = FakeEngine(version=3)

    async def sync_while_sampling():
        sampling = asyncio.create_task(Collector([engine], iterator_of(1), {"n": 2}).collect(1))
        while not engine.sent:
            await asyncio.sleep(0)
        engine.version = 4
        return (await sampling)[0]

    group = run(sync_while_sampling())
    assert group.policy_version == 3
    assert [completion.token_versions for completion in group.completions] == [[3, 3, 3]] * 2


def test_tokens_keep_the_versions_that_the_engine_gave_them():
    engine = InProcessEngine(tiny_llama())
    items = ItemIterator([Item("a", [5, 6], lambda text: 0.0)])
    items.start_epoch()

    async def sync_while_sampling():
        sampling = asyncio.create_task(Collector([engine], items, {"n": 1, "max_new_tokens": 12}).collect(1))
        for _ in range(10):
            await asyncio.sleep(0)
        engine.version += 1
        return (await sampling)[0]

    versions = run(sync_while_sampling()).completions[0].token_versions
    assert set(versions) == {0, 1}
    assert versions == sorted(versions)


def test_nothing_is_under_way_while_paused_and_all_go_on_after():
    engine = FakeEngine(turns=lambda prompt: 5)
    collector = Collector([engine], iterator_of(12), {"n": 1}, slots=3)

    async def sync():
        sampling = asyncio.create_task(all_groups(collector))
        while not engine.sent:
            await asyncio.sleep(0)
        async with collector.paused():
            assert engine.under_way == 0
            sent = len(engine.sent)
            for _ in range(50):
                await asyncio.sleep(0)
            assert len(engine.sent) == sent
            engine.version += 1
        return await sampling

    groups = run(sync())
    assert sorted(ids(groups)) == sorted(f"i{index}" for index in range(12))
    assert {group.policy_version for group in groups} == {0, 1}
    assert all(len({*completion.token_versions}) == 1 for group in groups for completion in group.completions)


def test_aborted_requests_are_sampled_anew_by_the_new_version():
    engine = FakeEngine(turns=lambda prompt: 1000 if engine.version == 0 else 2)
    collector = Collector([engine], iterator_of(4), {"n": 1}, slots=4)

    async def sync():
        sampling = asyncio.create_task(all_groups(collector))
        while engine.under_way < 4:
            await asyncio.sleep(0)
        async with collector.paused(abort=True):
            assert engine.under_way == 0
            engine.version = 1
        return await sampling

    groups = run(sync())
    assert sorted(ids(groups)) == ["i0", "i1", "i2", "i3"]
    assert {group.policy_version for group in groups} == {1}
    assert collector.counts["aborted request"] == 4
    assert collector.items.failures() == {}


def test_failed_sync_leaves_the_requests_held_back():
    engine = FakeEngine()
    collector = Collector([engine], iterator_of(2), {"n": 1})

    async def fail():
        with pytest.raises(RuntimeError, match="half loaded"):
            async with collector.paused():
                raise RuntimeError("half loaded")
        sampling = asyncio.create_task(all_groups(collector))
        for _ in range(50):
            await asyncio.sleep(0)
        assert collector.pool.is_paused
        assert engine.sent == []
        collector.pool.resume()
        return await sampling

    assert len(run(fail())) == 2


class Flaky(FakeEngine):
    """Fails where it is told to, before it answers."""

    def __init__(self, fails, **settings):
        super().__init__(**settings)
        self.fails = fails
        self.tries = Counter()

    async def agenerate(self, prompt, sampling):
        self.tries[prompt[-1]] += 1
        fails = self.fails(prompt[-1], self.tries[prompt[-1]])
        completions = await super().agenerate(prompt, sampling)
        if fails:
            raise ConnectionError("engine gone")
        return completions


def test_failed_request_is_tried_again_and_its_group_comes_once():
    engine = Flaky(lambda prompt, tries: prompt == 2 and tries < 3)
    items = iterator_of(5, retries=2)
    collector = Collector([engine], items, {"n": 1})
    assert sorted(ids(run(all_groups(collector)))) == ["i0", "i1", "i2", "i3", "i4"]
    assert (engine.tries[2], collector.counts["failed request"]) == (3, 2)


def test_item_that_always_fails_is_recorded_and_the_others_come():
    engine = Flaky(lambda prompt, tries: prompt == 2)
    items = iterator_of(5, retries=1)
    groups = run(all_groups(Collector([engine], items, {"n": 1}, slots=1, patience=3)))
    assert sorted(ids(groups)) == ["i0", "i1", "i3", "i4"]
    assert items.failures() == {"i2": "replica 0: ConnectionError: engine gone"}


def test_dead_replica_is_given_up_and_the_others_take_its_items():
    dead, alive = Flaky(lambda prompt, tries: True, turns=lambda prompt: 1), FakeEngine()
    items = iterator_of(20, retries=5)
    groups = run(all_groups(Collector([dead, alive], items, {"n": 1}, slots=2, patience=3)))
    assert sorted(ids(groups)) == sorted(f"i{index}" for index in range(20))
    assert len(dead.sent) <= 6  # three times all that it takes at once


def test_requests_that_fail_together_are_one_failure_of_their_replica():
    batches = []

    class Batching(FakeEngine):
        """Answers the requests that are under way together, and fails with all of the first two batches."""

        async def agenerate(self, prompt, sampling):
            batch = len(batches) if self.under_way == 0 else len(batches) - 1
            batches.extend([batch] if self.under_way == 0 else [])
            completions = await super().agenerate(prompt, sampling)
            if batch < 2:
                raise ConnectionError("batch lost")
            return completions

    items = iterator_of(8, retries=2)
    collector = Collector([Batching()], items, {"n": 1}, slots=8, patience=3)
    assert len(run(all_groups(collector))) == 8
    assert collector.counts["failed request"] == 16


def test_requests_that_an_engine_refuses_are_no_failures_of_it():
    class Refusing(FakeEngine):
        async def agenerate(self, prompt, sampling):
            if prompt[-1] < 5:
                raise RequestRefused("the prompt is too long")
            return await super().agenerate(prompt, sampling)

    items = iterator_of(8, retries=0)
    collector = Collector([Refusing()], items, {"n": 1}, slots=1, patience=3)
    assert sorted(ids(run(all_groups(collector)))) == ["i5", "i6", "i7"]
    assert items.failures()["i0"] == "replica 0 refused it: the prompt is too long"
    assert collector.counts["failed request"] == 5


def test_replica_that_refuses_between_its_failures_is_given_up():
    class Poor(FakeEngine):
        async def agenerate(self, prompt, sampling):
            raise RequestRefused("too long") if prompt[-1] % 2 else ConnectionError("gone")

    collector = Collector([Poor()], iterator_of(20, retries=0), {"n": 1}, slots=1, patience=3)
    with pytest.raises(EnginesLost, match="gone"):
        run(all_groups(collector))


def test_collectors_that_share_engines_give_them_up_together():
    bad, good = Flaky(lambda prompt, tries: True), FakeEngine()
    first = Collector([bad, good], iterator_of(9, retries=9), {"n": 1}, slots=1, patience=3)
    assert len(run(all_groups(first))) == 9
    asked = len(bad.sent)
    second = Collector(first.pool, iterator_of(9), {"n": 1})
    assert len(run(all_groups(second))) == 9
    assert (first.pool.alive, len(bad.sent)) == ([1], asked)


def test_lone_completion_requested_alone_is_tried_no_more_often_than_the_iterator_says():
    engine = Flaky(lambda prompt, tries: True)
    items = iterator_of(1, retries=2)
    collector = Collector([engine], items, {"n": 1, "seed": 1}, patience=20, one_by_one=True)
    assert run(collector.collect(1)) == []
    assert len(set(engine.sent)) == len(engine.sent) == 3


def test_replica_that_died_is_given_up_at_once():
    class Dead(FakeEngine):
        async def agenerate(self, prompt, sampling):
            await super().agenerate(prompt, sampling)
            raise EngineDied("its process is gone")

    dead, alive = Dead(), FakeEngine()
    collector = Collector([dead, alive], iterator_of(10), {"n": 1}, slots=1, patience=3)
    assert len(run(all_groups(collector))) == 10
    assert len(dead.sent) == 1
    assert collector.pool.alive == [1]
    ((_, failure),) = collector.take_lost()
    assert (failure.fate, failure.version, collector.take_lost()) == ("failed", 0, [])


def test_replica_that_fails_now_and_then_is_kept():
    engine = Flaky(lambda prompt, tries: tries == 1)
    items = iterator_of(10, retries=1)
    groups = run(all_groups(Collector([engine], items, {"n": 1}, slots=1, ahead=1, patience=2)))
    assert len(groups) == 10


@pytest.mark.parametrize("retries", [0, 5])
def test_without_an_engine_the_collector_says_so_and_gives_the_items_back(retries):
    items = iterator_of(3, retries=retries)
    collector = Collector([Flaky(lambda prompt, tries: True)], items, {"n": 1}, slots=1, patience=3)
    with pytest.raises(EnginesLost, match="engine gone"):
        run(all_groups(collector))
    assert items.counts()["in flight"] == 0
    assert items.counts()["failed"] == (3 if retries == 0 else 0)


def test_request_that_hangs_fails_after_its_time():
    engine = FakeEngine(turns=lambda prompt: 10**9 if prompt[-1] == 1 else 1)
    items = iterator_of(3, retries=0)
    groups = run(all_groups(Collector([engine], items, {"n": 1}, request_timeout_s=1.0)))
    assert sorted(ids(groups)) == ["i0", "i2"]
    assert "TimeoutError" in items.failures()["i1"]
    assert engine.under_way == 0


class Bad(FakeEngine):
    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    async def agenerate(self, prompt, sampling):
        return self.answer


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ([Completion([1], text="1")], "requested, 1 returned"),
        ([Completion([1], text=None)] * 2, "without text"),
        ([Completion([1], text="1", finish_reason="abort")] * 2, "aborted"),
    ],
)
def test_answer_that_is_not_what_was_asked_for_is_no_group(answer, error):
    items = iterator_of(1, retries=0)
    assert run(all_groups(Collector([Bad(answer)], items, {"n": 2}))) == []
    assert error in items.failures()["i0"]


@pytest.mark.parametrize("reward", [lambda text: None, lambda text: 1 / 0], ids=["none", "raises"])
def test_group_that_cannot_be_scored_is_no_group_of_zeros(reward):
    items = iterator_of(2, reward=lambda text: reward(text) if text == "1" else 0.0, retries=1)
    collector = Collector([FakeEngine()], items, {"n": 2})
    assert ids(run(all_groups(collector))) == ["i0"]
    assert items.failures().keys() == {"i1"}
    assert "2 of 2" in items.failures()["i1"]
    assert collector.counts["unscored"] == 2


def test_slow_verifier_does_not_stop_the_engine():
    engine = FakeEngine()
    released = asyncio.Event()
    loop = None

    def reward(text):
        if text == "0":
            asyncio.run_coroutine_threadsafe(released.wait(), loop).result(HANG_S)
        return 1.0

    async def scenario():
        nonlocal loop
        loop = asyncio.get_running_loop()
        async with aclosing(Collector([engine], iterator_of(5, reward=reward), {"n": 1}).groups()) as stream:
            first = [(await anext(stream)).item_id for _ in range(4)]
            released.set()
            return first, (await anext(stream)).item_id

    first, last = run(scenario())
    assert sorted(first) == ["i1", "i2", "i3", "i4"]
    assert last == "i0"


def test_seeds_differ_between_prompts_epochs_and_attempts_and_repeat_between_runs():
    def seeds(seed, epochs=1):
        engine = Flaky(lambda prompt, tries: prompt == 0 and tries == 1)
        items = iterator_of(3)
        for epoch in range(epochs):
            if epoch:
                items.start_epoch()
            for group in run(all_groups(Collector([engine], items, {"n": 1, "seed": seed}))):
                items.mark_done(group.item_id)
        return engine.sent

    assert len({sent_seed for _, sent_seed in seeds(1, epochs=2)}) == 7
    assert sorted(seeds(1)) == sorted(seeds(1))
    assert not {sent_seed for _, sent_seed in seeds(1)} & {sent_seed for _, sent_seed in seeds(2)}


def test_completed_trajectories_come_without_waiting_for_their_group():
    engine = FakeEngine()
    items = iterator_of(3)
    collector = Collector([engine], items, {"n": 3, "seed": 1}, slots=9)

    async def scenario():
        one_may_end = engine.held[0] = asyncio.Event()
        async with aclosing(collector.groups(yield_completed_trajectories=True)) as stream:
            others = [await anext(stream) for _ in range(8)]
            one_may_end.set()
            return [*others, *[group async for group in stream]]

    groups = run(scenario())
    assert [len(group.completions) for group in groups] == [1] * 9
    assert Counter(ids(groups)) == {"i0": 3, "i1": 3, "i2": 3}
    assert len({sent_seed for _, sent_seed in engine.sent}) == 9


def test_completions_requested_one_by_one_come_together_as_groups():
    engine = FakeEngine()
    collector = Collector([engine], iterator_of(3), {"n": 3, "seed": 1}, slots=9, one_by_one=True)
    groups = run(collector.collect(3))
    assert ids(groups) == ["i0", "i1", "i2"]
    assert [len(group.completions) for group in groups] == [3] * 3
    assert [len(group.rewards) for group in groups] == [3] * 3
    assert len({sent_seed for _, sent_seed in engine.sent}) == 9


def test_completions_requested_one_by_one_keep_their_places_whichever_comes_first():
    class Uneven(FakeEngine):
        """Answers with the seed, in turns that grow or fall with the number of the request."""

        def __init__(self, step):
            super().__init__()
            self.step = step

        async def agenerate(self, prompt, sampling):
            self.sent.append(prompt[-1])
            for _ in range(50 + self.step * len(self.sent)):
                await asyncio.sleep(0)
            return [Completion([1], text=str(sampling["seed"]))]

    texts = []
    for step in (4, -4):
        collector = Collector([Uneven(step)], iterator_of(2), {"n": 4, "seed": 1}, slots=9, one_by_one=True)
        groups = run(collector.collect(2))
        texts.append([[each.text for each in group.completions] for group in groups])
    assert texts[0] == texts[1]


def test_failed_trajectory_is_tried_again_without_the_others_of_its_item():
    engine = Flaky(lambda prompt, tries: prompt == 1 and tries == 2)
    items = iterator_of(2, retries=1)
    groups = run(all_groups(Collector([engine], items, {"n": 3}, slots=9), yield_completed_trajectories=True))
    assert Counter(ids(groups)) == {"i0": 3, "i1": 3}
    assert engine.tries == {0: 3, 1: 4}


def test_item_of_a_lost_trajectory_fails_for_good():
    engine = Flaky(lambda prompt, tries: prompt == 1 and tries > 1)
    items = iterator_of(2, retries=1)
    collector = Collector([engine], items, {"n": 3}, slots=9, patience=99)
    groups = run(all_groups(collector, yield_completed_trajectories=True))
    assert Counter(ids(groups))["i0"] == 3
    assert Counter(ids(groups))["i1"] < 3
    assert (items.status("i1"), items.attempt("i1")) == ("failed", 1)


def test_feeding_goes_on_with_items_that_come_back_until_the_epoch_is_complete():
    items = iterator_of(6)
    collector = Collector([FakeEngine()], items, {"n": 1}, slots=2)
    seen = Counter()

    async def consume(group):
        seen[group.item_id] += 1
        if group.item_id == "i3" and seen["i3"] < 3:
            items.mark_pending("i3")
        else:
            items.mark_done(group.item_id)

    run(collector.feed(consume))
    assert seen == {"i0": 1, "i1": 1, "i2": 1, "i3": 3, "i4": 1, "i5": 1}
    assert items.is_complete


def test_no_more_items_are_in_flight_than_may_be_and_room_is_used_at_once():
    items = iterator_of(6, most_in_flight=2)
    engine = FakeEngine()
    collector = Collector([engine], items, {"n": 1})

    async def scenario():
        may_end = engine.held[1] = asyncio.Event()
        async with aclosing(collector.groups()) as stream:
            assert (await anext(stream)).item_id == "i0"
            waiting = asyncio.ensure_future(anext(stream))
            for _ in range(50):
                await asyncio.sleep(0)
            assert [prompt for prompt, _ in engine.sent] == [0, 1]
            items.mark_done("i0")
            assert (await waiting).item_id == "i2"
            may_end.set()
        return items.counts()

    assert run(scenario()) == {"pending": 4, "in flight": 1, "done": 1, "failed": 0}


def test_real_engines_sample_an_epoch_twice_alike():
    def sample():
        engines = [InProcessEngine(tiny_llama()) for _ in range(2)]
        items = ItemIterator([Item(index, [1, 5 + index], lambda text: float(len(text))) for index in range(6)])
        items.start_epoch()
        sampling = {"n": 2, "max_new_tokens": 8, "seed": 11, "eos_token_ids": (EOS_ID,)}
        return run(Collector(engines, items, sampling, slots=2).collect(6))

    assert [group.completions for group in sample()] == [group.completions for group in sample()]
