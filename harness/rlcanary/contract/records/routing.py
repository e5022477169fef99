"""The records of replayed routes: the experts that a sampler took, for the trainer to take the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RoutedRow:
    """A row, prompt and completion, as a model with routers sampled it.

    Attributes:
        token_ids: [S] long.
        routes: [S - 1, M, K] long: the K experts of each of the M routed layers, in the order of the layers, at every
            position but the last, which the sampler had no reason to compute.
    """

    token_ids: Tensor
    routes: Tensor


@dataclass(frozen=True)
class ReplayLayout:
    """The trainer's forward pass that replays routes.

    Attributes:
        is_routed: of each layer of the model, whether it has a router; the others are dense.
        multiple: packed rows are padded at their end to a multiple of this many tokens.
    """

    is_routed: tuple[bool, ...]
    multiple: int = 1

    @property
    def routed_layers(self) -> list[int]:
        """The indices of the layers with a router."""
        return [layer for layer, is_routed in enumerate(self.is_routed) if is_routed]
