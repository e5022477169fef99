"""The records of per-token credit and of a critic.

Shapes: B rows (completions), T completion positions. What stands outside a mask has no meaning and may be anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlcanary.contract.batch import Batch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class CreditBatch(Batch):
    """The rewards of completions, and what is needed to divide them among the tokens.

    Attributes:
        rewards: [B] of whole completions. Where credit runs along the tokens, it falls on the row's last trained token.
        mask: [B, T] bool, true on the tokens that are trained; tokens of tools leave holes.
        group_ids: [B] index of the group that each row belongs to.
        values: [B, T] the critic's value before each token; None without a critic.
        token_rewards: [B, T] rewards of single tokens on top, such as process rewards or KL penalties; None if there are
            none.
        turn_ids: [B, T] long, the turn that each token belongs to, counting up along the row; None if credit needs no turns.
    """

    rewards: Tensor
    mask: Tensor
    group_ids: Tensor
    values: Tensor | None = None
    token_rewards: Tensor | None = None
    turn_ids: Tensor | None = None


@dataclass
class Credit:
    """The credit of each trained token.

    Attributes:
        advantages: [B, T] that the policy loss takes.
        returns: [B, T] that the critic is trained towards; None without a critic.
    """

    advantages: Tensor
    returns: Tensor | None = None


@dataclass
class ValueBatch(Batch):
    """The inputs of a value loss.

    Attributes:
        values: [B, T] of the critic in training; the loss is differentiable with respect to them.
        returns: [B, T] that they are trained towards.
        mask: [B, T] bool, true on the tokens that are trained.
        old_values: [B, T] of the critic before the update, for value clipping.
        group_ids: [B], for aggregations over groups.
        global_tokens: number of trained tokens of the whole update that this batch is a part of; None means this batch
            is the whole.
        global_sequences: number of rows of the whole update, counted as the aggregation counts them; None likewise.
    """

    values: Tensor
    returns: Tensor
    mask: Tensor
    old_values: Tensor | None = None
    group_ids: Tensor | None = None
    global_tokens: float | None = None
    global_sequences: float | None = None
