"""Which groups and completions are worth training on."""

import math

import pytest
import torch

from rlcanary.contract.batch import Completion, Group
from rlcanary.reference import has_signal, is_overlong, is_stale


@pytest.mark.parametrize("size", [2, 3, 7, 63, 64])
@pytest.mark.parametrize("reward", [0.0, 0.1, 0.7, 0.9, 0.95, 95.0])
def test_equal_rewards_have_no_signal_whatever_their_rounded_deviation(size, reward):
    assert not has_signal(torch.full((size,), reward))


def test_rewards_that_differ_at_all_have_signal():
    assert has_signal(torch.tensor([0.9, 0.9, 0.9000001]))


def test_the_threshold_is_in_units_of_reward():
    assert not has_signal(torch.tensor([0.0, 0.1]), threshold=0.2)
    assert has_signal(torch.tensor([0.0, 0.3]), threshold=0.2)


def test_one_completion_has_no_signal():
    assert not has_signal(torch.tensor([1.0]))


@pytest.mark.parametrize("rewards", [[], [1.0, math.nan]])
def test_rewards_that_are_missing_are_an_error(rewards):
    with pytest.raises(ValueError, match="neither has nor lacks signal"):
        has_signal(torch.tensor(rewards))


def test_overlong_is_cut_by_the_sampler_or_above_the_limit():
    assert is_overlong(Completion([1, 2], finish_reason="length"), max_tokens=9)
    assert is_overlong(Completion([1, 2, 3]), max_tokens=2)
    assert not is_overlong(Completion([1, 2]), max_tokens=2)
    assert not is_overlong(Completion([]), max_tokens=2)


def group(version, *token_versions):
    completions = [Completion([1] * len(versions or [1]), token_versions=versions) for versions in token_versions]
    return Group([5], completions or [Completion([1])], [0.0] * max(1, len(completions)), policy_version=version)


def test_a_group_is_stale_beyond_the_allowed_versions():
    assert not is_stale(group(3), trainer_version=5, max_staleness=2)
    assert is_stale(group(2), trainer_version=5, max_staleness=2)


def test_one_old_token_makes_a_group_stale():
    assert is_stale(group(5, [5, 5], [2, 5]), trainer_version=5, max_staleness=2)
    assert not is_stale(group(5, [5, 5], [3, 5], None), trainer_version=5, max_staleness=2)


def test_a_group_whose_tokens_are_newer_than_its_request_is_as_old_as_they_are():
    """Weights were synced between sending the request and sampling the first token."""
    assert not is_stale(group(0, [3, 4], [5, 5]), trainer_version=5, max_staleness=2)
    assert is_stale(group(0, [3, 4], None), trainer_version=5, max_staleness=2)


def test_a_version_from_the_future_is_an_error():
    with pytest.raises(ValueError, match=r"version 6, .* at 5"):
        is_stale(group(5, [6]), trainer_version=5, max_staleness=1)
