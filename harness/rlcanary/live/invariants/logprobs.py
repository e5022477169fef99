"""The trainer's logprob of each trained token is a number."""

from __future__ import annotations

from collections.abc import Iterator

from rlcanary.live.findings import Finding
from rlcanary.live.record import Record


def judge(record: Record) -> Iterator[Finding]:
    """Look for trained tokens whose logprob is NaN, also where the loss is linear in it and its gradient is finite."""
    unscored_BT = record.mask & record.logprobs.isnan()
    if unscored_BT.any():
        row, place = unscored_BT.nonzero()[0].tolist()
        count, trained = int(unscored_BT.sum()), int(record.mask.sum())
        told = f"the trainer's logprob is NaN on {count} of {trained} trained tokens, first token {place} of row {row}"
        yield Finding("logprobs.not_finite", told, count / trained)
