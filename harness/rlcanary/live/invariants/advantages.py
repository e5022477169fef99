"""Advantages are those that the conventions make of the rewards and groups."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from rlcanary import reference
from rlcanary.live.findings import Finding
from rlcanary.live.record import Record


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
    got_B = got if got.ndim == 1 else (got * record.mask).sum(dim=1) / record.mask.sum(dim=1).clamp(min=1)
    trained_B = record.mask.any(dim=1) & ~expected_B.isnan()
    off_B = ((got_B - expected_B).abs() * trained_B).nan_to_num(nan=float("inf"))
    scale = float(expected_B[trained_B].abs().max()) if trained_B.any() else 0.0
    # A constant group's deviation is rounding, over an epsilon.
    if float(off_B.max()) > max(0.01 * scale, 0.01):
        row = int(off_B.argmax())
        yield Finding(
            "advantages",
            f"row {row} has the advantage {float(got_B[row]):.4g}, and its rewards and group make it "
            f"{float(expected_B[row]):.4g}; {int((off_B > 0.01).sum())} of {len(off_B)} rows differ",
            float(off_B.max()),
        )
