"""A small trainer for the checks: its models, states and batches."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from rlcanary import reference, tiny_models
from rlcanary.checks.worlds.training.states import nudged, own_logprobs, precision, seeded
from rlcanary.contract.adapter import Adapter, NotProvided
from rlcanary.contract.batch import CollatedBatch, Completion, Group
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.layers import copied

# The same length throughout, so that both completions have the same weight under every aggregation.
PAIR = [Group([5, 6, 7], [Completion([8, 9]), Completion([10, 11])], [1.0, 0.0])]
# Uneven prompts and completions, two completions alike that earned different rewards, ids that serve as padding elsewhere.
GROUPS = [
    Group(
        [5, 6],
        [Completion([8, 9, 2]), Completion([10]), Completion([11, 0]), Completion([11, 0])],
        [1.0, 0.0, 0.75, 0.25],
        item_id="a",
    ),
    Group(
        [13, 14, 15, 16],
        [Completion([17, 18, 19, 20, 2]), Completion([21, 2]), Completion([22]), Completion([23, 24, 25])],
        [0.0, 2.0, 0.0, 1.0],
        item_id="b",
    ),
]
# Sizes that share no factor, so that no micro-batch of several rows ends with a group.
UNEVEN = [
    Group([5, 6, 7][:size], [Completion([8 + row, 9, 2][: 1 + row % 3]) for row in range(size)], rewards)
    for size, rewards in ((3, [1.0, 0.0, 0.5]), (5, [0.0, 1.0, 0.0, 0.25, 1.0]), (2, [0.0, 2.0]))
]
# Tokens of a tool behind the end of a turn and at the start of a completion, and a completion of nothing else.
TOOLS = [
    Group(
        [5, 6, 7],
        [
            Completion([8, 2, 30, 31, 10, 2], sampled=[True, True, False, False, True, True]),
            Completion([11, 12], sampled=[False, True]),
            Completion([13, 14, 15], sampled=[False, False, False]),
        ],
        [1.0, 0.0, 0.25],
    )
]


def others(groups: Sequence[Group]) -> list[Group]:
    """Return other completions of the same items, each as long as the one in its place, with the rewards in reverse."""
    return [
        replace(
            group,
            completions=[
                replace(each, token_ids=[63 - token for token in each.token_ids]) for each in group.completions
            ],
            rewards=list(group.rewards)[::-1],
        )
        for group in groups
    ]


def tiny_policy(**options: Any) -> Any:
    """Make the tiny Llama with these options (`rlcanary.tiny_models.tiny_llama`).

    Raises:
        NotProvided: transformers is not installed.
    """
    try:
        return tiny_models.tiny_llama(**options)
    except ModuleNotFoundError as error:
        raise NotProvided(f"{error.name} is not installed") from error


class Damped(torch.nn.Module):
    """A layer whose output is smaller in training mode, as a dropout without chance."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Any, **options: Any) -> Any:
        output = self.layer(*inputs, **options)
        return output * 0.8 if self.training else output


def damped_policy() -> Any:
    """Make the tiny Llama with a damped last norm.

    Raises:
        NotProvided: transformers is not installed.
    """
    policy = tiny_policy()
    policy.model.norm = Damped(policy.model.norm)
    return policy


def state_of(adapter: Adapter, model: Any = None, ref_model: Any = None, learning_rate: float = 1e-3) -> Any:
    """Make the adapter's own state to train a model from, the tiny policy by default, under a fixed seed.

    Raises:
        NotProvided: the adapter has no such state, or transformers is not installed. The default state is not for models
            in half precision, because it has no float32 masters.
    """
    policy = tiny_policy() if model is None else model
    is_default = getattr(adapter.new_state, "__func__", None) is Adapter.new_state
    if is_default and precision(policy) in (torch.bfloat16, torch.float16):
        raise NotProvided("the default new_state keeps no float32 masters of parameters in half precision")
    return seeded(adapter.new_state, policy, ref_model, learning_rate)


def reference_near(model: Any, conventions: Conventions, other: bool = True) -> Any:
    """Make a reference model near this model, or equal to it, in evaluation mode; None if the conventions have no KL."""
    if conventions.kl_coef == 0:
        return None
    equal = copied(model).eval()
    return nudged(equal) if other else equal


def sampled(
    model: Any,
    conventions: Conventions,
    groups: Sequence[Group] = GROUPS,
    drift: float = 0.0,
    pad_token_id: int = 0,
    **layout: Any,
) -> CollatedBatch:
    """Make a batch of completions with the model's logprobs at the conventions' temperature.

    Args:
        model: the policy that sampled.
        conventions: the temperature is used.
        groups: the sampled groups.
        drift: largest difference of an older policy's logprobs from these, in nats.
        pad_token_id: fills the padding.
        layout: options for `reference.make_batch`.
    """
    batch, _ = reference.make_batch(list(groups), pad_token_id, **layout)
    logprobs_BT = own_logprobs(model, batch, conventions.temperature)
    noise_BT = torch.rand(logprobs_BT.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    # A sampler gives no logprobs of tokens that it did not sample.
    old_logprobs_BT = (logprobs_BT.float() + drift * noise_BT).masked_fill(~batch.completion_mask, torch.nan)
    return replace(batch, old_logprobs=old_logprobs_BT)


def with_reference(batch: CollatedBatch, ref_model: Any, conventions: Conventions) -> CollatedBatch:
    """Return the batch with the logprobs of this reference model, NaN where a token was not sampled."""
    ref_logprobs_BT = own_logprobs(ref_model, batch, conventions.temperature).float()
    return replace(batch, ref_logprobs=ref_logprobs_BT.masked_fill(~batch.completion_mask, torch.nan))
