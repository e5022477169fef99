"""An update has as many rows as the run declares, and none is longer than it allows."""

from __future__ import annotations

from collections.abc import Iterator

from rlcanary.live.findings import Finding
from rlcanary.live.record import Record


def judge(record: Record) -> Iterator[Finding]:
    """Compare the rows and their lengths with the declared ones."""
    if record.is_rollout:
        return
    rows, width = record.mask.shape
    if record.declared_rows is not None and rows != record.declared_rows:
        told = f"the update has {rows} rows, and {record.declared_rows} are declared: some are lost, or come twice"
        yield Finding("size.rows", told, abs(rows - record.declared_rows))
    if record.max_tokens is None or not record.mask.any():
        return
    first_B = record.mask.int().argmax(dim=1)
    last_B = width - 1 - record.mask.flip(1).int().argmax(dim=1)
    tokens_B = (last_B - first_B + 1) * record.mask.any(dim=1)
    if int(tokens_B.max()) > record.max_tokens:
        count = int((tokens_B > record.max_tokens).sum())
        told = (
            f"{count} completions are longer than the declared {record.max_tokens} tokens, that of row "
            f"{int(tokens_B.argmax())} has {int(tokens_B.max())}"
        )
        yield Finding("size.tokens", told, int(tokens_B.max()) - record.max_tokens)
