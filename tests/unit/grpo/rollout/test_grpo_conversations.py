"""Conversations of an environment on several engines: each comes once, alone or with the others of its row."""

import asyncio
from collections import Counter

import pytest
from waiting import HANG_S

from rlcanary.contract.batch import Completion
from rlcanary.grpo.data.datasets import Row
from rlcanary.grpo.data.items import ItemIterator
from rlcanary.grpo.engines.engine_pool import EnginePool
from rlcanary.grpo.rewards.exact import ExactVerifier
from rlcanary.grpo.rollout.conversations import conversations
from rlcanary.grpo.rollout.environment import ChatEnvironment
from rlcanary.tiny_models import EOS_ID, tiny_chat_tokenizer

TOKENIZER = tiny_chat_tokenizer()


class Echo:
    """A tool that every answer with a question mark uses."""

    def reply(self, answer):
        return "go on" if "?" in answer else None


class Talker:
    """Asks once in every conversation and then says yes; each request may be held or fail."""

    def __init__(self):
        self.version = 0
        self.requests = []
        self.held = {}
        self.fails = set()

    async def agenerate(self, prompt, sampling):
        asked = TOKENIZER.decode(prompt)
        row = asked.partition("user\n")[2].partition("<")[0]
        turn = asked.count("go on")
        self.requests.append((row, turn, sampling.get("seed")))
        number = len([request for request in self.requests if request[:2] == (row, turn)])
        await asyncio.sleep(0)
        if (row, turn, number) in self.held:
            await self.held[row, turn, number].wait()
        if (row, turn, number) in self.fails:
            raise ConnectionError("engine gone")
        text = "yes" if turn else "what?"
        ids = [*TOKENIZER.encode(text, add_special_tokens=False), EOS_ID]
        return [Completion(ids, text=text)]


def started(count, target="yes", retries=1):
    rows = [Row(f"r{index}", f"row {index}", target) for index in range(count)]
    items = ItemIterator(rows, retries=retries)
    items.start_epoch()
    return ChatEnvironment(rows, TOKENIZER, {"exact": ExactVerifier()}, tools=[Echo()], max_turns=3), items


def run(scenario):
    return asyncio.run(asyncio.wait_for(scenario, HANG_S))


async def everything(stream):
    return [completed async for completed in stream]


def test_conversations_of_a_row_come_together():
    environment, items = started(4)
    talkers = [Talker(), Talker()]
    pool = EnginePool(talkers, slots=2)
    groups = run(everything(conversations(environment, items, pool, {"n": 2})))
    assert [len({conversation.row.id for conversation in group}) for group in groups] == [1] * 4
    assert sorted(group[0].row.id for group in groups) == ["r0", "r1", "r2", "r3"]
    for group in groups:
        assert [(conversation.turns, conversation.ended) for conversation in group] == [(2, "answered")] * 2
        assert [conversation.step_rewards for conversation in group] == [[0.0, 1.0]] * 2
    assert all(talker.requests for talker in talkers)


def test_completed_conversation_does_not_wait_for_the_slowest_and_makes_room_for_the_next_row():
    environment, items = started(5)
    talker = Talker()

    async def scenario():
        may_end = talker.held["row 0", 1, 1] = asyncio.Event()
        seen = []
        pool = EnginePool([talker])
        async for (conversation,) in conversations(
            environment, items, pool, {"n": 2}, yield_completed_trajectories=True, ahead=2
        ):
            seen.append(conversation.row.id)
            if len(seen) == 9:
                may_end.set()
        return seen

    seen = run(scenario())
    assert Counter(seen) == {f"r{index}": 2 for index in range(5)}
    assert seen[-1] == "r0"


def test_failed_turn_begins_its_conversation_anew_and_no_other():
    environment, items = started(2)
    talker = Talker()
    talker.fails = {("row 1", 1, 1)}
    groups = run(everything(conversations(environment, items, EnginePool([talker]), {"n": 2, "seed": 5})))
    assert sorted(len(group) for group in groups) == [2, 2]
    turns = Counter(request[:2] for request in talker.requests)
    assert turns == {("row 0", 0): 2, ("row 0", 1): 2, ("row 1", 0): 3, ("row 1", 1): 3}
    assert len({seed for _, _, seed in talker.requests}) == len(talker.requests)


def test_lone_conversation_of_a_row_is_tried_no_more_often_than_the_iterator_says():
    environment, items = started(1, retries=2)
    talker = Talker()
    talker.fails = {("row 0", 0, number) for number in range(1, 20)}
    pool = EnginePool([talker], patience=20)
    assert run(everything(conversations(environment, items, pool, {"n": 1, "seed": 5}))) == []
    assert len({seed for _, _, seed in talker.requests}) == len(talker.requests) == 3


def test_row_that_cannot_be_scored_fails_and_the_others_come():
    class Broken(ExactVerifier):
        def verify(self, completion, target):
            if target == "broken":
                raise ZeroDivisionError
            return super().verify(completion, target)

    rows = [Row("good", "row good", "yes"), Row("bad", "row bad", "broken")]
    items = ItemIterator(rows, retries=1)
    items.start_epoch()
    environment = ChatEnvironment(rows, TOKENIZER, {"exact": Broken()})
    pool = EnginePool([Talker()])
    groups = run(everything(conversations(environment, items, pool, {"n": 2})))
    assert [group[0].row.id for group in groups] == ["good"]
    assert "could not be scored" in items.failures()["bad"]
    assert pool.counts["unscored"] >= 2


@pytest.mark.parametrize("abort", [False, True])
def test_sync_waits_for_the_turn_under_way_or_has_it_sampled_anew(abort):
    environment, items = started(1)
    talker = Talker()

    async def scenario():
        may_end = talker.held["row 0", 0, 1] = asyncio.Event()
        pool = EnginePool([talker])
        playing = asyncio.create_task(everything(conversations(environment, items, pool, {"n": 1})))
        while not talker.requests:
            await asyncio.sleep(0)
        if not abort:
            asyncio.get_running_loop().call_later(0.01, may_end.set)
        async with pool.paused(abort=abort):
            talker.version = 1
        return (await playing)[0][0]

    conversation = run(scenario())
    assert conversation.ended == "answered"
    assert [request[1] for request in talker.requests] == ([0, 0, 1] if abort else [0, 1])
