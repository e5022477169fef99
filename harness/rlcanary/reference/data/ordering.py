"""The items that a data-parallel rank visits in an epoch, and the number of micro-batches per update."""

from collections.abc import Callable, Sequence
from itertools import count as numbers
from itertools import islice

import torch


def data_order(
    n_items: int, epoch: int, rank: int, world_size: int, *, shuffle: bool = True, seed: int = 0
) -> list[int]:
    """Return the indices that a rank visits in an epoch, in order.

    The result depends only on the arguments, so that a run resumed in the middle of an epoch continues as it would
    have. All ranks draw the same permutation and take every `world_size`-th of it. Where the items cannot be dealt out
    evenly, the first ones of the permutation are visited again, so that all ranks make the same number of steps.

    Args:
        n_items: size of the dataset, at least 1.
        seed: the run's seed; every epoch of every seed has an order of its own.
        epoch: the epoch, counted from 0.
        rank: this rank, counted from 0.
        world_size: number of data-parallel ranks.
        shuffle: false visits the items from first to last in every epoch.

    Raises:
        ValueError: no items, or a rank outside the world.
    """
    if n_items < 1:
        raise ValueError(f"a dataset of {n_items} items has no order")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not one of {world_size}")
    order = list(range(n_items))
    if shuffle:
        # Epoch 1 of seed 0 is not to be epoch 0 of seed 1.
        generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
        order = torch.randperm(n_items, generator=generator).tolist()
    even = -(-n_items // world_size) * world_size
    return [order[index % n_items] for index in range(rank, even, world_size)]


def resumed_order(order: Callable[[int], Sequence[int]], consumed: int, count: int) -> list[int]:
    """Return the items that a rank visits next after its first `consumed` ones, over the ends of epochs.

    Args:
        order: the rank's items in an epoch, counted from 0; at least one.
        consumed: number of items that it has visited, over all epochs.
        count: number of items to return.
    """
    visited = (item for epoch in numbers() for item in order(epoch))
    return list(islice(visited, consumed, consumed + count))


def accumulation_steps(batch_size: int, micro_batch_size: int, n_ranks: int, sequence_parallel: int = 1) -> int:
    """Micro-batches per optimizer update on each rank, so that steps × micro-batch × data-parallel ranks = batch size.

    Args:
        batch_size: rows per optimizer update, over all ranks.
        micro_batch_size: rows per forward pass of a rank.
        n_ranks: all ranks.
        sequence_parallel: ranks that share the rows of a micro-batch, each with a part of the sequence.

    Raises:
        ValueError: a number below 1, or numbers that do not divide: the update would not be of `batch_size` rows.
    """
    numbers = (batch_size, micro_batch_size, n_ranks, sequence_parallel)
    if min(numbers) < 1:
        raise ValueError(
            f"batch size, micro-batch size, ranks and sequence-parallel ranks have to be positive: {numbers}"
        )
    if n_ranks % sequence_parallel:
        raise ValueError(f"{n_ranks} ranks cannot be divided into groups of {sequence_parallel} that share rows")
    data_parallel = n_ranks // sequence_parallel
    rows_per_pass = micro_batch_size * data_parallel
    if batch_size % rows_per_pass:
        raise ValueError(
            f"a batch of {batch_size} rows is not a multiple of {rows_per_pass}: {micro_batch_size} rows per micro-batch on "
            f"{data_parallel} data-parallel ranks"
        )
    return batch_size // rows_per_pass
