"""The tokens that are trained are those that the sampler drew."""

from __future__ import annotations

from collections.abc import Iterator

from rlcanary.live.findings import Finding
from rlcanary.live.record import Record


def judge(record: Record) -> Iterator[Finding]:
    """Look for trained tokens without a sampler's logprob, where others have one."""
    if record.sampler_logprobs is None or record.sampler_logprobs.isnan().all():
        return
    undrawn_BT = record.mask & record.sampler_logprobs.isnan()
    if undrawn_BT.any():
        row, place = undrawn_BT.nonzero()[0].tolist()
        share = float(undrawn_BT.sum() / record.mask.sum())
        told = (
            f"{int(undrawn_BT.sum())} of {int(record.mask.sum())} trained tokens were not drawn by the sampler, the first "
            f"is token {place} of row {row}"
        )
        yield Finding("mask", told, share)
