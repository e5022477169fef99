"""The order of the data and the batch schedule: every item once, the same again on resuming, updates of the right size."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcanary.reference.data.ordering import accumulation_steps, data_order, resumed_order

few = settings(max_examples=50, derandomize=True, deadline=None)
sizes = st.integers(1, 40)


@few
@given(n_items=sizes, world_size=st.integers(1, 9), epoch=st.integers(0, 5), shuffle=st.booleans())
def test_ranks_visit_every_item_with_fewer_repeats_than_ranks(n_items, world_size, epoch, shuffle):
    ranks = [data_order(n_items, epoch, rank, world_size, shuffle=shuffle) for rank in range(world_size)]
    visited = [index for rank in ranks for index in rank]
    assert set(visited) == set(range(n_items))
    assert len(visited) - n_items < world_size
    assert len({len(rank) for rank in ranks}) == 1


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {tuple(data_order(20, epoch, 0, 1, seed=seed)) for epoch in range(10) for seed in range(10)}
    assert len(orders) == 100
    assert tuple(range(20)) not in orders


def test_order_depends_on_its_arguments_alone():
    before = torch.get_rng_state()
    first = data_order(20, 3, 0, 1)
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        assert data_order(20, 3, 0, 1) == first


def test_sequential_order_goes_from_first_to_last():
    assert data_order(5, 3, 0, 1, shuffle=False) == [0, 1, 2, 3, 4]
    assert data_order(5, 3, 1, 2, shuffle=False) == [1, 3, 0]


@pytest.mark.parametrize(("n_items", "rank", "world_size"), [(0, 0, 1), (4, 2, 2), (4, -1, 2)])
def test_empty_data_and_unknown_ranks_are_refused(n_items, rank, world_size):
    with pytest.raises(ValueError, match=r"no order|is not one of"):
        data_order(n_items, 0, rank, world_size)


@few
@given(steps=sizes, micro=sizes, data_parallel=sizes, shared=st.integers(1, 8))
def test_steps_times_micro_batch_times_ranks_is_the_batch(steps, micro, data_parallel, shared):
    batch = steps * micro * data_parallel
    assert accumulation_steps(batch, micro, data_parallel * shared, shared) == steps


@pytest.mark.parametrize(
    ("numbers", "told"),
    [
        ((10, 4, 1, 1), "10 rows .* multiple of 4"),
        ((4, 8, 1, 1), "4 rows is not a multiple of 8"),
        ((8, 1, 6, 4), "6 ranks .*groups of 4"),
        ((8, 0, 1, 1), "positive"),
        ((0, 1, 1, 1), "positive"),
    ],
)
def test_batch_that_cannot_be_dealt_out_is_refused(numbers, told):
    with pytest.raises(ValueError, match=told):
        accumulation_steps(*numbers)


@pytest.mark.parametrize("consumed", range(8))
def test_a_resumed_run_goes_on_over_the_ends_of_epochs(consumed):
    epochs = [[0, 1, 2], [2, 0, 1], [1, 2, 0], [0, 2, 1]]
    whole = [item for epoch in epochs for item in epoch]
    assert resumed_order(lambda epoch: epochs[epoch], consumed, 4) == whole[consumed : consumed + 4]
