"""The importance ratio is 1 on samples of the weights that are trained."""

from __future__ import annotations

from collections.abc import Iterator

from rlcanary.live.findings import Finding
from rlcanary.live.record import Record

# Engines in lower precision move the mean by some hundredths.
FURTHEST = 0.1


def judge(record: Record) -> Iterator[Finding]:
    """Compare trainer and sampler on the tokens that the present weights drew."""
    if not record.is_on_policy or record.sampler_logprobs is None:
        return
    known_BT = record.mask & ~record.sampler_logprobs.isnan()
    if not known_BT.any():
        return
    gap_N = (record.logprobs - record.sampler_logprobs)[known_BT]
    mean = float(gap_N.exp().mean())
    if abs(mean - 1) > FURTHEST:
        yield Finding(
            "ratio",
            f"on samples of the present weights the mean ratio of trainer to sampler is {mean:.4g} and has to be 1; the "
            f"mean difference of their logprobs is {float(gap_N.mean()):.3g}, the largest {float(gap_N.abs().max()):.3g}",
            abs(mean - 1),
        )
