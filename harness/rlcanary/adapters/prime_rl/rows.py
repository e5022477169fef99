"""The rows of a batch, of which prime-rl's samples are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlcanary.adapters.batches import prompts_of, tokens_of_completions

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.batch import CollatedBatch


@dataclass(frozen=True)
class Row:
    """A row of a batch, with one temperature and one advantage for its tokens.

    Attributes:
        token_ids: of the prompt and of the completion.
        start: of the completion.
        mask: the tokens that are trained.
        logprobs: those of the engine, 0 on what it did not sample.
        temperature: of the sampled tokens.
        advantage: of the completion.
    """

    token_ids: list[int]
    start: int
    mask: list[bool]
    logprobs: list[float]
    temperature: float
    advantage: float


def rows_of(batch: CollatedBatch, temperature: float, advantages: Tensor) -> list[Row]:
    """Return the rows of a batch."""
    import torch

    rows = []
    pairs = zip(prompts_of(batch), tokens_of_completions(batch), strict=True)
    for number, (prompt, kept) in enumerate(pairs):
        ids, trained = batch.completion_ids[number][kept], batch.completion_mask[number][kept]
        given = batch.old_logprobs
        logprobs = torch.zeros(len(ids)) if given is None else given[number][kept].masked_fill(~trained, 0.0)
        rows.append(
            Row(
                token_ids=[*prompt.tolist(), *ids.tolist()],
                start=len(prompt),
                mask=[False] * len(prompt) + trained.tolist(),
                logprobs=[0.0] * len(prompt) + logprobs.tolist(),
                temperature=temperature,
                advantage=float(advantages[number]),
            )
        )
    return rows
