"""Rewards by length: what a completion loses depends on its own length and on the limit, and on nothing else."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from rlcanary import reference
from rlcanary.checks.asserts import assert_close, assert_true, assert_unchanged
from rlcanary.checks.case import Case
from rlcanary.checks.check import check
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.records.lengths import Lengths

_LIMIT = 20
_CHOICES = (
    {"overlong_buffer": None},
    {"overlong_buffer": 4, "overlong_penalty": 1.0},
    {"overlong_buffer": 10, "overlong_penalty": 0.5},
    {"overlong_buffer": _LIMIT, "overlong_penalty": 2.0},
)


def _each_length(conventions: Conventions) -> Iterator[Case]:
    for changes in ({}, *_CHOICES):
        limit = max(_LIMIT, conventions.replace(**changes).overlong_buffer or 0)
        for longest in (limit, limit - 2):
            completions_B = torch.arange(longest + 1)
            lengths = Lengths(completions_B, 3 + 5 * (completions_B % 4), limit, max_prompt_tokens=40)
            rewards_B = torch.tensor([0.0, 1.0, 0.25, 2.5, -3.0])[completions_B % 5]
            yield Case(f"up to {longest} tokens", changes, changes=changes, rewards_B=rewards_B, lengths=lengths)


@check("overlong.declared_penalty", needs=("shape_rewards",), cases=_each_length)
def declared_penalty(adapter: Adapter, rewards_B: Tensor, lengths: Lengths) -> None:
    """A completion loses reward from the declared number of tokens before the limit on, up to the declared penalty.

    Silent because the punishment is small and rare: one that starts too late, is never reached or counts twice lets
    completions grow until they are cut, and the reward's curve says nothing. Look at which limit the buffer is taken off,
    at the unit of lengths (ids, not letters), and at a penalty with the wrong sign.
    """
    expected_B = reference.shape_rewards(rewards_B.double(), lengths, adapter.conventions)
    buffer, penalty = adapter.conventions.overlong_buffer, adapter.conventions.overlong_penalty
    declared = "no overlong_buffer" if buffer is None else f"overlong_buffer={buffer} and overlong_penalty={penalty:g}"
    told = f"with a limit of {lengths.max_new_tokens} tokens and {declared} the rewards are other ones"
    assert_close(adapter.shape_rewards(rewards_B, lengths), expected_B, told)


@check("overlong.prompt_does_not_count", needs=("shape_rewards",), cases=_each_length)
def prompt_does_not_count(adapter: Adapter, rewards_B: Tensor, lengths: Lengths) -> None:
    """A completion loses as much behind a short prompt as behind a long one.

    Silent because prompts differ little within a dataset: a limit on prompt and completion together, less the prompt, gives
    every short prompt a longer leash. Look for a total length in the place of the completion's.
    """
    shaped_B = adapter.shape_rewards(rewards_B, lengths)
    longer = replace(lengths, prompts=lengths.prompts + 7)
    told = "behind prompts that are 7 tokens longer the rewards are other ones"
    assert_close(adapter.shape_rewards(rewards_B, longer), shaped_B, told)


@check("overlong.longer_earns_no_more", needs=("shape_rewards",), cases=_each_length)
def longer_earns_no_more(adapter: Adapter, rewards_B: Tensor, lengths: Lengths) -> None:
    """The longer of two completions with the same reward does not end up with more, whatever the rest of the batch is.

    Silent because the batch's mean hardly moves: a sign that is turned, or a penalty that ends where a completion is cut,
    pays for length. Look at the end of the buffer, and at lengths that are compared with those of the batch.
    """
    shaped_B = torch.as_tensor(adapter.shape_rewards(torch.ones_like(rewards_B), lengths)).double()
    rises_B = shaped_B.diff() > 1e-6
    first = int(rises_B.long().argmax())
    told = f"{first + 1} tokens earn {shaped_B[first + 1]:.4g}, and {first} tokens earn {shaped_B[first]:.4g}"
    assert_true(not rises_B.any(), told, quantity="rewards", magnitude=float(shaped_B.diff().max()))
    alone_B = [
        float(adapter.shape_rewards(torch.ones(1), lengths.rows(row))) for row in torch.arange(len(shaped_B)).split(1)
    ]
    told = "completions that are shaped alone earn something else than in a batch"
    assert_close(torch.tensor(alone_B), shaped_B, told)


@check("overlong.inputs_untouched", severity="hardening", needs=("shape_rewards",), cases=_each_length)
def inputs_untouched(adapter: Adapter, rewards_B: Tensor, lengths: Lengths) -> None:
    """Shaping does not change the rewards that it is given.

    Silent because the rewards as they were are logged afterwards, and judged by dynamic sampling. Look for `+=` on the
    tensor of rewards.
    """
    before_B = rewards_B.clone()
    adapter.shape_rewards(rewards_B, lengths)
    assert_unchanged(rewards_B, before_B, "shape_rewards changed the rewards in place")
