"""Planting of mistakes: the oracle with changed functions or capabilities."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.contract.adapter import CAPABILITIES
from rlcanary.contract.batch import PolicyBatch
from rlcanary.contract.conventions import Conventions

Function = Callable[..., Any]
Patches = dict[str, Function]
"""Maps a function of the oracle, as `module.function` without the module's folder, to what makes the mistaken one of it.

A capability of the oracle's adapter is `adapter.capability`.
"""

LOSSES = frozenset({"policy_loss", "accumulated_loss", "sharded_loss", "train_step", "rl_step", "sharded_update"})


def on_batch(change: Callable[[PolicyBatch], PolicyBatch]) -> Patches:
    """Patch the loss to be computed on a changed batch."""
    return {"losses.policy_loss": lambda exact: lambda batch, *rest: exact(change(batch), *rest)}


CALLING = {
    "kl.kl": LOSSES | {"kl"},
    "losses.importance_weights": LOSSES | {"importance_weights"},
    "advantages.advantages": frozenset({"advantages", "train_step", "rl_step"}),
    "advantages._group_advantages": frozenset({"advantages", "train_step", "rl_step"}),
    "logprobs.token_logprobs": frozenset({"token_logprobs"}),
    "logprobs.completion_logprobs": frozenset({"completion_logprobs", "train_step"}),
    "logprobs.completion_scores": frozenset({"train_step"}),
    "logprobs.packed_logprobs": frozenset({"packed_logprobs"}),
    "logprobs._check_places": frozenset({"completion_logprobs", "packed_logprobs", "train_step"}),
    "logprobs.entropy": frozenset({"entropy"}),
    "losses.accumulated_loss": frozenset({"accumulated_loss", "sharded_loss"}),
    "supervised.supervised_loss": frozenset({"supervised_loss", "accumulated_other_loss", "sharded_other_loss"}),
    "scoring._reward": frozenset({"score", "rollout", "evaluate"}),
    "step.descend": frozenset({"train_step", "rl_step", "sharded_update"}),
    "step.policy_batch": frozenset({"train_step"}),
}


def reached_by(patches: Iterable[str]) -> frozenset[str]:
    """Return the capabilities that call one of these functions of the oracle, or are one of them."""
    reached: frozenset[str] = frozenset()
    for path in patches:
        module, _, name = path.partition(".")
        reached |= frozenset({name}) if module == "adapter" else CALLING.get(path, LOSSES)
    return reached


@contextmanager
def _patched(patches: Patches) -> Iterator[None]:
    """Replace functions of the oracle, each in all modules that have it."""
    modules = {name: module for name, module in sys.modules.items() if name.split(".")[:2] == ["rlcanary", "reference"]}
    homes = {name.rpartition(".")[2]: module for name, module in modules.items()}
    changed = []
    for path, patch in patches.items():
        module, _, name = path.partition(".")
        if module == "adapter":
            continue
        original = getattr(homes[module], name)
        wrapper = patch(original)
        changed += [
            (each, name, original, wrapper) for each in modules.values() if getattr(each, name, None) is original
        ]
    for place, name, _, wrapper in changed:
        setattr(place, name, wrapper)
    try:
        yield
    finally:
        for place, name, original, _ in changed:
            setattr(place, name, original)


class Mistaken(ReferenceAdapter):
    """The oracle with a mistake in its capabilities; called from elsewhere, it has none."""

    def __init__(self, conventions: Conventions, patches: Patches) -> None:
        super().__init__(conventions)
        self._patches = patches
        self._is_inside = False

    def configured(self, **changes: Any) -> Mistaken:
        return Mistaken(self.conventions.replace(**changes), self._patches)

    def __getattribute__(self, name: str) -> Any:
        attribute = super().__getattribute__(name)
        # A capability that calls another one is patched once.
        if name not in CAPABILITIES or self._is_inside:
            return attribute

        patch = self._patches.get(f"adapter.{name}")
        mistaken = patch(attribute) if patch else attribute

        def call(*given: Any, **named: Any) -> Any:
            self._is_inside = True
            try:
                with _patched(self._patches):
                    return mistaken(*given, **named)
            finally:
                self._is_inside = False

        return call
