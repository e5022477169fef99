"""The oracle of parallel layouts, derived a second time: by hand, by autograd on the whole, by enumeration."""

from typing import Any

import pytest
import torch

from rlcanary import reference, tiny_models
from rlcanary.contract.batch import CollatedBatch, Completion, Group
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.presets import GRPO
from rlcanary.contract.records.layouts import Layout, VocabShards
from rlcanary.contract.state import TrainState
from rlcanary.reference import layouts

# A row of ten tokens, and one of three.
GROUPS = [
    Group([5, 6, 7], [Completion([8, 9, 10, 11, 12, 13, 2], [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0])], [1.0]),
    Group([14], [Completion([15, 2], [-8.0, -9.0])], [0.0]),
]


def batch(padding: str = "right") -> CollatedBatch:
    return reference.make_batch(GROUPS, 0, prompt_padding=padding)[0]  # type: ignore[arg-type]


def test_zigzag_of_a_row_by_hand() -> None:
    # Ten tokens over two ranks: four chunks of three, of which the last has one token and two of padding.
    first, last = (layouts.shard_rows(batch("left"), 2, rank)[0] for rank in (0, 1))
    assert first.input_ids.tolist() == [5, 6, 7, 2, 0, 0]
    assert first.attention_mask.tolist() == [True] * 4 + [False] * 2
    assert first.position_ids.tolist() == [0, 1, 2, 9, 0, 0]
    assert first.loss_mask.tolist() == [False, False, True, False, False, False]
    assert first.labels.tolist()[:3] == [6, 7, 8]
    assert last.input_ids.tolist() == [8, 9, 10, 11, 12, 13]
    assert last.position_ids.tolist() == [3, 4, 5, 6, 7, 8]
    assert last.labels.tolist() == [9, 10, 11, 12, 13, 2]
    assert last.old_logprobs is not None
    assert last.old_logprobs.tolist() == [-2.0, -3.0, -4.0, -5.0, -6.0, -7.0]
    assert last.loss_mask.all()


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("n_ranks", range(1, 8))
def test_gathering_undoes_cutting(n_ranks: int, padding: str) -> None:
    rows = batch(padding)
    shards = [layouts.shard_rows(rows, n_ranks, rank) for rank in range(n_ranks)]
    scores = [[shard.old_logprobs for shard in of_rank] for of_rank in shards]
    gathered_BT = layouts.gathered_logprobs(scores, rows, n_ranks)  # type: ignore[arg-type]
    assert torch.equal(gathered_BT.nan_to_num(), rows.old_logprobs.nan_to_num())  # type: ignore[union-attr]
    owned = [int(sum(shard.loss_mask.sum() for shard in of_rank)) for of_rank in shards]
    owners_BT = layouts.context_ranks(rows, n_ranks)[rows.completion_mask]
    assert owned == [int((owners_BT == rank).sum()) for rank in range(n_ranks)]
    assert sum(owned) == 9


UPDATES = [
    GRPO,
    GRPO.replace(aggregation="token_mean", kl_coef=0.3, entropy_coef=0.1),
    GRPO.replace(ratio_level="sequence", importance_level="sequence", max_grad_norm=0.01),
]


def updated(conventions: Conventions, layout: Layout | None) -> tuple[list[torch.Tensor], dict[str, float]]:
    """Gradients and metrics of `train_step`, or of an update in this layout."""
    model = tiny_models.tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state: Any = TrainState(model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer), tiny_models.tiny_llama(1))
    rows = batch()
    rows.group_ids = torch.zeros(2, dtype=torch.long)
    metrics = (
        reference.train_step(state, rows, conventions)
        if layout is None
        else layouts.sharded_update(state, rows, layout, conventions)
    )
    return [parameter.grad for parameter in model.parameters()], metrics


@pytest.mark.parametrize("conventions", UPDATES)
def test_every_layout_gives_the_update_of_train_step(conventions: Conventions) -> None:
    expected, metrics = updated(conventions, None)
    del metrics["loss"]  # Layouts may log another one, which is the same in all of them.
    losses = set()
    for layout in (Layout(), Layout(2, 3, 2), Layout(context_parallel=2, micro_batches=2)):
        gradients, logged = updated(conventions, layout)
        losses.add(round(logged.pop("loss"), 5))
        assert logged == pytest.approx(metrics, rel=1e-4, nan_ok=True)
        for got, wanted in zip(gradients, expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-6)
    assert len(losses) == 1


def test_more_pieces_than_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot cut 2 rows"):
        updated(GRPO, Layout(data_parallel=3))


@pytest.mark.parametrize(("n_ranks", "vocab_size"), [(1, 6), (2, 6), (3, 6), (6, 6), (2, 4), (3, 3), (6, 1)])
def test_vocabulary_over_ranks_is_log_softmax_of_its_tokens(n_ranks: int, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits_BTV = torch.randn(1, vocab_size, 6, generator=generator, dtype=torch.float64) * 50
    logits_BTV.requires_grad_()
    ids_BT = torch.arange(vocab_size).unsqueeze(0)
    shards = VocabShards(list(logits_BTV.chunk(n_ranks, dim=-1)), vocab_size)
    got_BT = layouts.vocab_parallel_logprobs(shards, ids_BT, 0.7)
    wanted_BT = (logits_BTV[..., :vocab_size] / 0.7).log_softmax(-1).diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(got_BT, wanted_BT)
    got_BTV, wanted_BTV = (torch.autograd.grad(each.sum(), logits_BTV)[0] for each in (got_BT, wanted_BT))
    torch.testing.assert_close(got_BTV, wanted_BTV)


def test_ids_outside_the_vocabulary_are_refused() -> None:
    shards = VocabShards([torch.zeros(1, 1, 2), torch.zeros(1, 1, 2)], 3)
    with pytest.raises(ValueError, match="id 3 is outside the vocabulary of 3"):
        layouts.vocab_parallel_logprobs(shards, torch.tensor([[3]]), 1.0)
