"""The effect of an update on the weights, told from one number of each parameter before and behind it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlcanary.live.findings import Finding

# A trained parameter that stood still in this many audited updates, in which others moved, is not trained.
PATIENCE = 10
COARSE = {"bfloat16", "float16"}
SLICE = 2**22


@dataclass(frozen=True)
class Moves:
    """The parameters of a model, by name, as an update left them.

    Attributes:
        moved: those that changed.
        still: trained ones that did not.
        frozen_moved: frozen ones that changed.
        not_finite: those with a NaN or an infinity.
        dtypes: the name of each one's type.
        trained: those that are to be trained, moved or not.
    """

    moved: tuple[str, ...]
    still: tuple[str, ...]
    frozen_moved: tuple[str, ...]
    not_finite: tuple[str, ...]
    dtypes: dict[str, str]
    trained: tuple[str, ...] = ()

    @classmethod
    def of_all(cls, moves: Sequence[Moves]) -> Moves:
        """Join what happened to the shards of several ranks: a parameter moved where one of its shards did."""
        moved = _union(each.moved for each in moves)
        return cls(
            moved=moved,
            still=tuple(name for name in _union(each.still for each in moves) if name not in moved),
            frozen_moved=_union(each.frozen_moved for each in moves),
            not_finite=_union(each.not_finite for each in moves),
            dtypes={name: dtype for each in moves for name, dtype in each.dtypes.items()},
            trained=_union(each.trained for each in moves),
        )


class Weights:
    """One number of each of a model's parameters, taken before an update."""

    def __init__(self, model: Any, optimizer: Any = None) -> None:
        """Note the numbers, and whether any group of the optimizer has a learning rate above 0."""
        self._model = model
        self._forms, self._before = _forms(model), _sums(model)
        self._rests = optimizer is not None and not any(float(group["lr"]) for group in optimizer.param_groups)

    def moves(self) -> Moves:
        """Compare the parameters with what they were."""
        before, now, forms = _read(self._before), _read(_sums(self._model)), _forms(self._model)
        # What is whole before the update and a shard behind it, or elsewhere, cannot be compared.
        after = {name: total for name, total in now.items() if name in before and forms[name] == self._forms[name]}
        parameters = _parameters(self._model)
        changed = {name for name, total in after.items() if total != before[name]}
        finite = {name for name, total in after.items() if total - total == 0}
        return Moves(
            moved=tuple(name for name in after if name in changed & finite and parameters[name].requires_grad),
            still=()
            if self._rests
            else tuple(name for name in after if name not in changed and parameters[name].requires_grad),
            frozen_moved=tuple(name for name in after if name in changed and not parameters[name].requires_grad),
            not_finite=tuple(name for name in after if name not in finite),
            dtypes={name: str(each.dtype).removeprefix("torch.") for name, each in parameters.items()},
            trained=tuple(name for name, each in parameters.items() if each.requires_grad),
        )


class Stillness:
    """The number of audited updates in a row in which each trained parameter stood still while others moved.

    One that has moved before may rest, as all do in a policy that is sure of every token, unless its type is so coarse that
    small steps are lost.
    """

    def __init__(self) -> None:
        self._updates: dict[str, int] = {}
        self._moved: set[str] = set()
        self._trained: set[str] = set()
        self._is_resumed = False

    def state_dict(self) -> dict[str, Any]:
        """Return what is known so far, in plain values."""
        return {"updates": dict(self._updates), "trained": sorted(self._trained), "moved": sorted(self._moved)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what was known before: the run trains what it trained then."""
        self._updates, self._trained, self._is_resumed = dict(state["updates"]), set(state["trained"]), True
        self._moved = set(state.get("moved", ()))

    def judge(self, moves: Moves, gradient: Tensor) -> Iterator[Finding]:
        """Judge what an update did.

        Args:
            moves: of the update.
            gradient: [B, T] of the logprobs; where it is zero everywhere, or not finite, weights may stand still.
        """
        before, self._trained = self._trained, set(moves.trained)
        is_resumed, self._is_resumed = self._is_resumed, False
        if is_resumed and before and before != self._trained:
            yield from _other_trained(tuple(sorted(before - self._trained)), tuple(sorted(self._trained - before)))
        if moves.not_finite:
            told = f"{_some(moves.not_finite)} is not finite behind the update"
            yield Finding("weights.not_finite", told, len(moves.not_finite))
            return
        if moves.frozen_moved:
            told = f"the update moved {_some(moves.frozen_moved)}, which is frozen"
            yield Finding("weights.frozen_moved", told, len(moves.frozen_moved))
        if not moves.moved:
            may_rest = any(name in self._moved and moves.dtypes[name] not in COARSE for name in moves.still)
            if moves.still and not may_rest and bool(gradient.isfinite().all()) and bool(gradient.any()):
                yield Finding("weights.still", "the logprobs had a gradient, and no trained parameter moved", 1.0)
            return
        self._updates = {name: self._updates.get(name, 0) + 1 for name in moves.still}
        self._moved |= set(moves.moved)
        stuck = tuple(
            name
            for name, updates in self._updates.items()
            if updates >= PATIENCE and (name not in self._moved or moves.dtypes[name] in COARSE)
        )
        if stuck:
            told = (
                f"{_some(stuck)} is to be trained, and did not move in {PATIENCE} audited updates in which others did"
                f"{_rounded(moves, stuck)}"
            )
            yield Finding("weights.stuck", told, len(stuck))


def _other_trained(no_longer: tuple[str, ...], newly: tuple[str, ...]) -> Iterator[Finding]:
    parts = [
        f"{_some(names)} is {word}"
        for names, word in ((no_longer, "no longer trained"), (newly, "newly trained"))
        if names
    ]
    yield Finding("weights.trained", f"behind a resume {' and '.join(parts)}", len(no_longer) + len(newly))


WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def _parameters(model: Any) -> dict[str, Tensor]:
    """Return a model's parameters by their names without those of wrappers, under which a run may be resumed or not."""
    named: dict[str, Tensor] = dict(model.named_parameters())
    for wrapper in WRAPPERS:
        named = {name.replace(wrapper, ""): each for name, each in named.items()}
    if all(name.startswith("module.") for name in named):  # DistributedDataParallel
        named = {name.removeprefix("module."): each for name, each in named.items()}
    return named


def _local(parameter: Tensor) -> Tensor:
    """Return what this rank has of a parameter."""
    shard: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return shard.detach()


def _forms(model: Any) -> dict[str, tuple[bool, int]]:
    """Return by parameter if it is a shard, and how many values this rank has of it."""
    return {name: (hasattr(each, "to_local"), _local(each).numel()) for name, each in _parameters(model).items()}


def _sums(model: Any) -> dict[str, Tensor]:
    """Return a number of each parameter that is here; of one that is sharded, of this rank's shard.

    Nothing waits for a GPU yet. Left out are parameters without a value here, as those that are elsewhere between passes.
    """
    local = {name: _local(each) for name, each in _parameters(model).items()}
    return {name: _sum(each) for name, each in local.items() if each.numel() and not each.is_meta}


def _sum(values: Tensor) -> Tensor:
    """Sum x + x² in float64, which changes where moves cancel too; in slices, since a copy of a vocabulary is large."""
    total = torch.zeros((), dtype=torch.float64, device=values.device)
    for part in values.reshape(-1).split(SLICE):
        exact = part.double()
        total += (exact + exact.square()).sum()
    return total


def _read(sums: dict[str, Tensor]) -> dict[str, float]:
    """Read all sums at once, each device's in one transfer."""
    devices = {total.device for total in sums.values()}
    read: dict[str, float] = {}
    for device in devices:
        names = [name for name, total in sums.items() if total.device == device]
        read |= zip(names, torch.stack([sums[name] for name in names]).tolist(), strict=True)
    return {name: read[name] for name in sums}


def _union(names: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Join names, each once, in their order."""
    return tuple(dict.fromkeys(name for each in names for name in each))


def _rounded(moves: Moves, stuck: tuple[str, ...]) -> str:
    coarse = sorted({moves.dtypes[name] for name in stuck} & COARSE)
    return f": in {' and '.join(coarse)} a small step is rounded away" if coarse else ""


def _some(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"each of {len(names)} parameters, such as {names[0]},"
