"""The update of several data-parallel ranks, put together from the rows of each."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from rlcanary.live.record import Record
from rlcanary.live.weights import Moves

Ranks = Literal["mean", "sum", "separate"]
Made = tuple[Record, Moves | None]


def count() -> int:
    """Return the number of processes of this run."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_first(group: Any = None) -> bool:
    """Tell whether this process is the one that speaks for all."""
    return count() == 1 or rank(group) == 0


def rank(group: Any = None) -> int:
    """Return the number of this process among those that share an update."""
    return dist.get_rank(group)


def gathered(made: Made | None, ranks: Ranks, group: Any = None) -> Made | None:
    """Gather what each rank has made, on every rank -> the whole update; None where a rank has nothing.

    Args:
        made: the record of this rank's rows and its part of the weights; None if making it failed.
        ranks: the gradient of the update is the "mean" of the ranks' gradients, or their "sum".
        group: the process group of the data-parallel ranks; None is all processes.
    """
    parts: list[Made | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, made, group)
    whole = [part for part in parts if part is not None]
    if len(whole) < len(parts):
        return None
    records, moves = [record for record, _ in whole], [each for _, each in whole if each is not None]
    return joined(records, ranks), Moves.of_all(moves) if len(moves) == len(whole) else None


def joined(records: list[Record], ranks: Ranks) -> Record:
    """Put the rows of several ranks under each other, padded on the right."""
    first, width = records[0], max(record.mask.shape[1] for record in records)
    tensors: dict[str, Any] = {}
    for name in (each.name for each in fields(Record)):
        values = [getattr(record, name) for record in records]
        if all(isinstance(value, Tensor) for value in values):
            tensors[name] = torch.cat([_widened(value, width) for value in values])
        elif isinstance(values[0], Tensor):
            tensors[name] = None  # Not every rank knows it.
    starts = torch.tensor([0, *(len(record.mask) for record in records)]).cumsum(0).tolist()
    pieces = [rows + start for record, start in zip(records, starts, strict=False) for rows in record.pieces]
    of_ranks = [[rows + start for rows in record.parts] for record, start in zip(records, starts, strict=False)]
    parts = [torch.cat(rows) for rows in zip(*of_ranks, strict=True)]
    if ranks == "mean":
        tensors["gradient"] = tensors["gradient"] / len(records)
    return replace(first, **tensors, pieces=pieces, parts=parts, eps=max(record.eps for record in records))


def _widened(value: Tensor, width: int) -> Tensor:
    return value if value.ndim == 1 else torch.nn.functional.pad(value, (0, width - value.shape[1]))
