"""Data: the order of items, conversations, rewards and batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlcanary.contract.declining import NotProvided

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.batch import CollatedBatch, Group
    from rlcanary.contract.records.lengths import Lengths
    from rlcanary.contract.records.reward_parts import RewardParts
    from rlcanary.contract.state import Item


class Data:
    """From the dataset's items to the batch of an update."""

    def make_batch(self, groups: list[Group], pad_token_id: int) -> CollatedBatch:
        """Groups -> one rectangular batch, rows of a group together and in order."""
        raise NotProvided

    def keep_group(self, rewards: Tensor) -> bool:
        """[G] rewards of one group -> whether dynamic sampling keeps the group.

        A filter that is made for rewards of 0 and 1 declines others with `NotProvided`.
        """
        raise NotProvided

    def shape_rewards(self, rewards: Tensor, lengths: Lengths) -> Tensor:
        """[B] rewards of completions -> [B] with what is added or taken off for their lengths."""
        raise NotProvided

    def combine_rewards(self, parts: RewardParts) -> Tensor:
        """Add up what several reward functions gave each completion -> [B], NaN where none of them gave anything.

        A row that some of them gave nothing may be the sum of the others, or NaN. Code that scales the parts by those of the
        group or batch (GDPO) declines.
        """
        raise NotProvided

    def render(
        self, messages: list[Mapping[str, Any]], tokenizer: Any, tools: list[Mapping[str, Any]] | None = None
    ) -> tuple[list[int], list[bool]]:
        """A conversation -> its ids and, per id, whether it is trained.

        Messages have a role and content. The assistant messages that this rollout sampled carry `"sampled": True`; their
        tokens and end-of-turn tokens are trained, earlier assistant messages are history and are not. A sampled message
        may carry `"token_ids"`, the ids that the sampler drew: they stand in the result as they are, because encoding
        their text again can give others, and an end-of-turn token that is not among them was not sampled. Code that
        renders from text alone declines such messages with `NotProvided`.

        The ids are those of the tokenizer's own chat template. Templates differ: some write each answer of a tool as a turn,
        others all answers that follow one another as one turn of the user. Code that writes the words of one template itself
        declines a tokenizer with another.

        `tools` are the JSON schemas of the tools that the policy is offered, as chat templates take them.
        """
        raise NotProvided

    def score(self, items: list[Item], completions: list[str]) -> Tensor:
        """Score each completion with its own item's reward function -> [B], NaN where that returned None or raised."""
        raise NotProvided

    def data_order(self, n_items: int, epoch: int, rank: int, world_size: int) -> list[int]:
        """Indices that this rank visits in this epoch, in order. They depend only on the arguments and the run's seed."""
        raise NotProvided

    def resumed_order(self, n_items: int, consumed: int, count: int, rank: int, world_size: int) -> list[int]:
        """Indices that this rank visits next in a run that was stopped after its first `consumed` items and resumed.

        The next `count` of them, over the ends of epochs. `data_order` has the order of each epoch.
        """
        raise NotProvided
