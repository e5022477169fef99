"""A training run of some seconds through the capabilities of an adapter: how far a bug reaches into what is learned."""

from __future__ import annotations

from functools import partial
from typing import Any

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.bugs.museum import Bug
from rlcanary.bugs.update import UPDATES, changed, update
from rlcanary.checks.worlds.training.states import seeded
from rlcanary.checks.worlds.training.tiny_trainer import reference_near, tiny_policy
from rlcanary.contract.adapter import Item
from rlcanary.tiny_models import EOS_ID, PAD_ID

ROUNDS = 40
LENGTH = 6
CLASSES = 3
"""A completion earns the share of its places that hold an id of the prompt's class, which is the id modulo this."""
EVERY = 4
"""Rounds between two measurements."""
RUN = (*UPDATES, "new_state", "new_engine", "generate", "rollout", "score", "make_batch", "sync_weights")
"""The capabilities that a run goes through."""


def reaches_a_run(bug: type[Bug]) -> bool:
    """Tell whether a run goes through a capability that the bug changes."""
    return any(changed(bug, name) for name in RUN)


def rewards(adapter: ReferenceAdapter, rounds: int = ROUNDS) -> list[float]:
    """Train the tiny Llama on prompts that ask for ids of a class.

    A round is a rollout, an update on it and a weight sync, each through the adapter. The mean reward of the policy in
    training is measured without it, by the reference's own engine: before the first round, and every `EVERY` rounds.

    Raises:
        NotProvided, ValueError: the adapter does not take such a run.
    """
    conventions, policy = adapter.conventions, tiny_policy()
    state = seeded(adapter.new_state, policy, reference_near(policy, conventions, other=False), 1e-2)
    engine = adapter.new_engine(state.model)
    items = [Item(index, [5 + index, 20], partial(_reward, index)) for index in range(2 * CLASSES)]
    sampling = {"n": 8, "temperature": conventions.temperature, "max_new_tokens": LENGTH, "eos_token_ids": [EOS_ID]}
    measured = [_measured(state.model, items)]
    for number in range(rounds):
        groups = adapter.rollout(engine, items, {**sampling, "seed": number})
        update(adapter, state, adapter.make_batch(groups, PAD_ID))
        adapter.sync_weights(state, engine)
        if (number + 1) % EVERY == 0:
            measured.append(_measured(state.model, items))
    return measured


def _measured(model: Any, items: list[Item]) -> float:
    reference = ReferenceAdapter()
    sampling = {"n": 8, "max_new_tokens": LENGTH, "eos_token_ids": [EOS_ID], "seed": 0}
    groups = reference.rollout(reference.new_engine(model), items, sampling)
    earned = [reward for group in groups for reward in group.rewards]
    return sum(earned) / len(earned)


def _reward(index: int, text: str) -> float:
    return sum(int(token) % CLASSES == index % CLASSES for token in text.split()) / LENGTH
