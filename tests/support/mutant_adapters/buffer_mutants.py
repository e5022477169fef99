"""Mistakes for the checks of buffers, staleness, seeds and odd weight syncs that no shipped bug in the museum trips."""

import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.contract.batch import Group
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.presets import GRPO
from rlcanary.contract.records.buffering import BufferSettings, Taken


class SurplusThrownAway(ReferenceAdapter):
    def take_groups(self, buffer: Any, trainer_version: int) -> Taken:
        taken = super().take_groups(buffer, trainer_version)
        if taken.groups:
            buffer.waiting = []
        return taken


class LastRoundAsAWhole(ReferenceAdapter):
    def take_groups(self, buffer: Any, trainer_version: int) -> Taken:
        taken = super().take_groups(buffer, trainer_version)
        if taken.groups:
            taken, buffer.waiting = replace(taken, groups=[*taken.groups, *buffer.waiting]), []
        return taken


class ReadAndNotRemoved(ReferenceAdapter):
    def take_groups(self, buffer: Any, trainer_version: int) -> Taken:
        taken = super().take_groups(buffer, trainer_version)
        buffer.waiting = [*buffer.waiting, *taken.groups[:1]]
        return taken


class KeptByItem(ReferenceAdapter):
    def put_groups(self, buffer: Any, groups: list[Group]) -> int:
        taken = super().put_groups(buffer, groups)
        buffer.waiting = list({group.item_id: group for group in buffer.waiting}.values())
        return taken


class TakenFromTheOtherEnd(ReferenceAdapter):
    def new_buffer(self, settings: BufferSettings) -> Any:
        return ReferenceAdapter(self.conventions.replace(buffer_order="newest_first")).new_buffer(settings)


class RefusedWithoutAWord(ReferenceAdapter):
    def put_groups(self, buffer: Any, groups: list[Group]) -> int:
        super().put_groups(buffer, groups)
        return len(groups)


class NoRoomAgain(ReferenceAdapter):
    """Room is counted by puts alone."""

    def put_groups(self, buffer: Any, groups: list[Group]) -> int:
        buffer.puts = getattr(buffer, "puts", 0) + len(groups)
        if buffer.settings.capacity is not None and buffer.puts > buffer.settings.capacity:
            return 0
        return super().put_groups(buffer, groups)


class FilteredGroupsFillTheBatch(ReferenceAdapter):
    """The batch is cut from all groups first, and filtered then."""

    def new_buffer(self, settings: BufferSettings) -> Any:
        return super().new_buffer(replace(settings, dynamic_sampling=False))

    def take_groups(self, buffer: Any, trainer_version: int) -> Taken:
        taken = super().take_groups(buffer, trainer_version)
        return replace(taken, groups=[group for group in taken.groups if min(group.rewards) < max(group.rewards)])


class VersionsBeginAgain(ReferenceAdapter):
    def load_buffer(self, settings: BufferSettings, folder: Path) -> Any:
        buffer = super().load_buffer(settings, folder)
        buffer.waiting = [replace(group, policy_version=group.policy_version + 1) for group in buffer.waiting]
        return buffer


class OneVersionTooFew(ReferenceAdapter):
    def take_groups(self, buffer: Any, trainer_version: int) -> Taken:
        staleness, trainer = buffer.settings.max_staleness, trainer_version
        buffer.waiting = [group for group in buffer.waiting if trainer - group.policy_version < max(staleness, 1)]
        return super().take_groups(buffer, trainer_version)


class JudgedWhenPut(ReferenceAdapter):
    """The age is that at the time when the newest group came."""

    def take_groups(self, buffer: Any, trainer_version: int) -> Taken:
        versions = [
            version
            for group in buffer.waiting
            for each in group.completions
            for version in each.token_versions or [group.policy_version]
        ]
        return super().take_groups(buffer, max(versions, default=trainer_version))


class NewestToken(ReferenceAdapter):
    def put_groups(self, buffer: Any, groups: list[Group]) -> int:
        def labelled(group: Group) -> Group:
            newest = max(max(each.token_versions or [group.policy_version]) for each in group.completions)
            completions = [replace(each, token_versions=None) for each in group.completions]
            return replace(group, completions=completions, policy_version=newest)

        return super().put_groups(buffer, [labelled(group) for group in groups])


class StopsAtTheFirstFreshGroup(ReferenceAdapter):
    def take_groups(self, buffer: Any, trainer_version: int) -> Taken:
        oldest = trainer_version - buffer.settings.max_staleness
        while buffer.waiting and buffer.waiting[0].policy_version < oldest:
            del buffer.waiting[0]
        # The others count as fresh.
        count = buffer.settings.groups_per_batch
        if len(buffer.waiting) < count:
            return Taken([])
        groups, buffer.waiting = buffer.waiting[:count], buffer.waiting[count:]
        return Taken(groups)


class RunningNotCounted(ReferenceAdapter):
    def groups_to_start(self, buffer: Any, trainer_version: int, running: int) -> int:
        return super().groups_to_start(buffer, trainer_version, 0)


class StaleTwiceReported(ReferenceAdapter):
    def take_groups(self, buffer: Any, trainer_version: int) -> Taken:
        taken = super().take_groups(buffer, trainer_version)
        return replace(taken, stale=[*(taken.stale or ()), *(taken.stale or ())])


class SumOfSeeds(ReferenceAdapter):
    def rollout_seed(self, seed: int, rank: int, step: int, request: int) -> int:
        return seed + 1000 * step + rank + request


class OneSeedForAllSteps(ReferenceAdapter):
    def rollout_seed(self, seed: int, rank: int, step: int, request: int) -> int:
        return super().rollout_seed(seed, rank, 0, request)


class SeedFromTheRandomState(ReferenceAdapter):
    def rollout_seed(self, seed: int, rank: int, step: int, request: int) -> int:
        return super().rollout_seed(seed, rank, step, request) ^ random.getrandbits(30)


class SeedFromACounter(ReferenceAdapter):
    calls = 0

    def rollout_seed(self, seed: int, rank: int, step: int, request: int) -> int:
        self.calls += 1
        return super().rollout_seed(seed, rank, step, self.calls)


class BuffersNeverSent(ReferenceAdapter):
    def __init__(self, conventions: Conventions = GRPO.replace(sync_buffers=True)) -> None:  # noqa: B008
        super().__init__(conventions)

    def sync_weights(self, state: Any, engine: Any) -> None:
        engine.load_weights(state.model.named_parameters())
        engine.reset_prefix_cache()
        engine.version += 1


class NotedBeforeItArrived(ReferenceAdapter):
    """A weight is sent again only if it differs from what was noted as sent."""

    def sync_weights(self, state: Any, engine: Any) -> None:
        noted = vars(engine).setdefault("noted", {})

        def changed() -> Iterable[tuple[str, Tensor]]:
            new = {name: each for name, each in state.model.named_parameters() if not _equals(noted.get(name), each)}
            noted.update({name: each.detach().clone() for name, each in new.items()})
            return new.items()

        engine.load_weights(changed())
        engine.reset_prefix_cache()
        engine.version += 1


def _equals(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and torch.equal(one, other)


class TrainableAtTheStart(ReferenceAdapter):
    def sync_weights(self, state: Any, engine: Any) -> None:
        if not hasattr(engine, "names"):
            engine.load_weights(state.model.named_parameters())
            engine.names = [name for name, each in state.model.named_parameters() if each.requires_grad]
        parameters = dict(state.model.named_parameters())
        engine.load_weights((name, parameters[name]) for name in engine.names)
        engine.reset_prefix_cache()
        engine.version += 1


class RoundedInPlace(ReferenceAdapter):
    def sync_weights(self, state: Any, engine: Any) -> None:
        own, theirs = (next(model.parameters()).dtype for model in (state.model, engine.model))
        state.model.to(theirs)
        super().sync_weights(state, engine)
        state.model.to(own)


BUFFER_MUTANTS = [
    value
    for value in list(vars().values())
    if isinstance(value, type) and issubclass(value, ReferenceAdapter) and value is not ReferenceAdapter
]
