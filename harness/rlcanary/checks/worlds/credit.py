"""Rewards to divide among tokens, values to train, and a critic.

Shapes: B rows, T positions.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Generator, Tensor

from rlcanary import reference, tiny_models
from rlcanary.checks.worlds import inputs, rows
from rlcanary.checks.worlds.inputs import uniform
from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.records.credit import CreditBatch, ValueBatch

SHAPES: tuple[inputs.Shape, ...] = ((2, 2, (2, 1)), (4, 4, (4, 2, 1, 3)), (4, 6, None), inputs.WITH_EMPTY_ROW)

# What gives the fields of credit an effect, none of them at 0 or 1.
DECAYS: dict[str, Any] = {"discount": 0.9, "gae_lambda": 0.8}


def tiny_critic() -> Any:
    """Make the tiny critic (`rlcanary.tiny_models.tiny_value_model`).

    Raises:
        NotProvided: transformers is not installed.
    """
    try:
        return tiny_models.tiny_value_model()
    except ModuleNotFoundError as error:
        raise NotProvided(f"{error.name} is not installed") from error


def credit_batch(rng: Generator, rows: int, width: int, lengths: tuple[int, ...] | None) -> CreditBatch:
    """A batch of two completions per prompt, one better than the other, in turns of two positions."""
    signs_B = torch.tensor([1.0, -1.0]).repeat(rows)[:rows]
    return CreditBatch(
        rewards=signs_B * uniform(rng, rows, low=0.3, high=1.5),
        mask=inputs.mask(rng, rows, width, lengths),
        group_ids=torch.arange(rows) // 2,
        values=uniform(rng, rows, width, low=-1, high=1),
        token_rewards=uniform(rng, rows, width, low=-0.1, high=0.1),
        turn_ids=(torch.arange(width) // 2).expand(rows, width).contiguous(),
    )


def drawn_credit(rng: Generator, size: int, conventions: Conventions) -> CreditBatch:
    """Draw uneven groups of at least two, in any order, with tool tokens between turns of any length.

    Batches whose rewards or advantages are nearly equal, so that dividing by their deviation blows up roundings, are drawn
    again.
    """
    for _ in range(20):
        groups = [max(2, each) for each in rows.sizes(rng, size)]
        count, width = sum(groups), rows.whole(rng, 1, 2 * size)
        batch = CreditBatch(
            rewards=uniform(rng, count, low=-2, high=2) * rows.one_of(rng, (1.0, 1.0, 30.0)),
            mask=rows.mask(rng, count, width),
            group_ids=torch.arange(len(groups)).repeat_interleave(torch.tensor(groups))[
                torch.randperm(count, generator=rng)
            ],
            values=uniform(rng, count, width, low=-2, high=2),
            token_rewards=uniform(rng, count, width, low=-0.5, high=0.5) if rows.one_of(rng, (True, False)) else None,
            turn_ids=(torch.rand(count, width, generator=rng) < 0.3).cumsum(dim=1),
        )
        if _is_well_conditioned(batch, conventions):
            return batch
    raise NotProvided("no drawn batch has rewards that differ enough")


def _is_well_conditioned(batch: CreditBatch, conventions: Conventions) -> bool:
    unwhitened = conventions.replace(whitening="none")
    token_rewards_B = 0.0 if batch.token_rewards is None else (batch.token_rewards * batch.mask).sum(dim=1)
    spreads = [reference.token_advantages(batch, unwhitened).advantages[batch.mask]]
    for rewards_B in (batch.rewards, batch.rewards + token_rewards_B):
        spreads += [rewards_B[batch.group_ids == group] for group in batch.group_ids.unique()]
    return all(len(values) > 1 and float(values.std()) > 0.05 for values in spreads)


def without_untrained(batch: CreditBatch) -> CreditBatch:
    """Move the trained tokens of each row to its beginning, and cut off what none of the rows needs."""
    order_BT = (~batch.mask).long().argsort(dim=1, stable=True)[:, : max(1, int(batch.mask.sum(dim=1).max()))]
    moved = {
        name: value.gather(1, order_BT)
        for name in ("mask", "values", "token_rewards", "turn_ids")
        if isinstance(value := getattr(batch, name), Tensor)
    }
    return replace(batch, **moved)


def known_returns(batch: CreditBatch, conventions: Conventions) -> Tensor:
    """[B, T] the return of each token, which a perfect critic knows before it."""
    limit = conventions.reward_clip
    rewards_B = batch.rewards if limit is None else batch.rewards.clamp(-limit, limit)
    is_last_BT = batch.mask & (batch.mask.flip(1).cumsum(dim=1).flip(1) == 1)
    token_rewards_BT = 0.0 if batch.token_rewards is None else batch.token_rewards
    rewards_BT = token_rewards_BT + is_last_BT * rewards_B.unsqueeze(1)
    return reference.returns_to_go(rewards_BT, batch.mask, conventions.discount)


def value_batch(rng: Generator, rows: int, width: int, lengths: tuple[int, ...] | None) -> ValueBatch:
    """A batch whose values moved by up to 0.7 either way, towards their returns or away from them."""
    old_BT = uniform(rng, rows, width, low=-1, high=1)
    return _value_batch(rng, old_BT, inputs.mask(rng, rows, width, lengths), torch.arange(rows) // 2)


def drawn_values(rng: Generator, size: int) -> ValueBatch:
    """Draw values of uneven groups, small and large, some of which moved far."""
    groups = rows.sizes(rng, size)
    count, width, scale = sum(groups), rows.whole(rng, 1, 2 * size), rows.one_of(rng, (1.0, 1.0, 30.0))
    group_ids_B = torch.arange(len(groups)).repeat_interleave(torch.tensor(groups))
    old_BT = uniform(rng, count, width, low=-scale, high=scale)
    return _value_batch(rng, old_BT, rows.mask(rng, count, width), group_ids_B)


def _value_batch(rng: Generator, old_BT: Tensor, mask_BT: Tensor, group_ids_B: Tensor) -> ValueBatch:
    # No move ends on a round number, where a clip may have two correct gradients, and no return lies amid two of them.
    moved_BT = uniform(rng, *old_BT.shape, low=-0.7, high=0.7) + 0.003
    return ValueBatch(
        values=(old_BT + moved_BT).round(decimals=3).requires_grad_(),
        returns=(old_BT + uniform(rng, *old_BT.shape, low=-1, high=1) + 0.0013).round(decimals=4),
        mask=mask_BT,
        old_values=old_BT,
        group_ids=group_ids_B,
    )
