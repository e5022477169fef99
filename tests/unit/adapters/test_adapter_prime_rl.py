"""The rows that prime-rl is given, which need no prime-rl."""

import math

import torch

from rlcanary.adapters.prime_rl.rows import rows_of
from rlcanary.contract.batch import Completion, Group
from rlcanary.reference import make_batch


def test_a_logprob_of_a_trained_token_that_is_nan_stays_nan():
    scored = Completion([7, 8, 2], [math.nan, math.nan, -1.0], sampled=[True, False, True])
    batch, _ = make_batch([Group([5], [scored], [1.0])], 0)
    (row,) = rows_of(batch, 1.0, torch.zeros(1))
    # The engine has sampled neither the prompt nor what stands between.
    assert math.isnan(row.logprobs[1])
    assert [row.logprobs[place] for place in (0, 2, 3)] == [0.0, 0.0, -1.0]
