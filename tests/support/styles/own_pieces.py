"""A trainer whose objective, baseline and KL have no name in the conventions: positive rows only, medians, Huber's loss."""

import torch
from torch.nn.functional import huber_loss

from styles.gspo import Gspo


def median(rewards):
    """[G] -> scalar, the mean of the two in the middle of an even group."""
    ordered = rewards.sort().values
    return (ordered[(len(rewards) - 1) // 2] + ordered[len(rewards) // 2]) / 2


def huber(log_ratio):
    """[B, T] -> [B, T], |x|²/2 near zero and |x| - 1/2 far from it."""
    return huber_loss(log_ratio, torch.zeros_like(log_ratio), reduction="none")


def gated(logprobs, old_logprobs, advantages, mask):
    """Token losses of rows that did better than their group, less sure the further the policy has moved."""
    drift = (logprobs - old_logprobs).masked_fill(~mask, 0)
    return -advantages.clamp(min=0) * torch.tanh(drift.exp())


class OwnPieces(Gspo):
    """Its pieces are declared as "custom"."""

    name = "own-pieces-by-hand"
    conventions = Gspo.conventions.replace(
        advantage_baseline="custom",
        advantage_scale="none",
        objective="custom",
        kl_estimator="custom",
        ratio_level="token",
    )

    def advantages(self, rewards, group_ids):
        centred = rewards.clone()
        for group in group_ids.unique():
            member = group_ids == group
            if rewards[member].isnan().any():
                raise ValueError("rewards have to be numbers")
            centred[member] -= median(rewards[member].double()).to(rewards.dtype)
        return centred

    def _surrogate(self, current, old, advantage, mask):
        return (current - old).exp(), -gated(current, old, advantage, mask), torch.zeros_like(mask)

    def kl(self, logprobs, ref_logprobs):
        return huber(logprobs - ref_logprobs)


class OwnOracle(OwnPieces):
    """The same, with the functions to compare its pieces with."""

    name = "own-oracle-by-hand"
    conventions = OwnPieces.conventions.replace(advantage_baseline=median, objective=gated, kl_estimator=huber)
