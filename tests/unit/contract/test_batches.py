"""Batches, as code under test is given them."""

import copy

import torch

from rlcanary.checks.worlds.inputs import fresh, one_row


def test_a_batch_that_a_forward_pass_has_computed_can_be_copied() -> None:
    given = one_row([0.1, -0.2], 1.0)
    copied = copy.deepcopy(fresh(given))
    copied.advantages.mul_(2.0)
    assert given.advantages.tolist() == [1.0]
    (gradient_BT,) = torch.autograd.grad(copied.logprobs.sum(), given.logprobs)
    assert gradient_BT.tolist() == [[1.0, 1.0]]
    assert copy.deepcopy(given).logprobs.is_leaf
