"""The completion mask: tokens up to and including the first end-of-sequence token are trained, later ones are not."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Generator, Tensor

from rlcanary.checks.asserts import assert_close
from rlcanary.checks.case import Case
from rlcanary.checks.check import check
from rlcanary.checks.worlds.rows import one_of, whole
from rlcanary.contract.adapter import Adapter


@check("mask.keeps_first_eos", needs=("completion_mask",))
def keeps_first_eos(adapter: Adapter) -> None:
    """The first end-of-sequence token is trained; the tokens after it are not.

    Silent because without a gradient on EOS the policy never learns to stop: completions grow over days until they are
    all truncated. Look for `ids != eos`, and for a cumulative sum that already counts the EOS itself.
    """
    mask = adapter.completion_mask(torch.tensor([[5, 2, 7]]), [2], 0)
    assert_close(mask, torch.tensor([[1, 1, 0]]), "the mask does not end with the first EOS (id 2)")
    mask = adapter.completion_mask(torch.tensor([[2, 5, 5], [5, 6, 7], [5, 5, 2]]), [2], 0)
    told = "the mask is wrong for an EOS (id 2) at the first position, for none, or for one at the last"
    assert_close(mask, torch.tensor([[1, 0, 0], [1, 1, 1], [1, 1, 1]]), told)


@check("mask.pad_equals_eos", needs=("completion_mask",))
def pad_equals_eos(adapter: Adapter) -> None:
    """With the padding id equal to the EOS id, the sampled EOS is still trained and the padding is not.

    Silent because many tokenizers have no padding token and borrow EOS; a mask of `ids != pad` then takes the gradient of
    stopping away. Look for a comparison with the padding id; masks come from lengths or from the first EOS.
    """
    mask = adapter.completion_mask(torch.tensor([[5, 2, 2, 2], [5, 6, 7, 2]]), [2], 2)
    told = "with pad id = EOS id = 2 the mask does not end with the first EOS"
    assert_close(mask, torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]), told)


@check("mask.pad_id_zero", needs=("completion_mask",))
def pad_id_zero(adapter: Adapter) -> None:
    """A padding id of 0, or one that is also an ordinary token, changes nothing before the EOS.

    Silent because id 0 is an ordinary token ("!" in Qwen's vocabulary): rows that contain it lose tokens. Look for
    `pad_token_id or eos_token_id`, which takes 0 for missing, and for trimming at the first 0.
    """
    mask = adapter.completion_mask(torch.tensor([[0, 5, 0, 2], [5, 2, 0, 0]]), [2], 0)
    told = "with pad id 0 and EOS id 2 the mask does not go up to the first EOS"
    assert_close(mask, torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]), told)


def _two_ends() -> Iterator[Case]:
    given: dict[str, Any] = {"eos_token_ids": [2, 3], "pad_token_id": 0}
    yield Case(ids_BT=torch.tensor([[5, 3, 0, 0], [5, 6, 2, 3], [3, 2, 5, 5]]), **given)
    long_1T = torch.full((1, 300), 5)
    long_1T[0, 280] = 3
    yield Case("300 tokens", ids_BT=long_1T, **given)
    yield Case("70 rows", ids_BT=torch.tensor([[5, 2, 0]] * 70), **given)


def _drawn(rng: Generator, size: int) -> Case:
    shape, ends = (whole(rng, 1, size), whole(rng, 1, 2 * size)), torch.randperm(8, generator=rng)[: whole(rng, 1, 3)]
    ids_BT = torch.randint(whole(rng, 4, 16), shape, generator=rng)
    return Case(ids_BT=ids_BT, eos_token_ids=ends.tolist(), pad_token_id=one_of(rng, (0, 5, int(ends[0]))))


@check("mask.several_eos_ids", needs=("completion_mask",), cases=_two_ends, draws=_drawn)
def several_eos_ids(adapter: Adapter, ids_BT: Tensor, eos_token_ids: list[int], pad_token_id: int) -> None:
    """The first of any of the ids on which the sampler stops ends the mask.

    Silent because chat models stop on <|im_end|> or <|endoftext|>; with one of them known to the mask, the padding after
    the other is trained as text. Look for `tokenizer.eos_token_id` where the sampler uses the generation config's list.
    """
    is_kept = [[not set(ids[:place]) & set(eos_token_ids) for place in range(len(ids))] for ids in ids_BT.tolist()]
    mask = adapter.completion_mask(ids_BT, eos_token_ids, pad_token_id)
    told = f"with EOS ids {eos_token_ids} and padding id {pad_token_id} the mask does not end with the first of them"
    assert_close(mask, torch.tensor(is_kept).int(), told)


@check("mask.truncated_row", needs=("completion_mask",))
def truncated_row(adapter: Adapter) -> None:
    """A completion truncated before any EOS is trained in full, also when there are as many rows as positions.

    Silent because an argmax over a row without EOS is 0, which leaves one token of it. Look for `argmax` without a test
    for presence, and for a broadcast that only fits when B equals T.
    """
    mask = adapter.completion_mask(torch.tensor([[5, 6, 7], [5, 2, 0], [6, 7, 5]]), [2], 0)
    told = "the mask is wrong where some completions end with the EOS (id 2) and others have none"
    assert_close(mask, torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1]]), told)
