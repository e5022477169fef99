"""Bugs in replayed routes."""

import torch
from torch import Tensor

from rlcanary.bugs.museum import Bug
from rlcanary.contract.records.routing import ReplayLayout, RoutedRow


class RoutedLayersCountedAlone(Bug):
    id = "verl.routing-replayed-to-wrong-layer"
    source = "verl 6b4a867ff, #5037, survey V50"
    effect = "dense layers are not counted: every routed layer behind one replays the routes of another layer"

    def replayed_routes(self, rows: list[RoutedRow], layout: ReplayLayout) -> Tensor:
        laid_NLK = super().replayed_routes(rows, layout)
        n_routers = sum(layout.is_routed)
        for layer, is_routed in enumerate(layout.is_routed):
            if is_routed:
                position = min(layer, n_routers - 1)
                start = 0
                for row in rows:
                    laid_NLK[start : start + len(row.routes), layer] = row.routes[:, position]
                    start += len(row.token_ids)
        return laid_NLK


class RoutesPackedWithoutGaps(Bug):
    id = "slime.replayed-routes-shifted"
    source = "slime a93386e51, #1052"
    effect = "a row has one route less than tokens: each packed row shifts the routes behind it by one more token"

    def replayed_routes(self, rows: list[RoutedRow], layout: ReplayLayout) -> Tensor:
        laid_NLK = super().replayed_routes(rows, layout)
        routed = [layer for layer, is_routed in enumerate(layout.is_routed) if is_routed]
        packed = torch.cat([row.routes for row in rows])
        laid_NLK[: len(packed), routed] = packed
        return laid_NLK
