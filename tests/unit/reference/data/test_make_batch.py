"""From groups to a rectangular batch: buckets, clamping, padding, statistics."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcanary.contract.batch import Completion, Group
from rlcanary.reference import RewardStats, make_batch

few = settings(max_examples=30, derandomize=True, deadline=None)
GROUPS = [
    Group(
        prompt_ids=[11, 12],
        completions=[
            Completion([21, 22, 2], logprobs=[-0.1, -0.2, -0.3]),
            Completion([23], logprobs=[-0.4], finish_reason="length"),
        ],
        rewards=[1.0, 0.25],
        item_id="a",
        policy_version=3,
        dataset="maths",
    ),
    Group(
        prompt_ids=[13, 14, 15, 16],
        completions=[Completion([24, 2], logprobs=[-0.5, -0.6]), Completion([0, 0, 0, 0, 2], logprobs=[-0.7] * 5)],
        rewards=[0.5, 0.75],
        item_id=7,
        policy_version=4,
    ),
]


def group(prompt_len, *completion_lens, **changes):
    completions = [Completion([9] * length) for length in completion_lens]
    return replace(Group([8] * prompt_len, completions, [0.0] * len(completions)), **changes)


def widths(groups, **buckets):
    batch, stats = make_batch(groups, 0, **buckets)
    assert stats.padded_sequence_len == batch.input_ids.shape[1]
    assert stats.padded_completion_len == batch.completion_ids.shape[1] == batch.completion_mask.shape[1]
    return batch.input_ids.shape[1], batch.completion_ids.shape[1]


# Bucketing
def test_without_buckets_widths_are_the_natural_ones():
    assert widths([group(3, 5, 2), group(4, 1)]) == (4 + 5, 5)


def test_the_first_bucket_that_holds_the_longest_completion():
    assert widths([group(3, 5)], completion_len_buckets=[4, 8, 16]) == (3 + 8, 8)


def test_a_completion_as_long_as_a_bucket_fits_it():
    assert widths([group(3, 8)], completion_len_buckets=[4, 8, 16]) == (3 + 8, 8)


def test_the_sequence_bucket_holds_the_longest_prompt_and_the_padded_completion():
    """Prompt and longest completion need not be of one row: 10 + 8, though no row has more than 12 tokens."""
    groups = [group(10, 2), group(3, 5)]
    assert widths(groups, seq_len_buckets=[16, 24], completion_len_buckets=[8]) == (24, 8)


def test_the_order_of_the_buckets_does_not_matter():
    assert widths([group(3, 5)], seq_len_buckets=[32, 8, 16], completion_len_buckets=[16, 4, 8]) == (16, 8)


@pytest.mark.parametrize("which", ["seq_len_buckets", "completion_len_buckets"])
def test_a_bucket_that_holds_nothing_is_an_error(which):
    with pytest.raises(ValueError, match="bucket of 0 tokens"):
        make_batch(GROUPS, 0, **{which: [0, 16]})


# Clamping
def test_the_completion_shrinks_when_the_sequence_hits_the_last_bucket():
    assert widths([group(10, 4)], seq_len_buckets=[12, 16], completion_len_buckets=[8]) == (16, 6)


def test_completions_above_the_last_completion_bucket_are_cut_there():
    batch, stats = make_batch([group(3, 9, 2)], 0, completion_len_buckets=[4])
    assert batch.completion_mask.sum(dim=1).tolist() == stats.completion_lens == [4, 2]
    assert stats.finish_reasons == {"clamped": 1, "stop": 1}


def test_cut_tokens_are_nowhere_in_the_batch():
    ids = list(range(20, 29))
    long = Group([11, 12], [Completion(ids, logprobs=[float(-id_) for id_ in ids])], [1.0], [[0.5] * 9])
    batch, _ = make_batch([long], 0, seq_len_buckets=[7])
    assert batch.input_ids.tolist() == [[11, 12, 20, 21, 22, 23, 24]]
    assert batch.completion_ids.tolist() == [[20, 21, 22, 23, 24]]
    assert batch.old_logprobs.tolist() == [[-20.0, -21.0, -22.0, -23.0, -24.0]]
    assert batch.ref_logprobs.shape == (1, 5)


def test_a_completion_that_still_fits_the_shrunken_width_is_not_clamped():
    _, stats = make_batch([group(10, 4)], 0, seq_len_buckets=[16], completion_len_buckets=[8])
    assert stats.finish_reasons == {"stop": 1}


@pytest.mark.parametrize("prompt_len", [16, 17, 300])
def test_a_prompt_that_fills_the_last_bucket_is_an_error_and_never_an_empty_batch(prompt_len):
    with pytest.raises(ValueError, match=f"a prompt of {prompt_len} tokens leaves no room .* bucket, 16: drop"):
        make_batch([group(2, 3), group(prompt_len, 3)], 0, seq_len_buckets=[8, 16], completion_len_buckets=[4])


def test_a_prompt_one_below_the_last_bucket_leaves_one_token():
    assert widths([group(15, 3)], seq_len_buckets=[16], completion_len_buckets=[4]) == (16, 1)


# Mixed prompt lengths
@pytest.mark.parametrize("side", ["right", "left"])
def test_each_row_holds_its_own_prompt_and_completion(side):
    batch, _ = make_batch(GROUPS, 0, prompt_padding=side)
    rows = [[*g.prompt_ids, *c.token_ids] for g in GROUPS for c in g.completions]
    kept = [ids[mask].tolist() for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True)]
    assert kept == rows
    positions = [ids[mask].tolist() for ids, mask in zip(batch.position_ids, batch.attention_mask, strict=True)]
    assert positions == [list(range(len(row))) for row in rows]
    assert not batch.position_ids[~batch.attention_mask].any()


def test_padding_on_the_right_keeps_prompt_and_completion_together():
    batch, _ = make_batch(GROUPS, 99, seq_len_buckets=[10])
    assert batch.completion_starts.tolist() == [2, 2, 4, 4]
    assert batch.input_ids[0].tolist() == [11, 12, 21, 22, 2, 99, 99, 99, 99, 99]


def test_padding_on_the_left_starts_all_completions_together():
    batch, _ = make_batch(GROUPS, 99, seq_len_buckets=[10], prompt_padding="left")
    assert batch.completion_starts.tolist() == [4, 4, 4, 4]
    assert batch.input_ids[0].tolist() == [99, 99, 11, 12, 21, 22, 2, 99, 99, 99]


def test_rows_carry_what_belongs_to_their_completion():
    batch, _ = make_batch(GROUPS, 0)
    assert batch.rewards.tolist() == [1.0, 0.25, 0.5, 0.75]
    assert batch.group_ids.tolist() == [0, 0, 1, 1]
    assert batch.item_ids == ["a", "a", 7, 7]
    assert batch.policy_versions.tolist() == [3, 3, 4, 4]
    assert batch.old_logprobs[batch.completion_mask].tolist() == pytest.approx(
        [-0.1, -0.2, -0.3, -0.4, -0.5, -0.6, *[-0.7] * 5]
    )


def test_groups_of_unequal_size():
    batch, _ = make_batch([group(2, 1, 1, 1), group(3, 2), group(1, 1, 1)], 0)
    assert batch.group_ids.tolist() == [0, 0, 0, 1, 2, 2]


def test_a_row_is_as_old_as_its_oldest_token():
    completions = [Completion([9, 9], token_versions=[4, 5]), Completion([9, 9])]
    batch, _ = make_batch([Group([8], completions, [0.0, 0.0], policy_version=5)], 0)
    assert batch.policy_versions.tolist() == [4, 5]


# Padding mask
@pytest.mark.parametrize("pad_token_id", [0, 2, 21, 99, -100])
def test_masks_come_from_lengths_whatever_the_padding_id(pad_token_id):
    """0 is falsy and was sampled, 2 is EOS, 21 an ordinary token, -100 no token at all."""
    batch, _ = make_batch(GROUPS, pad_token_id)
    assert batch.completion_mask.sum(dim=1).tolist() == [3, 1, 2, 5]
    assert batch.completion_ids[3].tolist() == [0, 0, 0, 0, 2]
    assert (batch.completion_ids[~batch.completion_mask] == pad_token_id).all()
    assert (batch.input_ids[~batch.attention_mask] == pad_token_id).all()


def test_masks_are_bool_and_filled_from_the_left():
    batch, _ = make_batch(GROUPS, 0)
    assert batch.completion_mask.dtype == batch.attention_mask.dtype == torch.bool
    assert batch.completion_mask[1].tolist() == [True, False, False, False, False]


def test_logprobs_are_nan_on_padding_never_zero():
    batch, _ = make_batch([replace(g, ref_logprobs=[c.logprobs for c in g.completions]) for g in GROUPS], 0)
    assert torch.equal(batch.old_logprobs.isnan(), ~batch.completion_mask)
    assert torch.equal(batch.ref_logprobs.isnan(), ~batch.completion_mask)


# Edge cases
def test_no_group_is_an_error():
    with pytest.raises(ValueError, match="at least one group"):
        make_batch([], 0)


@pytest.mark.parametrize("empty", [group(0, 3), group(3)])
def test_a_group_without_prompt_or_completion_is_an_error(empty):
    with pytest.raises(ValueError, match=r"group 1 .*\d completions"):
        make_batch([GROUPS[0], empty], 0)


def test_a_reward_too_many_is_an_error():
    with pytest.raises(ValueError, match="2 completions and 3 rewards"):
        make_batch([replace(GROUPS[0], rewards=[0.0, 1.0, 2.0])], 0)


def test_sampler_logprobs_of_other_tokens_are_an_error():
    wrong = Group([8], [Completion([9, 9], logprobs=[-1.0])], [0.0])
    with pytest.raises(ValueError, match=r"2 tokens .* 1 sampler logprobs"):
        make_batch([wrong], 0)


def test_versions_of_other_tokens_are_an_error():
    wrong = Group([8], [Completion([9, 9], token_versions=[1, 1, 1])], [0.0])
    with pytest.raises(ValueError, match=r"2 tokens .* 3 token versions"):
        make_batch([wrong], 0)


def test_a_completion_without_tokens_is_a_row_without_trained_tokens():
    batch, stats = make_batch([group(3, 0, 2)], 0)
    assert batch.completion_mask.sum(dim=1).tolist() == stats.completion_lens == [0, 2]
    assert batch.attention_mask.sum(dim=1).tolist() == [3, 5]


def test_completions_without_any_token_leave_a_width_of_one():
    assert widths([group(3, 0, 0)]) == (4, 1)


def test_a_sampler_that_scored_nothing_leaves_no_logprobs():
    assert make_batch([group(3, 2)], 0)[0].old_logprobs is None


def test_a_completion_that_nobody_scored_is_nan():
    batch, _ = make_batch([GROUPS[0], group(2, 3)], 0)
    assert batch.old_logprobs.isnan().all(dim=1).tolist() == [False, False, True]


def test_nan_rewards_stay_nan():
    assert math.isnan(make_batch([group(2, 1, rewards=[math.nan])], 0)[0].rewards[0])


# Reference logprobs
SCORED = replace(GROUPS[0], ref_logprobs=[[-1.0, -2.0, -3.0], [-4.0]])


def test_reference_logprobs_stand_at_their_tokens():
    batch, _ = make_batch([SCORED, replace(GROUPS[1], ref_logprobs=[[-5.0] * 2, [-6.0] * 5])], 0)
    assert batch.ref_logprobs[batch.completion_mask].tolist() == [-1, -2, -3, -4, -5, -5, -6, -6, -6, -6, -6]


def test_without_a_reference_there_are_no_reference_logprobs():
    assert make_batch(GROUPS, 0)[0].ref_logprobs is None


@pytest.mark.parametrize(("groups", "missing"), [([SCORED, GROUPS[1]], 1), ([GROUPS[1], SCORED], 0)])
def test_reference_logprobs_on_some_groups_only_are_an_error(groups, missing):
    with pytest.raises(ValueError, match=f"group {missing} has no reference logprobs while others do"):
        make_batch(groups, 0)


def test_a_reference_row_too_few_is_an_error():
    with pytest.raises(ValueError, match="2 completions and 1 reference"):
        make_batch([replace(GROUPS[0], ref_logprobs=[[-1.0, -2.0, -3.0]])], 0)


def test_reference_logprobs_of_other_tokens_are_an_error():
    with pytest.raises(ValueError, match=r"1 tokens .* 2 reference"):
        make_batch([replace(GROUPS[0], ref_logprobs=[[-1.0, -2.0, -3.0], [-4.0, -5.0]])], 0)


# Statistics
def test_statistics_count_what_is_in_the_batch():
    _, stats = make_batch(GROUPS, 0, seq_len_buckets=[8])
    assert stats.prompt_lens == [2, 2, 4, 4]
    assert stats.completion_lens == [3, 1, 2, 4]
    assert stats.seq_lens == [5, 3, 6, 8]
    assert stats.padded_sequence_len == 8
    assert stats.padded_completion_len == 4
    assert stats.padding_fraction == 1 - 22 / 32
    assert stats.finish_reasons == {"stop": 2, "length": 1, "clamped": 1}
    assert stats.rewards == [1.0, 0.25, 0.5, 0.75]
    assert stats.datasets == {"maths": 2, "unknown": 2}


def test_reward_statistics_over_groups():
    stats = RewardStats()
    stats.record([1.0, 1.0], used=False)
    stats.record([0.0, 0.0], used=False)
    stats.record([1.0, 0.0, 0.0, 0.0], used=True)
    assert stats.get_metrics() == {
        "reward_overall": 3 / 8,
        "reward_used": 1 / 4,
        "frac_all_correct": 1 / 3,
        "frac_all_wrong": 1 / 3,
    }


def test_reading_reward_statistics_starts_the_next_count():
    stats = RewardStats()
    assert stats.get_metrics() == {}
    stats.record([1.0], used=True)
    assert stats.get_metrics()["reward_used"] == 1.0
    assert stats.get_metrics() == {}


def test_a_constant_reward_between_is_neither_correct_nor_wrong():
    stats = RewardStats()
    stats.record([0.4, 0.4], used=True)
    metrics = stats.get_metrics()
    assert metrics["frac_all_correct"] == metrics["frac_all_wrong"] == 0


def test_what_counts_as_correct_and_wrong_can_be_set():
    stats = RewardStats(correct=0.9, wrong=0.1)
    stats.record([0.9, 1.0], used=True)
    stats.record([0.1, 0.0], used=True)
    metrics = stats.get_metrics()
    assert metrics["frac_all_correct"] == metrics["frac_all_wrong"] == 0.5


def test_without_a_used_group_there_is_no_mean_of_used_rewards():
    stats = RewardStats()
    stats.record([1.0, 0.0], used=False)
    assert "reward_used" not in stats.get_metrics()


@pytest.mark.parametrize("rewards", [[1.0, math.nan], [math.nan, 1.0], [math.nan, 0.0]])
def test_a_group_with_a_nan_reward_is_neither_correct_nor_wrong(rewards):
    stats = RewardStats()
    stats.record(rewards, used=True)
    metrics = stats.get_metrics()
    assert metrics["frac_all_correct"] == metrics["frac_all_wrong"] == 0
    assert math.isnan(metrics["reward_overall"])


def test_a_group_without_rewards_is_an_error():
    with pytest.raises(ValueError, match="no rewards to record"):
        RewardStats().record([], used=True)


ids = st.lists(st.integers(0, 5), min_size=1, max_size=6)
buckets = st.none() | st.lists(st.integers(1, 14), min_size=1, max_size=3)


@st.composite
def some_groups(draw):
    def one():
        completions = draw(st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=1, max_size=3))
        return Group(draw(ids), [Completion(tokens) for tokens in completions], [0.0] * len(completions))

    return [one() for _ in range(draw(st.integers(1, 3)))]


@few
@given(
    groups=some_groups(),
    seq_len_buckets=buckets,
    completion_len_buckets=buckets,
    pad_token_id=st.integers(0, 5),
    side=st.sampled_from(["left", "right"]),
)
def test_every_token_that_fits_is_in_its_place(groups, seq_len_buckets, completion_len_buckets, pad_token_id, side):
    longest_prompt = max(len(g.prompt_ids) for g in groups)
    if seq_len_buckets and longest_prompt >= max(seq_len_buckets):
        with pytest.raises(ValueError, match="leaves no room"):
            make_batch(groups, pad_token_id, seq_len_buckets, completion_len_buckets, side)
        return
    batch, stats = make_batch(groups, pad_token_id, seq_len_buckets, completion_len_buckets, side)
    width = batch.completion_ids.shape[1]
    rows = [(g.prompt_ids, c.token_ids) for g in groups for c in g.completions]
    assert width >= 1
    assert seq_len_buckets is None or batch.input_ids.shape[1] in seq_len_buckets
    for row, (prompt, completion) in enumerate(rows):
        kept, start = list(completion[:width]), int(batch.completion_starts[row])
        assert batch.completion_ids[row][batch.completion_mask[row]].tolist() == kept
        assert batch.input_ids[row][batch.attention_mask[row]].tolist() == [*prompt, *kept]
        assert batch.input_ids[row, start - len(prompt) : start + len(kept)].tolist() == [*prompt, *kept]
        assert stats.seq_lens[row] == len(prompt) + len(kept) == int(batch.attention_mask[row].sum())


def test_what_the_policy_did_not_write_is_read_and_not_trained():
    turns = Completion([5, 6, 7, 2], [-0.1, math.nan, math.nan, -0.2], sampled=[True, False, False, True])
    batch, stats = make_batch([Group([11], [turns, Completion([8], [-0.3])], [1.0, 0.0])], 0)
    assert batch.completion_mask.tolist() == [[True, False, False, True], [True, False, False, False]]
    assert batch.attention_mask.tolist() == [[True] * 5, [True, True, False, False, False]]
    assert stats.completion_lens == [4, 1]
    with pytest.raises(ValueError, match="4 tokens with 3 `sampled`"):
        make_batch([Group([11], [replace(turns, sampled=[True] * 3)], [1.0])], 0)
