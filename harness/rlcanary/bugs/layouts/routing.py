"""Bugs in replayed routes."""

from dataclasses import replace

import torch
from torch import Tensor

from rlcanary.bugs.museum import Bug
from rlcanary.contract.records.routing import ReplayLayout, RoutedRow


class RoutedLayersCountedAlone(Bug):
    id = "verl.routing-replayed-to-wrong-layer"
    source = "verl 6b4a867ff, #5037, survey V50"
    effect = "dense layers are not counted: every routed layer behind one replays the routes of another layer"

    def replayed_routes(self, rows: list[RoutedRow], layout: ReplayLayout) -> Tensor:
        taken = [min(layer, sum(layout.is_routed) - 1) for layer in layout.routed_layers]
        return super().replayed_routes([replace(row, routes=row.routes[:, taken]) for row in rows], layout)


class RoutesPackedWithoutGaps(Bug):
    id = "slime.replayed-routes-shifted"
    source = "slime a93386e51, #1052"
    effect = "a row has one route less than tokens: each packed row shifts the routes behind it by one more token"

    def replayed_routes(self, rows: list[RoutedRow], layout: ReplayLayout) -> Tensor:
        laid_NLK = super().replayed_routes(rows, layout)
        packed = torch.cat([row.routes for row in rows])
        laid_NLK[: len(packed), layout.routed_layers] = packed
        return laid_NLK
