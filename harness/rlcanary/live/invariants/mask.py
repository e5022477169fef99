"""The tokens that are trained are those that the sampler drew."""

from __future__ import annotations

from collections.abc import Iterator

from rlcanary.live.findings import Finding
from rlcanary.live.record import Record


def judge(record: Record) -> Iterator[Finding]:
    """Look for trained tokens without a sampler's logprob, and for others with one, before trained ones."""
    if record.sampler_logprobs is None or record.sampler_logprobs.isnan().all():
        return
    is_before_trained_BT = record.mask.flip(1).cumsum(1).flip(1) > 0
    kept_BT = ~record.mask & is_before_trained_BT & (record.sampler_logprobs < 0)
    if kept_BT.any():
        row, place = kept_BT.nonzero()[0].tolist()
        drawn = int((record.sampler_logprobs < 0).sum())
        told = (
            f"{int(kept_BT.sum())} of {drawn} tokens that the sampler drew are not trained, before others of their rows "
            f"that are; the first is token {place} of row {row}"
        )
        yield Finding("mask.untrained", told, float(kept_BT.sum()) / drawn)
    undrawn_BT = record.mask & record.sampler_logprobs.isnan()
    if undrawn_BT.any():
        row, place = undrawn_BT.nonzero()[0].tolist()
        share = float(undrawn_BT.sum() / record.mask.sum())
        told = (
            f"{int(undrawn_BT.sum())} of {int(record.mask.sum())} trained tokens were not drawn by the sampler, the first "
            f"is token {place} of row {row}"
        )
        yield Finding("mask.undrawn", told, share)
