"""Subtract the KL to a reference policy from the rewards of groups, before their advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from rlcanary.contract.batch import Group
from rlcanary.contract.conventions import Conventions
from rlcanary.grpo.engines.containers import LogProbs, Masks, Tokens
from rlcanary.grpo.engines.policy import Policy
from rlcanary.reference.kl import rewards_with_kl


def subtract_kl(groups: Sequence[Group], reference: Policy, conventions: Conventions) -> list[Group]:
    """Return the groups with each reward less kl_coef × the KL estimate over its completion.

    The KL is that of the policy that sampled. A step on the result must not subtract it again: give the step
    `trainer_conventions` and no reference model.

    Args:
        groups: with the sampler's logprobs.
        reference: scores the completions at the conventions' temperature.
        conventions: kl_placement has to be "reward"; kl_coef and the fields that `rlcanary.reference.kl` uses.

    Raises:
        ValueError: kl_placement is "loss"; a group brings reference logprobs, from which the step would take the KL itself;
            or a token has no sampler's logprob.
    """
    if conventions.kl_placement != "reward":
        raise ValueError(
            "kl_placement is 'loss': a term of the loss that would count twice if it were taken from rewards"
        )
    for group in groups:
        if group.ref_logprobs is not None:
            raise ValueError(
                f"group {group.item_id!r} has reference logprobs: the step takes the KL from rewards itself"
            )
    rows = [(group, completion) for group in groups for completion in group.completions]
    tokens = Tokens.of([group.prompt_ids for group, _ in rows], [completion.token_ids for _, completion in rows])
    sampled = LogProbs(
        [torch.full(row.shape, torch.nan) for row in tokens.prompt],
        [_logprobs(group, completion.logprobs, len(completion.token_ids)) for group, completion in rows],
    )
    with torch.no_grad():
        referred = reference.logprobs(tokens, temperature=conventions.temperature)
    rewards = torch.tensor([reward for group in groups for reward in group.rewards], dtype=torch.float64)
    mask_BT = Masks.of(tokens).attention()[1]
    reduced = iter(rewards_with_kl(rewards, sampled.padded()[1], referred.padded()[1], mask_BT, conventions).tolist())
    return [replace(group, rewards=[next(reduced) for _ in group.completions]) for group in groups]


def trainer_conventions(conventions: Conventions) -> Conventions:
    """Return the conventions of a step on groups whose rewards already include the KL."""
    return conventions.replace(kl_coef=0.0)


def _logprobs(group: Group, logprobs: Sequence[float] | None, length: int) -> torch.Tensor:
    if logprobs is None or len(logprobs) != length:
        raise ValueError(f"group {group.item_id!r}: the KL needs the sampler's logprob of each token")
    return torch.tensor(list(logprobs))
