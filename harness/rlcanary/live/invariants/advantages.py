"""Advantages are those that the conventions make of the rewards and groups."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rlcanary import reference
from rlcanary.live.findings import Finding
from rlcanary.live.record import Record

FLOAT32 = torch.finfo(torch.float32).eps
LARGEST_ROUNDING = 0.25
"""An advantage of a group without signal that is not rounding any more, but what trains it."""


def declared(record: Record) -> Tensor | None:
    """Compute the declared advantages [B] of a record, None where they follow from more than rewards and groups."""
    conventions = record.conventions
    if conventions is None or record.rewards is None or record.group_ids is None:
        return None
    is_of_the_row = (conventions.token_credit, conventions.baseline_weighting, conventions.whitening) == (
        *("outcome", "rows", "none"),
    )
    if not is_of_the_row or "custom" in (conventions.advantage_baseline, conventions.advantage_scale):
        return None
    rewards_B = record.rewards
    if conventions.kl_coef != 0 and conventions.kl_placement == "reward":
        if record.ref_logprobs is None:
            return None
        old_BT = record.policy_batch(rewards_B).old_logprobs
        rewards_B = reference.rewards_with_kl(rewards_B, old_BT, record.ref_logprobs, record.mask, conventions)
    return reference.advantages(rewards_B, record.group_ids, conventions)


def judge(record: Record) -> Iterator[Finding]:
    """Compare the run's advantages with the declared ones."""
    expected_B = declared(record)
    if expected_B is None or record.advantages is None:
        return
    got = record.advantages
    if got.ndim == 2:
        got = got.masked_fill(~record.mask, 0).sum(dim=1) / record.mask.sum(dim=1).clamp(min=1)
    got_B = got
    trained_B = record.mask.any(dim=1) & ~expected_B.isnan()
    off_B = (got_B - expected_B).abs().masked_fill(~trained_B, 0).nan_to_num(nan=float("inf"))
    scale = float(expected_B[trained_B].abs().max()) if trained_B.any() else 0.0
    beyond_B = off_B - torch.maximum(torch.tensor(max(0.01 * scale, 0.01)), _rounding(record))
    if float(beyond_B.max()) > 0:
        row = int(beyond_B.argmax())
        yield Finding(
            "advantages",
            f"row {row} has the advantage {float(got_B[row]):.4g}, and its rewards and group make it "
            f"{float(expected_B[row]):.4g}; {int((off_B > 0.01).sum())} of {len(off_B)} rows differ",
            float(off_B.max()),
        )


def rounds(record: Record) -> Tensor:
    """Mark the rows [B] of groups of equal rewards whose mean in float32 need not be that reward, such as three of 0.9."""
    assert record.rewards is not None
    assert record.group_ids is not None
    rewards_B = record.rewards
    rounds_B = torch.zeros(len(rewards_B), dtype=torch.bool)
    for group in record.group_ids.unique():
        of_group_B = record.group_ids == group
        reward, count = rewards_B[of_group_B][0], int(of_group_B.sum())
        if count > 1 and bool((rewards_B[of_group_B] == reward).all()):
            sums = reward * torch.arange(1, count + 1)
            rounds_B |= of_group_B & bool((sums.float().double() != sums).any())
    return rounds_B


def _rounding(record: Record) -> Tensor:
    """Return the advantage [B] that rounding may give a row of a group of equal rewards: a mean's, over the epsilon."""
    assert record.conventions is not None
    assert record.rewards is not None
    size_B = 4 * FLOAT32 * record.rewards.abs() / max(record.conventions.advantage_eps, FLOAT32)
    return size_B.clamp(max=LARGEST_ROUNDING).masked_fill(~rounds(record), 0)
