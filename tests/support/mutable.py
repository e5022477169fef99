"""Code to mutate: an adapter of one capability, and the functions behind it."""

import torch
from torch import Tensor

from rlcanary.adapters import Adapter


def centred(rewards_B: Tensor, group_ids_B: Tensor) -> Tensor:
    """Rewards minus the mean of their group."""
    result_B = torch.empty_like(rewards_B)
    for group in group_ids_B.unique():
        inside_B = group_ids_B == group
        result_B[inside_B] = rewards_B[inside_B] - rewards_B[inside_B].mean()
    if rewards_B.dtype == torch.int8:
        result_B = result_B * 2
    return result_B


def picked(rewards_B: Tensor, wide: bool = False) -> Tensor:
    """Rewards minus their mean, on branches of which some are never taken."""
    centred_B = rewards_B - rewards_B.mean()
    scaled_B = centred_B / 2 if wide else centred_B * 3
    if wide or (wide and rewards_B[0] > 5):
        scaled_B = scaled_B + 7
    return scaled_B


class Owner:
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.__factor = factor

    def scaled(self, x: float) -> float:
        return self.__factor * x


class MutableAdapter(Adapter):
    name = "mutable"

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        return centred(rewards, group_ids)


class PickingAdapter(MutableAdapter):
    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        return picked(rewards)
