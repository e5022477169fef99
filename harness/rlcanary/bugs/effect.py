"""The effect of a museum bug on one batch: the push on each token, by the reference and by the bug."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import torch

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.bugs.museum import Bug
from rlcanary.bugs.update import UPDATES, changed, update, watched
from rlcanary.checks.findings.picture import Grid, grid, tensor_rows, where_trained
from rlcanary.checks.worlds.training.states import seeded
from rlcanary.checks.worlds.training.tiny_trainer import reference_near, sampled, tiny_policy
from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.batch import Completion, Group

GROUPS = [
    Group([5, 6], [Completion([8, 9, 2]), Completion([10]), Completion([11, 12, 13, 2])], [1.0, 0.0, 0.5]),
    Group(
        [14, 15, 16],
        [Completion([17, 30, 31, 20], sampled=[True, False, False, True]), Completion([21, 2]), Completion([22, 23])],
        [0.0, 2.0, 0.5],
    ),
]
# Groups of other sizes, a constant reward, and a group of one.
UNEVEN = [
    Group([5, 6], [Completion([8, 9, 2]), Completion([10])], [0.9, 0.9]),
    Group([14, 15], [Completion([17, 18, 19, 2]), Completion([21, 2]), Completion([22, 23])], [0.0, 1.0, 0.25]),
    Group([24], [Completion([25, 26])], [1.0]),
]
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"aggregation": "token_mean"},
    {"kl_coef": 0.3},
    {"temperature": 0.7},
    {"aggregation": "constant", "aggregation_constant": 6.0},
    {"entropy_coef": 0.1},
    {"entropy_coef": 0.1, "top_entropy": 0.5},
    {"importance_level": "token", "importance_high": 1.05},
    {"advantage_scale": "batch"},
    {"advantage_baseline": "leave_one_out", "advantage_scale": "none"},
    {"max_grad_norm": 0.1},
    {"training_dropout": True, "old_logprobs": "trainer"},
)
"""Changes of the bug's conventions under which it may show; the plainest ones first."""
CREDIT: tuple[dict[str, Any], ...] = ({"token_credit": "gae"}, {"token_credit": "returns"}, {"whitening": "mean_std"})
"""Likewise, of a bug in the credit of tokens."""
PADDINGS: tuple[Literal["right", "left"], ...] = ("right", "left")
DRIFT = 0.5
"""Largest difference of the policy that sampled from the one that is trained, in nats: some ratios are clipped."""


@dataclass(frozen=True)
class Effect:
    """The push on each token of a batch.

    Attributes:
        settings: the changed conventions under which bug and reference differ.
        picture: the pushes as a grid.
    """

    settings: dict[str, Any]
    picture: Grid


def effect_of(bug: type[Bug]) -> Effect | None:
    """Run one update of the bug and of the reference on the same batch; None if the bug changes none, or shows in none."""
    if not any(changed(bug, name) for name in UPDATES):
        return None
    of_tokens = CREDIT if changed(bug, "token_advantages") else ()
    for settings, groups, padding in product((*of_tokens, *SETTINGS), (GROUPS, UNEVEN), PADDINGS):
        try:
            adapter = bug().configured(**settings)
        except ValueError:  # settings that exclude each other
            continue
        if picture := _compared(adapter, groups, padding):
            return Effect(settings, picture)
    return None


def _compared(adapter: Bug, groups: Sequence[Group], padding: Literal["right", "left"]) -> Grid | None:
    """Return the pushes of the bug and of the reference as a grid, None where they agree or cannot be told."""
    conventions, pushes = adapter.conventions, []
    try:
        for each in (adapter, ReferenceAdapter(conventions)):
            policy = tiny_policy(dropout=0.5 if conventions.training_dropout else 0.0)
            state = seeded(each.new_state, policy, reference_near(policy, conventions), 1e-3)
            batch = sampled(policy, conventions, groups, DRIFT, prompt_padding=padding)
            with torch.random.fork_rng(devices=[]), watched(state.model) as seen:
                torch.manual_seed(0)
                update(each, state, batch)
            pushes.append(seen.of(batch, conventions.temperature))
    except (NotProvided, ValueError):  # with the mistake, the code may refuse such a batch
        return None
    got_BS, expected_BS = pushes
    if got_BS is None or expected_BS is None:
        return None
    near = 1e-3 * float(expected_BS.abs().max())
    off_BS = ~torch.isclose(got_BS, expected_BS, rtol=1e-3, atol=near, equal_nan=True)
    if not off_BS.any():
        return None
    strips = {"id": batch.input_ids, "expected": expected_BS, "got": got_BS}
    rows = zip(batch.group_ids.tolist(), batch.rewards.tolist(), strict=True)
    labels = [f"group {group}, reward {reward:g}" for group, reward in rows]
    return grid(tensor_rows(strips, where_trained(batch), labels, off_BS, batch.attention_mask))
