"""Replayed routes: each token goes to the experts that it went to when it was sampled, in each layer."""

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Generator, Tensor

from rlcanary.checks.asserts import assert_true, assert_unchanged
from rlcanary.checks.case import Case
from rlcanary.checks.check import check
from rlcanary.checks.worlds.rows import one_of, whole
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.records.routing import ReplayLayout, RoutedRow

NEEDS = ("replayed_routes",)
LENGTHS = ((4,), (5, 3), (2, 7, 4), (6, 6))
# Every layer routed, a dense one in front, as most such models have it, and dense ones between and behind.
LAYERS = ((True, True), (False, True, True), (False, False, False, True, True, True), (True, False, True, False))


def _rows(lengths: Sequence[int], is_routed: Sequence[bool], chosen: int = 2) -> list[RoutedRow]:
    """Make rows in which no two tokens or layers have the same experts."""
    start, rows, n_routers = 0, [], sum(is_routed)
    for length in lengths:
        size = (length - 1) * n_routers * chosen
        routes = torch.arange(start, start + size).view(length - 1, n_routers, chosen)
        rows.append(RoutedRow(torch.arange(length) + 5, routes))
        start += size
    return rows


def _packs() -> Iterator[Case]:
    for is_routed in LAYERS:
        for lengths in LENGTHS:
            for multiple in (1, 8):
                rows, layout = _rows(lengths, is_routed), ReplayLayout(is_routed, multiple)
                told = "".join("R" if each else "d" for each in is_routed)
                yield Case(
                    f"rows of {list(lengths)}", f"layers {told}", f"multiple of {multiple}", rows=rows, layout=layout
                )


def _drawn(rng: Generator, size: int) -> Case:
    is_routed = (True, *(bool(whole(rng, 0, 1)) for _ in range(whole(rng, 0, 4))))
    lengths = [whole(rng, 2, size + 3) for _ in range(whole(rng, 1, size))]
    chosen, multiple = whole(rng, 1, 3), one_of(rng, (1, 4, 16))
    return Case(rows=_rows(lengths, is_routed, chosen), layout=ReplayLayout(is_routed, multiple))


def _starts(rows: Sequence[RoutedRow]) -> list[int]:
    return [sum(len(each.token_ids) for each in rows[:index]) for index in range(len(rows))]


@check("routing.each_token_in_each_layer", needs=NEEDS, cases=_packs, draws=_drawn)
def each_token_in_each_layer(adapter: Adapter, rows: list[RoutedRow], layout: ReplayLayout) -> None:
    """Each token of packed rows takes, in each routed layer, the experts that the sampler took for it there.

    Silent because any experts compute something: the routes of a neighbouring token or layer add the mismatch that a replay
    is there to remove, and only the gap between sampler and trainer stays high. Look for rows of routes that are one shorter
    than their tokens and packed without a gap, for routed layers that are counted without the dense ones before them, and
    for padding in front.
    """
    laid_NLK = torch.as_tensor(adapter.replayed_routes(rows, layout))
    used = sum(len(row.token_ids) for row in rows)
    expected = (-(-used // layout.multiple) * layout.multiple, len(layout.is_routed))
    told = f"routes of {tuple(laid_NLK.shape[:2])} tokens and layers came back for {expected}"
    assert_true(tuple(laid_NLK.shape[:2]) == expected, told, quantity="shape", compared=0)
    for index, (row, start) in enumerate(zip(rows, _starts(rows), strict=True)):
        got_SMK = laid_NLK[start : start + len(row.routes), layout.routed_layers]
        wrong = _first_difference(got_SMK, row.routes)
        assert_true(not wrong, f"row {index} of {len(rows)}: {wrong}", quantity="routes", compared=row.routes.numel())


def _first_difference(got_SMK: Tensor, expected_SMK: Tensor) -> str:
    # The order of the experts of a token means nothing.
    is_wrong_SM = (got_SMK.sort(dim=-1).values != expected_SMK.sort(dim=-1).values).any(dim=-1)
    if not is_wrong_SM.any():
        return ""
    token, layer = is_wrong_SM.nonzero()[0].tolist()
    got, expected = got_SMK[token, layer].tolist(), expected_SMK[token, layer].tolist()
    return f"token {token} takes the experts {got} in routed layer {layer}, and the sampler took {expected}"


@check("routing.rows_are_separate", needs=NEEDS, cases=_packs)
def rows_are_separate(adapter: Adapter, rows: list[RoutedRow], layout: ReplayLayout) -> None:
    """A row takes the same experts alone as packed with others, at any place of the pack.

    Silent because one row is laid out right, and in a pack each row shifts those behind it. This needs no declaration. Look
    at the offsets of the rows.
    """
    for order in (rows, rows[::-1]):
        laid_NLK = torch.as_tensor(adapter.replayed_routes(copy.deepcopy(order), layout))
        for row, start in zip(order, _starts(order), strict=True):
            alone_NLK = torch.as_tensor(adapter.replayed_routes([row], layout))
            got, expected = (
                laid[:, layout.routed_layers] for laid in (laid_NLK[start : start + len(row.routes)], alone_NLK)
            )
            wrong = _first_difference(got, expected[: len(row.routes)])
            told = f"in a pack of {len(rows)} rows other than alone: {wrong}"
            assert_true(not wrong, told, quantity="routes", compared=row.routes.numel())


@check("routing.inputs_untouched", severity="hardening", needs=NEEDS, cases=_packs)
def inputs_untouched(adapter: Adapter, rows: list[RoutedRow], layout: ReplayLayout) -> None:
    """Laying out routes does not change them.

    Silent because they are replayed once per update, and an epoch later they are others. Look for indices that are raised in
    place, such as by the number of experts of the layers before.
    """
    before = copy.deepcopy(rows)
    adapter.replayed_routes(rows, layout)
    for row, kept in zip(rows, before, strict=True):
        assert_unchanged(row.routes, kept.routes, "replayed_routes changed the sampler's routes in place")
