"""torchrl's containers hold the same tokens, logprobs and masks, and give them back."""

import pytest
import torch

pytest.importorskip("torchrl")

from rlcanary.adapters.torchrl.containers import from_torchrl, to_torchrl
from rlcanary.grpo.engines.containers import LogProbs, Masks, Tokens
from rlcanary.tiny_models import EOS_ID, PAD_ID

# Ids that equal the padding stand at both ends: nothing may mistake them for it.
TOKENS = Tokens.of([[PAD_ID, 5, 6], [7]], [[8, PAD_ID], [EOS_ID, PAD_ID, PAD_ID]])
LOGPROBS = LogProbs(
    [torch.full((3,), torch.nan), torch.tensor([-0.5])], [torch.tensor([-1.0, 0.0]), torch.tensor([-2.0, -3.0, -4.0])]
)
MASKS = Masks(
    [torch.zeros(3, dtype=torch.bool), torch.zeros(1, dtype=torch.bool)],
    [torch.tensor([True, False]), torch.tensor([True, True, False])],
)


def rollouts(**containers):
    from tensordict import TensorDict, lazy_stack

    rows = zip(*(rows.unbind(0) for rows in containers.values()), strict=True)
    return lazy_stack([TensorDict(dict(zip(containers, row, strict=True))) for row in rows])


def assert_same(got, expected):
    for side in ("prompt", "response"):
        for one, other in zip(getattr(got, side), getattr(expected, side), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_tokens_and_logprobs_come_back_from_torchrl_as_they_were():
    tokens, logprobs = from_torchrl(rollouts(tokens=to_torchrl(TOKENS), log_probs=to_torchrl(LOGPROBS)))
    assert_same(tokens, TOKENS)
    assert_same(logprobs, LOGPROBS)


def test_prompts_that_torchrl_has_not_scored_are_nan():
    theirs = to_torchrl(LOGPROBS)
    for row in theirs.unbind(0):
        row.prompt = row.full = None
    _, logprobs = from_torchrl(rollouts(tokens=to_torchrl(TOKENS), log_probs=theirs))
    assert [row.isnan().tolist() for row in logprobs.prompt] == [[True] * 3, [True]]


def test_padded_rows_of_torchrl_are_refused():
    theirs = to_torchrl(TOKENS)
    for row in theirs.unbind(0):
        row.padded = True
    with pytest.raises(ValueError, match="cannot tell a token from padding"):
        from_torchrl(rollouts(tokens=theirs, log_probs=to_torchrl(LOGPROBS)))


def test_torchrl_masks_what_the_assistant_did_not_write():
    rows = to_torchrl(MASKS).unbind(0)
    assert [row.all_assistant_mask.tolist() for row in rows] == [
        [*[False] * 3, True, False],
        [False, True, True, False],
    ]
    assert all(row.all_attention_mask.all() for row in rows)
