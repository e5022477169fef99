"""The parts of a finding that can be drawn, as plain data: the numbers that it compared, and the batch on which it did."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from rlcanary.checks.closeness import tolerance
from rlcanary.checks.literal import clipped
from rlcanary.checks.tally import Compared, Found
from rlcanary.contract.batch import CollatedBatch, Group
from rlcanary.system.printable import printable

ROWS, COLUMNS = 6, 24
"""A picture shows at most this many rows and columns of a larger tensor, around the first entries that differ."""

WORDS = {
    "completion_ids": "id",
    "token_ids": "id",
    "input_ids": "id",
    "ids": "id",
    "rewards": "reward",
    "group_ids": "group",
    "advantages": "advantage",
}
"""The inputs that are shown beside a comparison of their shape, or in front of its rows."""

Grid = dict[str, Any]
Named = Sequence[tuple[str, Tensor]]


@dataclass(frozen=True)
class Row:
    """A row of a table, as wide as it.

    Attributes:
        label: names the row.
        strips: word to the values in its columns. Shorter ones end early; None is an empty cell.
        off: whether got differs from expected in each column; empty where nothing does.
        trained: whether each column is a token that is trained; None where that is unknown or they are no tokens.
    """

    label: str
    strips: Mapping[str, Sequence[Any]]
    off: Sequence[bool] = ()
    trained: Sequence[bool] | None = None


def picture(found: Found) -> dict[str, Grid]:
    """Return what can be drawn of a finding.

    Its keys are `compared`, with the strips "expected" and "got", and `batch`, with the weight or the id of each token of
    the case's batch. Each is missing where there is no such thing; `batch` also where the comparison is of its tokens.
    """
    seen, drawn = [pair for given in found.seen for pair in _tensors(given)], {}
    if found.compared is not None and (rows := _sides(found.compared, seen)):
        drawn["compared"] = grid(rows)
    batches = [rows for given in reversed(found.seen) if (rows := list(_batch(given)))]
    if batches and not any(row["trained"] for row in drawn.get("compared", {"rows": []})["rows"]):
        drawn["batch"] = grid(batches[0])
    return drawn


def grid(rows: Sequence[Row]) -> Grid:
    """Cut rows down to what is shown of them.

    Returns:
        `shape` (rows and columns of the whole), `columns` (indices of those that are shown), and `rows` with the fields of
        `Row`: a cell is a number, a text, a bool, or null.
    """
    width = max(len(values) for row in rows for values in row.strips.values())
    chosen = rows
    if len(rows) > ROWS:
        places = sorted(range(len(rows)), key=lambda place: not any(rows[place].off))[:ROWS]
        chosen = [rows[place] for place in sorted(places)]
    differing = [column for row in chosen for column, is_off in enumerate(row.off) if is_off]
    start = max(0, min(min(differing, default=0) - 2, width - COLUMNS))
    columns = range(start, min(width, start + COLUMNS))

    def cut(values: Sequence[Any]) -> list[Any]:
        return [_cell(values[column]) if column < len(values) else None for column in columns]

    return {
        "shape": [len(rows), width],
        "columns": list(columns),
        "rows": [
            {
                "label": row.label,
                "strips": {word: cut(values) for word, values in row.strips.items()},
                "off": [bool(each) for each in cut(row.off)],
                "trained": None if row.trained is None else cut(row.trained),
            }
            for row in chosen
        ],
    }


def tensor_rows(
    strips: Mapping[str, Tensor],
    mask: Tensor,
    labels: Sequence[str],
    off: Tensor | None = None,
    there: Tensor | None = None,
) -> list[Row]:
    """Return tensors of one shape, [B, T], as rows of strips.

    Args:
        strips: word to tensor.
        mask: bool, true on the tokens that are trained.
        labels: one per row.
        off: bool, true where the strips differ; None if they do nowhere.
        there: bool, false on padding, which stays empty; None if all is shown.
    """
    off = torch.zeros_like(mask) if off is None else off
    there = torch.ones_like(mask) if there is None else there | off

    def cells(values_T: Tensor, row: int) -> list[Any]:
        return [value if shown else None for value, shown in zip(values_T.tolist(), there[row].tolist(), strict=True)]

    return [
        Row(
            label, {word: cells(each[row], row) for word, each in strips.items()}, off[row].tolist(), mask[row].tolist()
        )
        for row, label in enumerate(labels)
    ]


def _sides(compared: Compared, seen: Named) -> list[Row]:
    """Return both sides of a comparison as rows, with what the code saw of their shape; none if they are no table."""
    if compared.where is None:
        return _listed(compared.got, compared.expected)
    got, expected, where = compared.got.detach().cpu(), compared.expected.cpu(), compared.where.cpu()
    expected = expected.to(got.dtype)
    if not got.numel():
        return []
    rtol, atol = tolerance(got, expected) if got.is_floating_point() else (0.0, 0.0)
    off = where & ~torch.isclose(got.double(), expected.double(), rtol=rtol, atol=atol, equal_nan=True)
    alike = _first([(name, each) for name, each in seen if each.shape == got.shape and got.ndim])
    strips = {WORDS[name]: each for name, each in alike.items() if name in WORDS} | {"expected": expected, "got": got}
    cells = {word: _last_dimension(each) for word, each in strips.items()}
    counted, differing = _last_dimension(where), _last_dimension(off)
    for word in ("expected", "got"):
        cells[word] = [
            [value if one else None for value, one in zip(*pair, strict=True)]
            for pair in zip(cells[word], counted, strict=True)
        ]
    masks = [_last_dimension(each) for name, each in alike.items() if _is_mask(name, each)]
    return [
        Row(label, {word: rows[row] for word, rows in cells.items()}, differing[row], masks[0][row] if masks else None)
        for row, label in enumerate(_labels(got.shape, seen))
    ]


def _listed(got: Any, expected: Any) -> list[Row]:
    """Return scalars, lists of them, or lists of such lists, position by position."""

    def rows_of(value: Any) -> list[list[Any]]:
        rows = value if isinstance(value, list | tuple) else [value]
        return [list(row) for row in rows] if all(isinstance(row, list | tuple) for row in rows) else [list(rows)]

    sides = rows_of(got), rows_of(expected)
    cells = [cell for side in sides for row in side for cell in row]
    if not cells or not all(isinstance(cell, bool | int | float | str | None) for cell in cells):
        return []
    height, width = max(map(len, sides)), max(len(row) for side in sides for row in side)
    ours, theirs = (
        [[*row, *[None] * (width - len(row))] for row in [*side, *[[]] * (height - len(side))]] for side in sides
    )
    return [
        Row(
            f"row {row}" if height > 1 else "",
            {"expected": wanted, "got": given},
            [a != b for a, b in zip(given, wanted, strict=True)],
        )
        for row, (given, wanted) in enumerate(zip(ours, theirs, strict=True))
    ]


def _batch(given: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the rows of the batch among the inputs of a case, or the arguments of a call."""
    seen = list(_tensors(given))
    for value in given.values():
        groups = [value] if isinstance(value, Group) else value
        if isinstance(groups, list) and groups and all(isinstance(each, Group) for each in groups):
            yield from _groups(groups)
            return
        if isinstance(value, CollatedBatch) and _is_whole(value):
            labels = _labels(value.input_ids.shape, seen)
            yield from tensor_rows({"id": value.input_ids}, where_trained(value), labels, there=value.attention_mask)
            return
    masks = [each for name, each in seen if _is_mask(name, each) and each.numel()]
    if masks:
        (mask, *_) = masks
        alike = _first([(name, each) for name, each in seen if each.shape == mask.shape])
        strips = {WORDS[name]: each for name, each in alike.items() if name in WORDS}
        advantages = _first(seen).get("advantages")
        if advantages is not None and advantages.shape == mask.shape[:1]:
            strips["advantage"] = advantages.unsqueeze(1).expand(mask.shape)
        yield from tensor_rows(strips or {"trained": mask}, mask, _labels(mask.shape, seen))


def _is_whole(batch: CollatedBatch) -> bool:
    """Tell whether the rows of a batch, which the code under test may have made, belong together."""
    rows = batch.input_ids.shape[:1]
    shapes = batch.attention_mask.shape, batch.completion_mask.shape[:1], batch.completion_starts.shape
    return batch.completion_mask.ndim == 2 and shapes == (batch.input_ids.shape, rows, rows)


def where_trained(batch: CollatedBatch) -> Tensor:
    """Lay the completion mask, [B, T], on the positions of whole rows, [B, S]."""
    mask_BS = torch.zeros_like(batch.input_ids, dtype=torch.bool)
    for row, start in enumerate(batch.completion_starts.tolist()):
        width = max(0, min(batch.completion_mask.shape[1], mask_BS.shape[1] - start))
        mask_BS[row, start : start + width] = batch.completion_mask[row, :width]
    return mask_BS


def _groups(groups: Sequence[Group]) -> Iterator[Row]:
    for number, group in enumerate(groups):
        for completion, reward in zip(group.completions, group.rewards, strict=True):
            ids, prompt = [*group.prompt_ids, *completion.token_ids], [False] * len(group.prompt_ids)
            sampled = completion.sampled or [True] * len(completion.token_ids)
            label = f"group {number}, reward {reward:.3g}, {completion.finish_reason}"
            yield Row(label, {"id": ids}, trained=[*prompt, *sampled])


def _tensors(inputs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of inputs and of their records, without the shapes in their names."""
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            yield re.sub(r"_[A-Z]+$", "", name), value.detach().cpu()
        elif is_dataclass(value) and not isinstance(value, type):
            yield from _tensors({field.name: getattr(value, field.name) for field in fields(value)})


def _first(named: Named) -> dict[str, Tensor]:
    """Return the first tensor of each name."""
    return dict(reversed(named))


def _is_mask(name: str, value: Tensor) -> bool:
    return name.endswith("mask") and name != "attention_mask" and value.dtype == torch.bool and value.ndim == 2


def _last_dimension(tensor: Tensor) -> list[list[Any]]:
    """Return the last dimension as rows; a scalar is a row of one."""
    rows: list[list[Any]] = tensor.detach().cpu().reshape(-1, tensor.shape[-1] if tensor.ndim else 1).tolist()
    return rows


def _labels(shape: Sequence[int], seen: Named) -> list[str]:
    """Name rows by their place; those of [B, T] also by what the code saw of them."""
    if len(shape) < 2:
        return [""]
    places: list[list[int]] = [[]]
    for size in shape[:-1]:
        places = [[*place, index] for place in places for index in range(size)]
    facts = {}
    if len(shape) == 2:
        alike = _first([(name, each) for name, each in seen if each.shape == shape[:1]])
        facts = {WORDS[name]: each.tolist() for name, each in alike.items() if name in WORDS}
    return [
        ", ".join(
            [f"row {' '.join(map(str, place))}", *(f"{word} {values[place[0]]:.3g}" for word, values in facts.items())]
        )
        for place in places
    ]


def _cell(value: Any) -> Any:
    if not isinstance(value, float):
        return printable(clipped(value)) if isinstance(value, str) else value
    # JSON has neither NaN nor infinities.
    return float(f"{value:.6g}") if math.isfinite(value) else str(value)
