"""The whole path from token ids to logprobs: the same completion scores the same in every batch."""

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Generator, Tensor

from rlcanary import reference
from rlcanary.checks.check import check
from rlcanary.checks.literal import Written
from rlcanary.checks.subject import Subject
from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.batch import CollatedBatch, Completion, Group

# Prompts and completions of different lengths, one prompt as long as its completion, ids that serve as padding elsewhere.
GROUPS = [
    Group([5, 6, 7], [Completion([8, 9, 2]), Completion([10])], [1.0, 0.0]),
    Group([11, 12, 13, 14, 15], [Completion([16, 17, 18, 19, 2]), Completion([20, 0, 21])], [1.0, 0.0]),
    Group([22], [Completion([23, 24])], [1.0]),
]


@cache
def _model() -> Written:
    try:
        from rlcanary.tiny_models import tiny_llama

        model = tiny_llama()
    except ModuleNotFoundError as error:
        raise NotProvided(f"{error.name} is not installed") from error
    return Written(model, "tiny_llama()", "from rlcanary.tiny_models import tiny_llama")


def _alone(model: Any, temperature: float) -> list[Tensor]:
    """Score each completion in a batch of its own, without padding."""
    scores = []
    with torch.no_grad():
        for group in GROUPS:
            for completion in group.completions:
                ids_1S = torch.tensor([[*group.prompt_ids, *completion.token_ids]])
                start = len(group.prompt_ids)
                logits_TV = model(input_ids=ids_1S).logits[0, start - 1 : -1].double() / temperature
                scores.append(logits_TV.log_softmax(dim=-1).gather(1, ids_1S[0, start:, None]).squeeze(1))
    return scores


def _expected(model: Any, mask_BT: Tensor, temperature: float) -> Tensor:
    expected_BT = torch.full(mask_BT.shape, torch.nan, dtype=torch.float64)
    for row, scores in enumerate(_alone(model, temperature)):
        expected_BT[row, : len(scores)] = scores
    return expected_BT


def _expect(subject: Subject, batch: CollatedBatch, message: str, capability: str, temperature: float = 1.0) -> None:
    model = _model()
    call = subject.call(capability, model, batch, temperature)
    expected_BT = _expected(model.value, batch.completion_mask, temperature)
    # Attention over padded rows sums in another order; logits of this model are of the order of 10.
    call.expect(expected_BT.nan_to_num(), message, where=batch.completion_mask, scale=10)


@check("forward.scores_each_token_at_its_place", needs=("completion_logprobs",))
def scores_each_token_at_its_place(subject: Subject, rng: Generator) -> None:
    """Every completion token is scored by the logits at the position before it, for prompts of any length.

    Silent because logits one position off, or of the neighbouring row, are logits: the loss falls and the policy learns
    noise. Look for a slice of the last T positions, a shift on one side only, and one prompt length for all rows.
    """
    batch, _ = reference.make_batch(GROUPS, pad_token_id=0)
    _expect(subject, batch, "logprobs differ from those of each sequence alone", "completion_logprobs")


@check("forward.padding", needs=("completion_logprobs",))
def padding(subject: Subject, rng: Generator) -> None:
    """Neither the side nor the amount nor the id of the padding changes a completion's logprobs.

    Silent because policy and reference are off by the same amount, so that the KL looks fine: a short prompt scores
    differently in a batch with a long one. Look for a forward pass without attention mask, and for positions that count
    padding.
    """
    layouts: dict[str, dict[str, Any]] = {
        "more padding on the right": {"pad_token_id": 0, "seq_len_buckets": [16]},
        "padding on the left": {"pad_token_id": 0, "prompt_padding": "left"},
        # Both ids are also tokens of these completions.
        "padding with the id 2": {"pad_token_id": 2},
        "padding with the id 21": {"pad_token_id": 21},
    }
    for told, layout in layouts.items():
        with subject.case(told):
            batch, _ = reference.make_batch(GROUPS, **layout)
            _expect(subject, batch, f"{told} changed the logprobs", "completion_logprobs")


@check("forward.garbage_in_padding", needs=("completion_logprobs",))
def garbage_in_padding(subject: Subject, rng: Generator) -> None:
    """The ids in the padding do not change the logprobs.

    Silent because padding ids are usually constant, and the model adapts to them. Look for masks made from ids instead
    of lengths, and for attention to padding after the end.
    """
    batch, _ = reference.make_batch(GROUPS, pad_token_id=0)
    dirty_BS = torch.where(batch.attention_mask, batch.input_ids, 33)
    dirty_BT = torch.where(batch.completion_mask, batch.completion_ids, 33)
    dirty = replace(batch, input_ids=dirty_BS, completion_ids=dirty_BT)
    _expect(subject, dirty, "ordinary ids in the padding changed the logprobs", "completion_logprobs")


@check("forward.temperature", needs=("completion_logprobs",))
def temperature(subject: Subject, rng: Generator) -> None:
    """The forward path applies the sampling temperature, once.

    Silent because only one of several paths may omit it (one backend, or the old logprobs): the ratio is then off at
    every token and clipping hides it. Look at each path that turns logits into logprobs.
    """
    batch, _ = reference.make_batch(GROUPS, pad_token_id=0)
    for value in (0.6, 1.5):
        with subject.case(f"temperature {value}"):
            told = f"at temperature {value} the forward path scores another distribution"
            _expect(subject, batch, told, "completion_logprobs", value)


@check("forward.packing", needs=("packed_logprobs",))
def packing(subject: Subject, rng: Generator) -> None:
    """Rows packed into one sequence get the same logprobs as alone.

    Silent because attention across the seam between two documents still gives probabilities. Look at the boundaries
    (cumulative lengths that start at 0 and end at the number of tokens) and at positions that start anew.
    """
    batch, _ = reference.make_batch(GROUPS, pad_token_id=0)
    _expect(subject, batch, "packed rows score differently from each row alone", "packed_logprobs")
