"""Rows of tokens, logprobs and masks in torchrl's containers, and back."""

from __future__ import annotations

from typing import Any

import torch

from rlcanary.grpo.engines.containers import LogProbs, Masks, Tokens


def to_torchrl(rows: Tokens | LogProbs | Masks) -> Any:
    """Convert B rows to torchrl's container of that name, ragged as its wrappers give them.

    torchrl's `Masks` covers the whole row; where the prompt ends only the `Tokens` beside it tell.
    """
    from tensordict import lazy_stack
    from torchrl.modules.llm import policies

    container = getattr(policies, type(rows).__name__)
    if isinstance(rows, Masks):
        pairs = zip(rows.select("attention"), rows.select("assistant"), strict=True)
        fields = [{"all_attention_mask": attention, "all_assistant_mask": assistant} for attention, assistant in pairs]
    else:
        parts = zip(rows.prompt, rows.response, rows.full, strict=True)
        fields = [dict(zip(("prompt", "response", "full"), row, strict=True)) for row in parts]
    return lazy_stack([container(**row, padded=False, batch_size=()) for row in fields])


def from_torchrl(rollouts: Any) -> tuple[Tokens, LogProbs]:
    """Convert the ids and logprobs of torchrl's ragged rollouts of B rows; NaN on a prompt that was not scored.

    Raises:
        ValueError: the rows are padded, and say nowhere which of their ids are tokens.
    """
    rows = rollouts.unbind(0)
    if any(row["tokens"].padded for row in rows):
        raise ValueError("padded rows cannot tell a token from padding: ask torchrl for pad_output=False")
    tokens = Tokens([row["tokens", "prompt"] for row in rows], [row["tokens", "response"] for row in rows])
    scored = [row.get(("log_probs", "prompt")) for row in rows]
    prompts = [
        torch.full(ids.shape, torch.nan) if logprobs is None else logprobs
        for ids, logprobs in zip(tokens.prompt, scored, strict=True)
    ]
    return tokens, LogProbs(prompts, [row["log_probs", "response"] for row in rows])
