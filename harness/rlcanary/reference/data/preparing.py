"""Preparation of a dataset: render prompts, filter by length, take, shuffle and split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from rlcanary.contract.conventions import Conventions
from rlcanary.contract.declining import NotProvided
from rlcanary.contract.presets import GRPO
from rlcanary.contract.records.preparation import DataRow, PreparationOptions, PreparedData, PreparedRow


def prepare(
    rows: Sequence[DataRow], tokenizer: Any, options: PreparationOptions, conventions: Conventions = GRPO
) -> PreparedData:
    """Prepare the rows of a dataset. Every row is kept, held out or dropped with a reason.

    The order of steps is: equal prompts, length, shuffling, counts per dataset, and the last rows are held out.

    Raises:
        ValueError: a prompt is longer than the limit and declared to be an error, a dataset has fewer rows than are to be
            taken, or no row is left to train on where some are held out.
    """
    dropped: dict[Hashable, str] = {}
    seen: set[tuple[tuple[int, ...], str]] = set()
    kept: list[PreparedRow] = []
    for row in rows:
        ids = prompt_ids(row.messages, tokenizer, options.system_prompt, conventions)
        if (tuple(ids), row.reference) in seen and conventions.equal_prompts == "drop":
            dropped[row.id] = "the same prompt and reference as an earlier row"
            continue
        seen.add((tuple(ids), row.reference))
        limit = len(ids) if options.max_prompt_tokens is None else options.max_prompt_tokens
        if len(ids) > limit:
            if conventions.long_prompt == "raise":
                raise ValueError(f"the prompt of row {row.id!r} has {len(ids)} tokens, more than {limit}")
            if conventions.long_prompt == "drop":
                dropped[row.id] = f"{len(ids)} tokens, more than {limit}"
                continue
            ids = ids[:limit] if conventions.long_prompt == "right" else ids[len(ids) - limit :]
        kept.append(PreparedRow(row.id, ids, row.reference, row.dataset))
    kept = _shuffled(kept, options.seed)
    kept, others = _taken(kept, options.counts)
    dropped |= {row.id: f"enough rows of {row.dataset}" for row in others}
    if options.held_out and options.held_out >= len(kept):
        raise ValueError(f"of {len(kept)} rows {options.held_out} cannot be held out")
    border = len(kept) - options.held_out
    return PreparedData(kept[:border], kept[border:], dropped)


def prompt_ids(
    messages: Sequence[Mapping[str, Any]], tokenizer: Any, system_prompt: str, conventions: Conventions = GRPO
) -> list[int]:
    """Write a conversation as a prompt: in the tokenizer's template up to where the assistant begins, or as plain text.

    Raises:
        NotProvided: prompts are declared to be written in another way.
    """
    has_own = bool(messages) and messages[0]["role"] == "system"
    first = [{"role": "system", "content": system_prompt}] if system_prompt and not has_own else []
    whole = [*first, *messages]
    if conventions.prompt_style == "template":
        return list(tokenizer.apply_chat_template(whole, tokenize=True, return_dict=False, add_generation_prompt=True))
    if conventions.prompt_style == "raw":
        return list(tokenizer.encode("\n\n".join(message["content"] for message in whole)))
    raise NotProvided("prompts are written in a way that has no name")


def _shuffled(rows: list[PreparedRow], seed: int | None) -> list[PreparedRow]:
    if seed is None:
        return rows
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    return [rows[index] for index in order.tolist()]


def _taken(rows: Sequence[PreparedRow], counts: Mapping[str, int]) -> tuple[list[PreparedRow], list[PreparedRow]]:
    """Divide rows into the first ones of each dataset, as many as its count says, and the others."""
    taken: list[PreparedRow] = []
    others: list[PreparedRow] = []
    met: Counter[str] = Counter()
    for row in rows:
        met[row.dataset] += 1
        (others if met[row.dataset] > counts.get(row.dataset, len(rows)) else taken).append(row)
    if short := {name: met[name] for name, count in counts.items() if met[name] < count}:
        raise ValueError(f"datasets with fewer rows than are to be taken: {short}")
    return taken, others
