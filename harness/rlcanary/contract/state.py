"""The state of a training run and the items that it trains on."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class TrainState:
    """The state of an optimizer update. A codebase's own state object will do if it has these attributes.

    Attributes:
        model: the policy in training, called with input_ids, attention_mask and position_ids.
        optimizer: a torch optimizer over its parameters, or over copies of them such as float32 masters.
        scheduler: a torch learning-rate scheduler, stepped once per update; None where the learning rate is constant.
        ref_model: the reference model, or None where there is no KL term.
        eval_items: the items that an evaluation answers and is rewarded for.
    """

    model: Any
    optimizer: Any
    scheduler: Any
    ref_model: Any = None
    eval_items: Sequence[Item] = ()


@dataclass(frozen=True)
class Item:
    """A prompt of the dataset and how its completions are rewarded.

    Attributes:
        id: identifies the item.
        prompt_ids: the ids given to the sampler.
        reward: the item's own reward function, from the text of a completion. It may return None (not scorable), return
            0.0 (wrong) or raise, which are three different things.
    """

    id: Hashable
    prompt_ids: Sequence[int]
    reward: Callable[[str], float | None]
