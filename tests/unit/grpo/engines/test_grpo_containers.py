"""Containers keep every token and nothing but tokens."""

import pytest
import torch

from rlcanary.grpo.engines.containers import LogProbs, Masks, Tokens
from rlcanary.tiny_models import EOS_ID, PAD_ID

# Ids that equal the padding stand at both ends: nothing may mistake them for it.
TOKENS = Tokens.of([[PAD_ID, 5, 6], [7]], [[8, PAD_ID], [EOS_ID, PAD_ID, PAD_ID]])
LOGPROBS = LogProbs(
    [torch.tensor([torch.nan, -1.0, -2.0]), torch.tensor([torch.nan])],
    [torch.tensor([-0.5, -0.25]), torch.tensor([-3.0, torch.nan, 0.0])],
)
MASKS = Masks(
    [torch.tensor([False, False, True]), torch.tensor([False])],
    [torch.tensor([True, True]), torch.tensor([True, False, True])],
)


def lists(rows: object) -> list[list[float]]:
    return [row.tolist() for row in rows]  # type: ignore[attr-defined]


def test_prompts_are_padded_on_the_left_and_responses_on_the_right() -> None:
    prompt_BP, response_BR = TOKENS.padded(pad_token_id=9)
    assert prompt_BP.tolist() == [[PAD_ID, 5, 6], [9, 9, 7]]
    assert response_BR.tolist() == [[8, PAD_ID, 9], [EOS_ID, PAD_ID, PAD_ID]]
    attended_BP, attended_BR = MASKS.attention()
    assert attended_BP.tolist() == [[True, True, True], [False, False, True]]
    assert attended_BR.tolist() == [[True, True, False], [True, True, True]]


def test_full_is_prompt_then_response() -> None:
    assert lists(TOKENS.full) == [[PAD_ID, 5, 6, 8, PAD_ID], [7, EOS_ID, PAD_ID, PAD_ID]]
    assert [len(row) for row in LOGPROBS.full] == [5, 4]


def test_padding_of_logprobs_is_nan_and_never_a_certain_token() -> None:
    for part, attended in zip(LOGPROBS.padded(), MASKS.attention(), strict=True):
        assert part[~attended].isnan().all()


def test_mask_strategies_select_what_they_say() -> None:
    assert lists(MASKS.select("response")) == [[False, False, False, True, True], [False, True, True, True]]
    assert lists(MASKS.select("assistant")) == [[False, False, True, True, True], [False, True, False, True]]
    assert all(row.all() for row in MASKS.select("attention"))
    own = [torch.tensor([True] + [False] * 4), torch.tensor([False] * 4)]
    assert MASKS.select(own) == own
    assert lists(Masks.of(TOKENS).select("assistant")) == lists(MASKS.select("response"))


def test_masks_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="'sft'"):
        MASKS.select("sft")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\[5, 3\] for .* \[5, 4\]"):
        MASKS.select([torch.ones(5, dtype=torch.bool), torch.ones(3, dtype=torch.bool)])
    with pytest.raises(ValueError, match=r"torch\.int64"):
        MASKS.select([torch.ones(5, dtype=torch.long), torch.ones(4, dtype=torch.long)])


def test_rows_of_another_kind_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ids of torch\.float32"):
        Tokens([torch.tensor([1.0])], [torch.tensor([1])])
    with pytest.raises(ValueError, match="above 0"):
        LogProbs([torch.tensor([0.5])], [torch.tensor([-1.0])])
    with pytest.raises(ValueError, match="2 prompts and 1 responses"):
        Tokens.of([[1], [2]], [[3]])
    with pytest.raises(ValueError, match="without padding"):
        Tokens([torch.zeros(1, 2, dtype=torch.long)], [torch.zeros(1, dtype=torch.long)])
    with pytest.raises(ValueError, match="do not belong to Tokens"):
        LogProbs([torch.tensor([-1.0])], [torch.tensor([])]).check_like(TOKENS)


def test_no_rows_are_padded_to_nothing() -> None:
    assert [part.numel() for part in Tokens.of([]).padded(0)] == [0, 0]
    assert [part.numel() for part in Masks.of(Tokens.of([])).attention()] == [0, 0]
