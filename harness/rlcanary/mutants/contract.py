"""Mutants of the contract: an adapter that ignores a field, an argument, a sampling parameter or a declared value.

They are generated from the annotations of the capabilities, the fields of the records, the values of the conventions and
the names of the metrics, so that a new one of these is mutated without a change here.
"""

from __future__ import annotations

import collections.abc
import copy
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.contract.adapter import CAPABILITIES, Adapter
from rlcanary.contract.batch import Batch, CollatedBatch, Completion, Group, LossOutput
from rlcanary.contract.records import RECORDS
from rlcanary.contract.records.building import LoraSettings, PlanSettings, RunPlan, RunSettings
from rlcanary.contract.records.conversations import ConversationOptions, ConversationRow, Environment, Episode
from rlcanary.contract.records.layouts import VocabShards
from rlcanary.contract.records.other_losses import OtherBatch
from rlcanary.contract.records.preparation import Answer, PreparationOptions, PreparedData, PreparedRow
from rlcanary.contract.records.reporting import RolloutBatch
from rlcanary.contract.records.reward_parts import RewardParts
from rlcanary.contract.sampling import Sampling
from rlcanary.mutants.declared import pairs
from rlcanary.mutants.mutant import Mutant, Run, overridden
from rlcanary.mutants.unread import NOT_GIVEN, UNREAD

# The field of a record in which it holds others, and these.
HOLDS: dict[type, tuple[str, tuple[type, ...]]] = {
    Group: ("completions", (Completion,)),
    RolloutBatch: ("groups", (Group, Completion)),
    PreparedData: ("kept", (PreparedRow,)),
    Episode: ("rows", (ConversationRow, Completion)),
    ConversationRow: ("completion", (Completion,)),
    RunSettings: ("lora", (LoraSettings,)),
}
# Records of which a call has one: they have no neighbour.
ALONE = (
    *(CollatedBatch, VocabShards, Answer, PreparationOptions, PreparedData, ConversationOptions),
    *(RunSettings, LoraSettings, PlanSettings, RunPlan, RewardParts),
)
NAMES = {
    **{record.__name__: record for record in RECORDS},
    **{"Environment": Environment, "OtherBatch": OtherBatch, "Tensor": Tensor, "Path": Path},
}
MEANS = (
    *("kl", "entropy", "ratio_mean", "policy_loss", "approx_kl", "logprob", "old_logprob"),
    *("clip_fraction", "clip_fraction_low", "clip_fraction_high"),
)
LOSS_METRICS = (
    *(*MEANS, "dual_clip_fraction", "ratio_min", "ratio_max"),
    *("ref_logprob", "sampler_logprob", "mult_prob_error"),
)
METRICS: dict[str, tuple[str, ...]] = {
    "train_step": (*LOSS_METRICS, "loss", "lr", "grad_norm", "reward", "tokens"),
    # The logged loss has to be the same in every layout, and may be any.
    "sharded_update": (*LOSS_METRICS, "lr", "grad_norm", "reward", "tokens"),
    "evaluate": ("reward",),
    # Of the extremes a trainer logs the mean or the extreme of all updates.
    "rl_step": (*MEANS, "loss", "grad_norm"),
    "rollout_metrics": (
        *("reward", "reward_std", "reward_min", "reward_max", "reward/math", "length", "length_min", "length_max"),
        *("length_right", "stopped", "truncated", "aborted", "no_signal", "all_right", "none_right"),
        *("staleness", "staleness_max"),
    ),
    "merged_metrics": ("entropy", "tokens", "ratio_min", "ratio_max", "lr", "terminated"),
    "evaluation_metrics": ("mean@n", "best@k", "pass@k", "maj@n", "math/mean@n", "math/pass@k"),
    "value_loss": ("value_clip_fraction",),
    "supervised_loss": ("loss", "nll", "perplexity", "accuracy", "tokens"),
    "distillation_loss": ("loss", "divergence"),
    "preference_loss": ("loss", "chosen_reward", "rejected_reward", "reward_margin", "reward_accuracy"),
}
METRICS |= dict.fromkeys(
    ("accumulated_other_loss", "sharded_other_loss"),
    tuple(
        dict.fromkeys(
            name
            for kind in ("supervised_loss", "distillation_loss", "preference_loss", "value_loss")
            for name in METRICS[kind]
        )
    ),
)

# Tensors that a gradient flows through, and those of one number per row or, as a token's experts, in any order.
DIFFERENTIABLE = ("logits", "logprobs", "entropy", "chosen_logprobs", "rejected_logprobs")
WITHOUT_COLUMNS = ("completion_starts", "rewards", "group_ids", "policy_versions", "routes")

NEXT = "is the next one's"

Change = Callable[[Any, Any], Any]
"""Makes what the code sees instead of a value, from the value and the neighbouring record's."""


@dataclass(frozen=True)
class CapabilityMutant:
    """A capability that sees other arguments, or returns something else.

    Attributes:
        capability: the name of the capability.
        part: the changed part, such as `CollatedBatch.rewards`.
        told: the change in words, such as "is blank".
        before: changes of arguments, by name.
        after: changes the result. Its second argument calls the capability again without the last row.
    """

    capability: str
    part: str
    told: str
    before: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    after: Callable[[Any, Callable[[], Any]], Any] | None = None

    @property
    def where(self) -> str:
        return f"{Adapter.__module__}:{self.capability}"

    @property
    def diff(self) -> str:
        return f"- {self.part}\n+ {self.part} {self.told}"

    @property
    def id(self) -> str:
        return f"{self.where}\n{self.diff}"

    def planted_in(self, adapter: Adapter) -> Adapter:
        original = getattr(type(adapter), self.capability)
        signature = inspect.signature(original)

        def run(changed: Adapter, *arguments: Any, **keywords: Any) -> Any:
            bound = signature.bind(changed, *arguments, **keywords)
            bound.apply_defaults()
            given = bound.arguments
            if self.after is None:
                return original(**given | {name: change(given[name]) for name, change in self.before.items()})
            others = copy.deepcopy(list(given.values())[1:])
            return self.after(original(**given), lambda: original(changed, *map(_without_the_last_row, others)))

        return overridden(adapter, {self.capability: run})

    def reached_by(self, run: Run) -> frozenset[str]:
        return frozenset({self.capability} & run.ran.keys())


def contract_mutants(adapter: Adapter) -> Iterator[Mutant]:
    """Yield the mutants of the capabilities that the adapter's own class defines, and of the reference's conventions."""
    for capability in CAPABILITIES:
        if capability in vars(type(adapter)):
            yield from _mutants_of(capability)
    if type(adapter) is ReferenceAdapter:
        yield from pairs()


def _mutants_of(capability: str) -> Iterator[CapabilityMutant]:
    hints = get_type_hints(getattr(Adapter, capability), localns=NAMES)
    result = hints.pop("return")
    make = partial(CapabilityMutant, capability)
    for name, hint in hints.items():
        for part, told, seen in _argument_changes(capability, name, hint):
            yield make(part, told, {name: seen})
        for record, part, told, change in _field_changes(hint, capability):
            yield make(part, told, {name: partial(_with_records, record, change)})
    for record, part, told, change in _field_changes(result, capability):
        yield make(f"returned {part}", told, after=partial(_with_records, record, change))
    if result is LossOutput or result == dict[str, float]:
        for name in METRICS.get(capability, LOSS_METRICS):
            part = f"metric {name}"
            yield make(part, "is scaled", after=partial(_with_metric, name, lambda value, _: 1.1 * value))
            yield make(part, "is constant", after=partial(_with_metric, name, lambda *_: 0.5))
            if capability != "evaluate":
                yield make(part, "lacks the last row", after=partial(_with_metric, name, lambda _, other: other()))


def _argument_changes(capability: str, name: str, hint: Any) -> Iterator[tuple[str, str, Callable[[Any], Any]]]:
    """Yield the changed part of an argument, the change in words, and the change."""
    if name == "state":
        for told, change in STATE_CHANGES.get(capability, {}).items():
            yield name, told, change
    elif name == "sampling":
        for each in fields(Sampling):
            if each.name not in NOT_GIVEN:
                yield f"sampling.{each.name}", "is ignored", partial(_with_keys, {each.name: each.default})
    elif name == "messages":
        for key in ("sampled", "token_ids"):
            yield f"messages.{key}", "is ignored", partial(_without_key, key)
    else:
        for told, replacement in _value_changes(name, hint):
            # An argument has no neighbour.
            if told != NEXT:
                yield name, told, partial(_alone, replacement)


def _field_changes(hint: Any, capability: str) -> Iterator[tuple[type, str, str, Change]]:
    """Yield the changes of the fields of all records in a value of this type."""
    for record in _records_in(hint):
        hints = get_type_hints(record, localns=NAMES)
        for each in fields(record):
            if each.name not in UNREAD.get(capability, ()):
                for told, change in _value_changes(each.name, hints[each.name]):
                    if told == NEXT and record in ALONE:
                        continue
                    yield record, f"{record.__name__}.{each.name}", told, partial(_with_field, each.name, change)


def _records_in(hint: Any) -> list[type]:
    if hint in RECORDS:
        return [hint, *HOLDS.get(hint, ("", ()))[1]]
    return [record for part in get_args(hint) for record in _records_in(part)]


def _value_changes(name: str, hint: Any) -> Iterator[tuple[str, Change]]:
    """Yield what may stand in the place of a value of this name and type."""
    options = get_args(hint)
    if type(None) in options:
        yield "is None", lambda *_: None
        (hint,) = [option for option in options if option is not type(None)]
    origin = typing.get_origin(hint) or hint
    if name == "loss":
        yield "is scaled", lambda value, _: 1.1 * value
        yield "has no gradient", lambda value, _: value.detach()
    elif hint is Tensor:
        yield "is blank", lambda value, _: torch.full_like(value, value.dtype is torch.bool)
        yield "has its rows shifted", lambda value, _: value.roll(1, 0)
        if name not in WITHOUT_COLUMNS:
            yield "has its columns shifted", lambda value, _: value.roll(1, -1)
        if name in DIFFERENTIABLE:
            yield "has no gradient", lambda value, _: value.detach()
        if name == "position_ids":
            yield "counts columns", lambda value, _: torch.arange(value.shape[1]).expand_as(value)
    elif hint is float:
        yield "is 1", partial(_constant, 1.0)
    elif hint is int:
        for number in (0, 1):
            yield f"is {number}", partial(_constant, number)
    elif origin in (collections.abc.Sequence, list) and not _records_in(hint):
        yield "is shifted by one", lambda value, _: [*value[1:], *value[:1]]
        yield "lacks the last", lambda value, _: value[:-1]
        yield NEXT, lambda _, following: following
    elif origin in (str, collections.abc.Hashable, collections.abc.Callable):
        yield NEXT, lambda _, following: following


def _with_records(record: type, change: Change, value: Any, _: Any = None) -> Any:
    """Change every record of this class in a value, which may be one, a list, or hold them, given the one that follows."""
    found: list[Any] = []
    _mapped(record, found.append, value)
    following = iter([*found[1:], *found[:1]])
    return _mapped(record, lambda each: change(each, next(following)), value)


def _mapped(record: type, function: Callable[[Any], Any], value: Any) -> Any:
    """Put the results of a function in the place of every record of this class in a value."""
    if isinstance(value, record):
        return function(value)
    if isinstance(value, list | tuple):
        return [_mapped(record, function, each) for each in value]
    if isinstance(value, dict):
        return {name: _mapped(record, function, each) for name, each in value.items()}
    if type(value) in HOLDS:
        name, _held = HOLDS[type(value)]
        return replace(value, **{name: _mapped(record, function, getattr(value, name))})
    return value


def _with_field(name: str, change: Change, record: Any, following: Any) -> Any:
    value = getattr(record, name)
    return record if value is None else replace(record, **{name: change(value, getattr(following, name))})


def _with_metric(
    name: str, change: Callable[[float, Callable[[], float]], float], output: Any, shorter: Callable[[], Any]
) -> Any:
    metrics = output.metrics if isinstance(output, LossOutput) else output
    if name not in metrics:
        return output

    def other() -> float:
        found = shorter()
        return float((found.metrics if isinstance(found, LossOutput) else found)[name])

    metrics = {**metrics, name: change(metrics[name], other)}
    return replace(output, metrics=metrics) if isinstance(output, LossOutput) else metrics


def _without_the_last_row(value: Any) -> Any:
    if isinstance(value, RolloutBatch):
        return replace(value, groups=value.groups[:-1])
    if isinstance(value, list):
        return value[:-1]
    if not isinstance(value, Batch):
        return value
    rows: dict[str, Any] = {name: each[:-1] for name, each in vars(value).items() if isinstance(each, Tensor | list)}
    return replace(value, **rows)


def _constant(value: Any, *_: Any) -> Any:
    return value


def _alone(change: Change, value: Any) -> Any:
    return None if value is None else change(value, value)


def _with_keys(changes: Mapping[str, Any], sampling: Mapping[str, Any]) -> dict[str, Any]:
    return {**sampling, **changes}


def _without_key(key: str, messages: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [{name: value for name, value in message.items() if name != key} for message in messages]


class _Dropping(torch.nn.Module):
    """A model that is in training mode whenever it is called."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        self.model.train()
        return self.model(**inputs)


class _Still:
    def step(self) -> None: ...


def _state_with(name: str, change: Callable[[Any], Any], state: Any) -> Any:
    changed = copy.copy(state)
    setattr(changed, name, change(getattr(state, name)))
    return changed


STATE_CHANGES: dict[str, dict[str, Callable[[Any], Any]]] = {
    "train_step": {
        "has no ref_model": partial(_state_with, "ref_model", lambda _: None),
        "has the policy for ref_model": lambda state: _state_with("ref_model", lambda _: state.model, state),
        "has dropout in ref_model": partial(_state_with, "ref_model", lambda model: model and _Dropping(model)),
        "has a scheduler that stands still": partial(_state_with, "scheduler", lambda _: _Still()),
    },
    "evaluate": {"has only the first item": partial(_state_with, "eval_items", lambda items: items[:1])},
}
