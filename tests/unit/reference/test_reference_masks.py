"""Completion masks from ids and lengths, assistant masks over conversations."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcanary.reference import MessageTokens, assistant_mask, completion_mask, lengths_to_mask

few = settings(max_examples=25, derandomize=True, deadline=None)


def kept(ids, eos_token_ids):
    return completion_mask(torch.tensor(ids), eos_token_ids).int().tolist()


def test_the_first_eos_is_kept_and_nothing_behind_it():
    assert kept([[5, 2, 7, 2], [2, 5, 5, 5], [5, 5, 5, 2]], [2]) == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]]


def test_a_truncated_row_is_kept_whole_also_with_as_many_rows_as_positions():
    assert kept([[5, 6, 7], [5, 2, 0], [6, 7, 5]], [2]) == [[1, 1, 1], [1, 1, 0], [1, 1, 1]]


def test_padding_with_eos_keeps_one_eos():
    assert kept([[5, 2, 2, 2]], [2]) == [[1, 1, 0, 0]]


def test_id_zero_is_a_token_before_eos_and_padding_behind_it():
    assert kept([[0, 5, 0, 2, 0, 0]], [2]) == [[1, 1, 1, 1, 0, 0]]
    assert kept([[0, 0, 5]], [0]) == [[1, 0, 0]]


def test_any_of_several_eos_ids_ends_the_row():
    assert kept([[5, 3, 2, 0], [5, 6, 2, 3]], [2, 3]) == [[1, 1, 0, 0], [1, 1, 1, 0]]


def test_without_eos_ids_everything_is_kept():
    assert kept([[0, 2, 3]], []) == [[1, 1, 1]]


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_empty_batches_have_empty_masks(shape):
    assert completion_mask(torch.zeros(shape, dtype=torch.long), [2]).shape == shape


@few
@given(st.lists(st.lists(st.integers(0, 4), min_size=4, max_size=4), min_size=1, max_size=5))
def test_the_mask_is_the_length_of_the_row_up_to_its_eos(rows):
    lengths = [next((place + 1 for place, token in enumerate(row) if token in (2, 4)), 4) for row in rows]
    expected = lengths_to_mask(torch.tensor(lengths), 4)
    assert torch.equal(completion_mask(torch.tensor(rows), [2, 4]), expected)


def test_lengths_fill_from_the_left():
    assert lengths_to_mask(torch.tensor([0, 2, 3]), 3).int().tolist() == [[0, 0, 0], [1, 1, 0], [1, 1, 1]]


@pytest.mark.parametrize("lengths", [[1, 4], [-1, 2]])
def test_lengths_outside_the_width_are_an_error(lengths):
    with pytest.raises(ValueError, match="between 0 and the width 3"):
        lengths_to_mask(torch.tensor(lengths), 3)


CONVERSATION = [
    MessageTokens("system", header=1, body=2, trailer=1),
    MessageTokens("user", header=1, body=1, trailer=1),
    MessageTokens("assistant", header=2, body=2, trailer=1, is_history=True),
    MessageTokens("user", header=1, body=1, trailer=1),
    MessageTokens("assistant", header=2, body=3, trailer=1),
    MessageTokens("tool", header=1, body=4, trailer=1),
    MessageTokens("assistant", header=2, body=2),
]


def spelled(mask):
    return "".join("x" if value else "." for value in mask.tolist())


def test_only_sampled_assistant_turns_are_trained():
    """History, tool results, the template's headers and line breaks are context; end-of-turn tokens are sampled."""
    (mask,) = assistant_mask([CONVERSATION])
    assert spelled(mask) == ".................xxx.........xx"


def test_a_conversation_of_history_trains_nothing():
    assert not assistant_mask([CONVERSATION[:4]]).any()


def test_conversations_of_unequal_length_are_padded_on_the_right():
    mask = assistant_mask([[MessageTokens("assistant", 1, 1)], [MessageTokens("assistant", 0, 4)], []], width=5)
    assert [spelled(row) for row in mask] == [".x...", "xxxx.", "....."]


def test_no_conversations_have_an_empty_mask():
    assert assistant_mask([]).shape == (0, 0)


def test_an_empty_turn_is_a_turn_without_tokens():
    assert spelled(assistant_mask([[MessageTokens("assistant", 2, 0), MessageTokens("assistant", 1, 1)]])[0]) == "...x"


def test_a_conversation_that_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match=r"31 tokens .* width of 28"):
        assistant_mask([CONVERSATION], width=28)


def test_negative_lengths_are_an_error():
    with pytest.raises(ValueError, match="negative number of tokens"):
        MessageTokens("assistant", header=1, body=-1)


@few
@given(
    st.lists(
        st.builds(
            MessageTokens,
            st.sampled_from(["system", "user", "assistant", "tool"]),
            st.integers(0, 3),
            st.integers(0, 4),
            st.integers(0, 2),
            st.booleans(),
        ),
        max_size=6,
    )
)
def test_as_many_tokens_are_trained_as_were_sampled(messages):
    (mask,) = assistant_mask([messages])
    sampled = [message for message in messages if message.role == "assistant" and not message.is_history]
    assert int(mask.sum()) == sum(message.body for message in sampled)
    assert len(mask) == sum(message.header + message.body + message.trailer for message in messages)
