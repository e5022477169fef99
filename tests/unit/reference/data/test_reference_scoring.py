"""Rewards: one per completion, by its own item, and what a function did not say is NaN."""

import logging

import pytest
import torch

from rlcanary.contract.adapter import Item
from rlcanary.reference.data.scoring import score


def item(name, reward):
    return Item(name, [11], reward)


def test_each_completion_is_rewarded_by_its_own_item():
    rewards = score([item("a", {"4": 1.0}.get), item("b", {"4": 0.25}.get)], ["4", "4"])
    assert rewards.dtype == torch.float32
    assert rewards.tolist() == [1.0, 0.25]


def test_reward_of_zero_is_zero_and_reward_of_none_is_nan():
    rewards = score([item("a", {"wrong": 0.0}.get)] * 2, ["wrong", "cannot tell"])
    assert rewards[0] == 0.0
    assert rewards[1].isnan()


def test_reward_function_that_raises_gives_nan_to_its_completion_alone():
    rewards = score([item("a", float)] * 3, ["1.0", "oops", "0.5"])
    assert rewards[[0, 2]].tolist() == [1.0, 0.5]
    assert rewards[1].isnan()


def test_reward_function_that_raises_is_logged_with_its_item(caplog):
    with caplog.at_level(logging.WARNING):
        score([item("prompt-7", float)], ["oops"])
    assert "prompt-7" in caplog.text
    assert "ValueError" in caplog.text


def test_interrupt_in_a_reward_function_is_not_a_missing_reward():
    def interrupted(text):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score([item("a", interrupted)], ["4"])


def test_items_and_completions_of_unequal_number_are_refused():
    with pytest.raises(ValueError, match="2 items and 1 completions"):
        score([item("a", float)] * 2, ["1.0"])


def test_no_completions_have_no_rewards():
    assert score([], []).shape == (0,)
