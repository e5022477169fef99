"""Checks of the losses beside that of the policy, on what is right."""

from dataclasses import replace

import torch

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.checks.areas.other_losses import preference
from rlcanary.contract.records.other_losses import PreferenceBatch


class ARoundingAhead(ReferenceAdapter):
    """Computes the rewards of the chosen completions a rounding too large."""

    def preference_loss(self, batch):
        return super().preference_loss(replace(batch, chosen_logprobs=batch.chosen_logprobs + 1e-7))


def test_pairs_whose_rewards_are_equal_but_for_rounding_accuse_nobody():
    equal = torch.full((2, 3), -1.0)
    mask = torch.ones(2, 3, dtype=torch.bool)
    batch = PreferenceBatch(equal, equal.clone(), mask, mask, equal.clone(), equal.clone())
    logged = ARoundingAhead().preference_loss(batch).metrics["reward_accuracy"]
    assert logged != ReferenceAdapter().preference_loss(batch).metrics["reward_accuracy"]
    preference.metrics.run(ARoundingAhead(), batch)
