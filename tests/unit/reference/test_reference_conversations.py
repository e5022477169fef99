"""Conversations of the reference at the limits of a row."""

import math

import pytest

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.checks.worlds.conversations import spoken, talk


@pytest.mark.parametrize("max_tokens", [5, 12])
def test_prompt_that_leaves_no_room_has_no_rows_and_no_reward(max_tokens: int) -> None:
    got = talk(ReferenceAdapter(), [2], n=2, max_tokens=max_tokens)
    assert got.engine.answered == []
    for episode in got.flat:
        assert (list(episode.rows), episode.turn_rewards) == ([], [])
        assert math.isnan(episode.reward)
        assert episode.messages == got.tasks[0].messages


def test_task_without_room_changes_nothing_for_the_others() -> None:
    (short,), (long,) = talk(ReferenceAdapter(), [1, 1], max_tokens=30).episodes
    assert (spoken(short), short.reward) == (["hello 0 "], 0.5)
    assert list(long.rows) == []


def test_answer_that_reaches_the_end_of_its_row_is_trained_as_a_truncated_one() -> None:
    ((episode,),) = talk(ReferenceAdapter(), [3], max_tokens=45).episodes
    (row,) = episode.rows
    assert len(row.prompt_ids) + len(row.completion.token_ids) == 45
    assert row.completion.finish_reason == "length"
    assert spoken(episode) == ["hello 0 ", "hello 1 "]
