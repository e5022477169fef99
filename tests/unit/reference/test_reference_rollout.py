"""Rollout: groups follow their items, whatever order the engine answers in; and the engine of the checks is that bad."""

import asyncio

import pytest

from rlcanary.checks.worlds.scripted_engine import ScriptedEngine, engine_of, items_of, sampling_of, scripted_items
from rlcanary.contract.adapter import Item
from rlcanary.contract.batch import Completion
from rlcanary.reference.rollout import rollout, sample_group
from rlcanary.tiny_models import EOS_ID


def test_groups_follow_items_although_the_first_prompt_ends_last():
    items = scripted_items(7, 3)
    groups = rollout(engine_of(items), items_of(items), sampling_of(n=3))
    assert [group.item_id for group in groups] == list("abcdefg")
    for group, item in zip(groups, items, strict=True):
        assert list(group.completions) == item.completions
        assert group.rewards == [item.rewards[completion.text] for completion in item.completions]


def test_scripted_engine_ends_the_first_prompt_last():
    items = scripted_items(3, 1)
    engine = engine_of(items)

    async def as_they_end():
        tasks = [asyncio.create_task(sample_group(engine, item, sampling_of())) for item in items_of(items)]
        return [(await task).item_id for task in asyncio.as_completed(tasks)]

    assert asyncio.run(as_they_end()) == ["c", "b", "a"]


def test_prompts_are_under_way_together():
    items = scripted_items(3, 1)
    engine = engine_of(items, syncing=True)
    rollout(engine, items_of(items), sampling_of())
    assert [request.version for request in engine.requests] == [0, 0, 0]


def test_group_is_tagged_with_the_version_at_the_start_of_sampling():
    items = scripted_items(2, 1)
    engine = engine_of(items, version=3, syncing=True)
    groups = rollout(engine, items_of(items), sampling_of())
    assert engine.version == 5
    assert [group.policy_version for group in groups] == [3, 3]
    assert groups[0].completions[0].token_versions == [3, 4, 4]


def test_failing_request_fails_the_rollout():
    items = scripted_items(2, 1)
    with pytest.raises(RuntimeError, match="the engine died"):
        rollout(engine_of(items, fails=[items[1].prompt]), items_of(items), sampling_of())


def test_missing_completion_is_refused():
    class OneTooFew(ScriptedEngine):
        async def agenerate(self, prompt, sampling):
            return (await super().agenerate(prompt, sampling))[:-1]

    engine = OneTooFew({(11,): [Completion([21, EOS_ID], text="a")] * 2})
    with pytest.raises(ValueError, match=r"'a': 2 completions .* 1 returned"):
        rollout(engine, [Item("a", [11], len)], sampling_of(n=2))


def test_completion_without_text_is_refused_because_nothing_can_reward_it():
    engine = ScriptedEngine({(11,): [Completion([21, EOS_ID])]})
    with pytest.raises(ValueError, match="without its text"):
        rollout(engine, [Item("a", [11], len)], sampling_of())
