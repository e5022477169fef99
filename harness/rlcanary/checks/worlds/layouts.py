"""Rows, updates and vocabularies in parallel layouts, as the checks see them."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Generator, Tensor

from rlcanary import reference
from rlcanary.checks.asserts import assert_true
from rlcanary.checks.case import Case
from rlcanary.checks.worlds import rows
from rlcanary.checks.worlds.training.descent import Scene, watched
from rlcanary.checks.worlds.training.states import seeded
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.batch import CollatedBatch, Completion, Group
from rlcanary.contract.records.layouts import Layout, RowShard
from rlcanary.reference.layouts import whole_row

# No token stands twice in a row, so that ids tell positions apart.
ONE_ROW = [Group([5, 6, 7], [Completion([8, 9, 10, 11, 2])], [1.0])]
# Lengths of 2, 3, 7, 8, 9 and 13: of fewer tokens than ranks, a multiple of the chunks, and one more or less. Tool tokens, a
# completion of nothing else, and the id 0.
ROWS = [
    Group([5], [Completion([8]), Completion([9, 2])], [1.0, 0.0]),
    Group(
        [13, 14, 15, 16],
        [
            Completion([17, 0, 2]),
            Completion([18, 30, 31, 19], sampled=[True, False, False, True]),
            Completion([20, 21, 22, 23, 2]),
            Completion([24, 32, 25, 26, 27, 28, 29, 33, 2], sampled=[True, False, *[True] * 7]),
            Completion([34, 35, 36], sampled=[False] * 3),
        ],
        [1.0, 0.0, 0.5, 0.25, 0.0],
    ),
]
# Trained tokens that lie unevenly on ranks and micro-batches: in the second half of the rows only a few, or none.
LONG_ROWS_FIRST = [
    Group([5, 6], [Completion([8, 9, 10, 11, 12, 2]), Completion([13, 14, 15, 16, 2])], [1.0, 0.0]),
    Group([7], [Completion([17]), Completion([18, 2])], [0.25, 1.0]),
]
NOTHING_IN_THE_LAST = [
    *LONG_ROWS_FIRST,
    Group(
        [19, 20],
        [
            Completion([21, 22, 23], sampled=[False] * 3),
            Completion([24], sampled=[False]),
            Completion([25, 26], sampled=[False] * 2),
            Completion([27], sampled=[False]),
        ],
        [1.0, 0.0, 0.0, 0.5],
    ),
]

ALL_AT_ONCE = Layout(data_parallel=2, context_parallel=2, tensor_parallel=2, micro_batches=2)
LAYOUTS = (
    Layout(data_parallel=2),
    Layout(context_parallel=2),
    Layout(tensor_parallel=2),
    Layout(pipeline_parallel=2, micro_batches=2),
    Layout(micro_batches=2),
    Layout(data_parallel=2, micro_batches=2),
    ALL_AT_ONCE,
)


def told(layout: Layout) -> str:
    """Name the parts of a layout that are more than one."""
    sizes = {name.replace("_parallel", ""): size for name, size in vars(layout).items() if size > 1}
    return ", ".join(f"{size} {name.replace('_', ' ')}" for name, size in sizes.items()) or "one piece"


def scored_batch(groups: Sequence[Group], pad_token_id: int = 0, **options: Any) -> CollatedBatch:
    """Collate groups with a sampler's and a reference's logprob of each token, all different and exact in any dtype."""
    batch, _ = reference.make_batch(list(groups), pad_token_id, **options)
    mask_BT = batch.completion_mask
    count_BT = torch.arange(1, mask_BT.numel() + 1).view(mask_BT.shape) / 8
    batch.old_logprobs = (-count_BT).masked_fill(~mask_BT, torch.nan)
    batch.ref_logprobs = (-count_BT - 0.0625).masked_fill(~mask_BT, torch.nan)
    return batch


def row_batches(*context_parallel: int) -> Iterator[Case]:
    """Yield batches of rows to cut over these numbers of ranks: one row, rows of all lengths, paddings."""
    for n_ranks in context_parallel:
        layout = Layout(context_parallel=n_ranks)
        for name, groups in (("one row", ONE_ROW), ("rows of all lengths", ROWS)):
            yield Case(f"{n_ranks} ranks", name, batch=scored_batch(groups), layout=layout)
    for name, options in (("padding on the left", {"prompt_padding": "left"}), ("a token as padding", {})):
        batch = scored_batch(ROWS, 2 if not options else 0, **options)
        yield Case("2 ranks", name, batch=batch, layout=Layout(context_parallel=2))


def drawn_rows(rng: Generator, size: int) -> Case:
    """Draw rows, with tokens of which none stands twice in a row, and a number of ranks."""
    groups = []
    for _ in range(rows.whole(rng, 1, size)):
        ids = (torch.randperm(60, generator=rng) + 3).tolist()
        prompt, length = rows.whole(rng, 1, 6), rows.whole(rng, 1, 12)
        sampled = (torch.rand(length, generator=rng) < 0.7).tolist()
        groups.append(Group(ids[:prompt], [Completion(ids[prompt : prompt + length], sampled=sampled)], [0.0]))
    return Case(batch=scored_batch(groups), layout=Layout(context_parallel=rows.whole(rng, 1, 5)))


def shards_by_rank(adapter: Adapter, batch: CollatedBatch, layout: Layout) -> list[list[RowShard]]:
    """Cut the rows for each rank -> shards by rank and row.

    Raises:
        Finding: a rank has another number of shards than there are rows.
    """
    shards = [adapter.shard_rows(copy.deepcopy(batch), layout, rank) for rank in range(layout.context_parallel)]
    counts = {len(of_rank) for of_rank in shards}
    message = f"ranks have {counts} shards of {len(batch.rewards)} rows"
    assert_true(counts == {len(batch.rewards)}, message, quantity="number of shards")
    return shards


def entries(shards: Sequence[RowShard], where: str, *names: str) -> list[tuple[float, ...]]:
    """Return these fields of the positions of all shards at which the field `where` is true, in order of their values."""
    found = []
    for shard in shards:
        marked_N = getattr(shard, where).bool()
        found += list(zip(*(getattr(shard, name)[marked_N].tolist() for name in names), strict=True))
    return sorted(found)


def whole_entries(batch: CollatedBatch, row: int, where: str, *names: str) -> list[tuple[float, ...]]:
    """Return the same of the whole row."""
    return entries([whole_row(batch, row)], where, *names)


def row_scores(shard: RowShard, whole: RowShard) -> Tensor:
    """[N] a logprob for each label of a shard, known by its id from the whole row; 77 where nothing is trained."""
    assert whole.old_logprobs is not None
    known = dict(zip(whole.labels[whole.loss_mask].tolist(), whole.old_logprobs[whole.loss_mask].tolist(), strict=True))
    trained = zip(shard.labels.tolist(), shard.loss_mask.tolist(), strict=True)
    return torch.tensor([known.get(label, 77.0) if is_trained else 77.0 for label, is_trained in trained])


def layouts_of(groups: Sequence[Group]) -> Iterator[Case]:
    """Yield these groups in each layout."""
    yield from (Case(told(layout), groups=list(groups), layout=layout) for layout in LAYOUTS)


def layout_step(adapter: Adapter, start: Scene, layout: Layout) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Train on the batch in this layout -> the gradients in the one step of the state's optimizer, and the metrics."""
    watch = watched(start.state)
    metrics = seeded(adapter.sharded_update, start.state, copy.deepcopy(start.batch), layout)
    steps = len(watch.updates)
    message = f"an update in {told(layout)} made {steps} steps of state.optimizer"
    assert_true(steps == 1, message, quantity="number of steps", magnitude=abs(steps - 1))
    return watch.updates[0].gradients, metrics
