"""Replayed routes: the experts that the sampler took, laid out for the trainer's forward pass."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlcanary.contract.records.routing import ReplayLayout, RoutedRow

NO_ROUTE = -1


def replayed_routes(rows: Sequence[RoutedRow], layout: ReplayLayout) -> Tensor:
    """Lay out the routes of packed rows.

    Returns:
        [N, L, K] long, -1 where there is no route to replay.

    Raises:
        ValueError: a row has not as many routes as tokens less one, or not as many layers as the model has routers.
    """
    for index, row in enumerate(rows):
        expected = (len(row.token_ids) - 1, len(layout.routed_layers))
        if row.routes.shape[:2] != expected:
            raise ValueError(
                f"row {index} has routes of {tuple(row.routes.shape[:2])} tokens and layers, not {expected}"
            )
    used = sum(len(row.token_ids) for row in rows)
    n_tokens = -(-used // layout.multiple) * layout.multiple
    laid_NLK = torch.full((n_tokens, len(layout.is_routed), rows[0].routes.shape[2]), NO_ROUTE)
    start = 0
    for row in rows:
        laid_NLK[start : start + len(row.routes), layout.routed_layers] = row.routes
        start += len(row.token_ids)
    return laid_NLK
