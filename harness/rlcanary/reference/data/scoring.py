"""Scoring of completions, each with its own item's reward function."""

import logging
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

import torch
from torch import Tensor

log = logging.getLogger(__name__)
log.addHandler(logging.NullHandler())


class RewardedItem(Protocol):
    """Protocol of a dataset item, such as `rlcanary.contract.adapter.Item`.

    Attributes:
        id: identifies the item.
        prompt_ids: the ids given to the sampler.
        reward: maps a completion's text to its reward, or None if it cannot be scored.
    """

    @property
    def id(self) -> Hashable: ...

    @property
    def prompt_ids(self) -> Sequence[int]: ...

    @property
    def reward(self) -> Callable[[str], float | None]: ...


def score(items: Sequence[RewardedItem], completions: Sequence[str]) -> Tensor:
    """Score each completion with the reward function of its item.

    Args:
        items: one per completion; an item appears as often as it has completions.
        completions: their texts, as sampled.

    Returns:
        [B] float32. NaN where the reward function returned None or raised, which is logged: neither is a reward of zero.

    Raises:
        ValueError: there are not as many items as completions.
    """
    if len(items) != len(completions):
        raise ValueError(
            f"{len(items)} items and {len(completions)} completions: an item is needed for each completion"
        )
    rewards = [_reward(item, text) for item, text in zip(items, completions, strict=True)]
    return torch.tensor(rewards, dtype=torch.float32)


def _reward(item: RewardedItem, text: str) -> float:
    try:
        reward = item.reward(text)
    except Exception:
        log.warning("the reward function of item %r raised; its completion has no reward", item.id, exc_info=True)
        return math.nan
    return math.nan if reward is None else float(reward)
