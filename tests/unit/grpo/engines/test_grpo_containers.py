"""Containers keep every token and nothing but tokens, padded or not, here and in torchrl."""

import pytest
import torch

from rlcanary.grpo.engines.containers import ChatHistory, LogProbs, Masks, Text, Tokens
from rlcanary.tiny_models import EOS_ID, PAD_ID, tiny_chat_tokenizer

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


def same(left: object, right: object) -> bool:
    """Equal rows, NaN equal to NaN."""
    return type(left) is type(right) and all(
        torch.equal(a.nan_to_num(9), b.nan_to_num(9)) if a.is_floating_point() else torch.equal(a, b)
        for side in ("prompt", "response")
        for a, b in zip(getattr(left, side), getattr(right, side), strict=True)
    )


def test_prompts_are_padded_on_the_left_and_responses_on_the_right() -> None:
    prompt_BP, response_BR = TOKENS.padded(pad_token_id=9)
    assert prompt_BP.tolist() == [[PAD_ID, 5, 6], [9, 9, 7]]
    assert response_BR.tolist() == [[8, PAD_ID, 9], [EOS_ID, PAD_ID, PAD_ID]]
    attended_BP, attended_BR = MASKS.attention()
    assert attended_BP.tolist() == [[True, True, True], [False, False, True]]
    assert attended_BR.tolist() == [[True, True, False], [True, True, True]]


@pytest.mark.parametrize("pad_token_id", [PAD_ID, EOS_ID, 9])
def test_padding_and_back_gives_the_same_rows_whatever_the_padding_id(pad_token_id: int) -> None:
    assert same(Tokens.from_padded(TOKENS.padded(pad_token_id), MASKS.attention()), TOKENS)
    assert same(LogProbs.from_padded(LOGPROBS.padded(), MASKS.attention()), LOGPROBS)
    assert same(Masks.from_padded(MASKS.padded(), MASKS.attention()), MASKS)


def test_full_is_prompt_then_response() -> None:
    assert lists(TOKENS.full) == [[PAD_ID, 5, 6, 8, PAD_ID], [7, EOS_ID, PAD_ID, PAD_ID]]
    assert [len(row) for row in LOGPROBS.full] == [5, 4]


def test_padding_of_logprobs_is_nan_and_never_a_certain_token() -> None:
    for part, attended in zip(LOGPROBS.padded(), MASKS.attention(), strict=True):
        assert part[~attended].isnan().all()
    assert all(row.isnan().all() for row in LogProbs.unscored(TOKENS).full)


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
    with pytest.raises(ValueError, match=r"lengths \[5, 3\] for rows of lengths \[5, 4\]"):
        MASKS.select([torch.ones(5, dtype=torch.bool), torch.ones(3, dtype=torch.bool)])
    with pytest.raises(ValueError, match=r"torch\.int64"):
        MASKS.select([torch.ones(5, dtype=torch.long), torch.ones(4, dtype=torch.long)])
    with pytest.raises(ValueError, match="true on padding"):
        Masks.from_padded((torch.ones(1, 2), torch.ones(1, 1)), (torch.tensor([[0, 1]]), torch.ones(1, 1)))


def test_padding_on_the_wrong_side_is_refused() -> None:
    ids = torch.tensor([[5, 6]])
    with pytest.raises(ValueError, match="not padded on the left"):
        Tokens.from_padded((ids, ids), (torch.tensor([[1, 0]]), torch.tensor([[1, 1]])))
    with pytest.raises(ValueError, match="not padded on the right"):
        Tokens.from_padded((ids, ids), (torch.tensor([[1, 1]]), torch.tensor([[0, 1]])))


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
        LogProbs.unscored(Tokens.of([[1]])).check_like(TOKENS)


def test_text_is_that_of_the_tokens_without_padding() -> None:
    tokenizer = tiny_chat_tokenizer()
    ids = tokenizer.encode("hello", add_special_tokens=False)
    text = Text.of(Tokens.of([ids, ids * 3], [ids * 2, []]), tokenizer)
    assert text.response == ["hellohello", ""]
    assert text.full == ["hello" * 3, "hello" * 3]


def test_history_is_prompt_then_response_and_needs_role_and_content() -> None:
    asked, answered = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "four"}
    assert ChatHistory([[asked]], [[answered]]).full == [[asked, answered]]
    with pytest.raises(ValueError, match=r"row 0: a message of \['role'\]"):
        ChatHistory([[{"role": "user"}]], [[]])


def test_no_rows_are_padded_to_nothing() -> None:
    assert [part.numel() for part in Tokens.of([]).padded(0)] == [0, 0]
    assert [part.numel() for part in Masks.of(Tokens.of([])).attention()] == [0, 0]


@pytest.mark.parametrize("padded", [False, True])
def test_torchrl_and_back_gives_the_same_rows(padded: bool) -> None:
    pytest.importorskip("torchrl")
    from rlcanary.grpo.engines import containers_torchrl as to

    theirs = to.tokens_to_torchrl(TOKENS, PAD_ID if padded else None)
    masks = to.masks_to_torchrl(MASKS, padded)
    assert same(to.tokens_from_torchrl(theirs, masks), TOKENS)
    assert same(to.masks_from_torchrl(masks, theirs), MASKS)
    assert same(to.logprobs_from_torchrl(to.logprobs_to_torchrl(LOGPROBS, padded), masks), LOGPROBS)


def test_padded_torchrl_tokens_without_masks_are_refused() -> None:
    pytest.importorskip("torchrl")
    from rlcanary.grpo.engines import containers_torchrl as to

    with pytest.raises(ValueError, match="ids alone cannot tell"):
        to.tokens_from_torchrl(to.tokens_to_torchrl(TOKENS, PAD_ID))


def test_torchrl_text_and_history_and_back_are_the_same() -> None:
    pytest.importorskip("torchrl")
    from rlcanary.grpo.engines import containers_torchrl as to

    text = Text(["a", "b"], ["c", ""])
    assert to.text_from_torchrl(to.text_to_torchrl(text)) == text
    history = ChatHistory(
        [[{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], [{"role": "user", "content": "v"}]],
        [[{"role": "assistant", "content": "a"}], [{"role": "assistant", "content": "b"}] * 2],
    )
    assert to.chat_from_torchrl(to.chat_to_torchrl(history)) == history
