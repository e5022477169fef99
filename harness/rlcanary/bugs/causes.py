"""The candidates among which a failure's cause is searched: declarations, general mistakes, factors and the museum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any, get_args, get_type_hints

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.bugs.mistakes import LOSSES, MISTAKES, Mistaken, reached_by, scalings
from rlcanary.bugs.museum import all_bugs
from rlcanary.checks.check import Check, Result
from rlcanary.checks.diagnosis import SECONDS, Candidate, Cause, diagnose
from rlcanary.contract.adapter import CAPABILITIES, Adapter
from rlcanary.contract.conventions import Conventions


def causes_of(
    checks: Sequence[Check],
    results: Sequence[Result],
    adapter: Adapter,
    seed: int = 0,
    timeout: float = 0,
    seconds: float = SECONDS,
) -> list[Cause]:
    """Find the causes of the failures among the results of an adapter, as `rlcanary.checks.diagnosis.diagnose` does."""
    declared = adapter.conventions
    found = candidates(declared, results, but=adapter.name)
    oracle = ReferenceAdapter(declared)
    return diagnose(checks, results, declared, oracle, found, seed=seed, timeout=timeout, seconds=seconds)


def candidates(declared: Conventions, results: Iterable[Result], but: str = "") -> Iterator[Candidate]:
    """Yield the possible causes under some conventions, the likelier ones first.

    Args:
        declared: the conventions of the code under test.
        results: its results, whose numbers say by which factors it may be off.
        but: the id of a bug of the museum that is left out, since it is the code under test.
    """
    others = list(_other_declarations(declared))
    for words, changes in others:
        yield Candidate(
            f"{words}: if you mean that, declare it", ReferenceAdapter(declared.replace(**changes)), _reached(changes)
        )
    for words, patches in MISTAKES.items():
        yield Candidate(words, Mistaken(declared, patches), reached_by(patches))
    for factor in _factors(results):
        for words, patches in scalings(factor).items():
            yield Candidate(words, Mistaken(declared, patches), reached_by(patches))
    for words, changes in others:
        yield Candidate(f"{words}, whatever is set", _Fixed(declared, changes), _reached(changes))
    for bug in all_bugs():
        if bug.id != but:
            changed = frozenset(
                name for name in CAPABILITIES if getattr(bug, name) is not getattr(ReferenceAdapter, name)
            )
            yield Candidate(f"{bug.effect} (like {bug.id})", bug(declared), changed or frozenset(CAPABILITIES))


# Plain words for declarations that switch something off; others are told by name and value.
LEFT_OUT = {
    ("advantage_scale", "none"): "the advantages are not normalised",
    ("advantage_baseline", "none"): "no baseline is subtracted from the rewards",
    ("reward_clip", None): "the rewards are not clipped",
    ("clip_low", None): "the ratio is not clipped below",
    ("clip_high", None): "the ratio is not clipped above",
    ("dual_clip", None): "the dual clip is left out",
    ("log_ratio_clamp", None): "the log-ratio is not clamped",
    ("kl_coef", 0.0): "the KL is left out",
    ("kl_input_clamp", None): "the KL's log-ratio is not clamped",
    ("kl_output_clamp", None): "the KL's estimate is not clamped",
    ("entropy_coef", 0.0): "the entropy bonus is left out",
    ("temperature", 1.0): "the temperature is left out",
    ("max_grad_norm", None): "the gradient is not clipped",
    ("importance_level", "none"): "the correction for the sampler is left out",
}
OTHER_NUMBERS: dict[str, tuple[float, ...]] = {
    "advantage_ddof": (0, 1),
    "advantage_eps": (0.0, 1e-4, 1e-6, 1e-8),
    "kl_coef": (0.0,),
    "entropy_coef": (0.0,),
    "temperature": (1.0,),
    "aggregation_constant": (1.0,),
}


def _other_declarations(declared: Conventions) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each neighbour of the declared conventions in words and as changes."""
    hints = get_type_hints(Conventions)
    for field in fields(Conventions):
        now = getattr(declared, field.name)
        allowed = get_args(hints[field.name])
        if hints[field.name] is bool:
            values: Iterable[Any] = (not now,)
        elif allowed and isinstance(allowed[0], str):
            values = allowed
        else:
            values = (*OTHER_NUMBERS.get(field.name, ()), *((None,) if type(None) in allowed else ()))
        for value in values:
            if value != now and _is_possible(declared, {field.name: value}):
                told = f"{field.name} is {value!r}, where {now!r} is declared"
                yield LEFT_OUT.get((field.name, value), told), {field.name: value}
    low, high = declared.clip_low, declared.clip_high
    if low != high:
        yield "the two clipping bounds are swapped", {"clip_low": high, "clip_high": low}
        yield "the lower clipping bound is used on both sides", {"clip_high": low}
        yield "the upper clipping bound is used on both sides", {"clip_low": high}
    if low is not None and high is not None:
        yield "the ratio is not clipped", {"clip_low": None, "clip_high": None}


def _is_possible(declared: Conventions, changes: dict[str, Any]) -> bool:
    try:
        declared.replace(**changes)
    except ValueError:
        return False
    return True


def _reached(changes: dict[str, Any]) -> frozenset[str]:
    """Return the capabilities whose result depends on the first of these conventions."""
    name = next(iter(changes))
    if name.startswith(("advantage_", "reward_", "singleton", "nan_")):
        return frozenset({"advantages", "train_step"})
    if name.startswith(("temperature", "old_logprobs", "training_", "max_grad")):
        return frozenset({"train_step"})
    if name.startswith("kl_"):
        return LOSSES | {"kl"}
    if name.startswith("importance_"):
        return LOSSES | {"importance_weights"}
    if name.startswith("evaluation_"):
        return frozenset({"evaluate"})
    if name == "data_order":
        return frozenset({"data_order"})
    return LOSSES


class _Fixed(ReferenceAdapter):
    """The oracle under conventions of which some cannot be set."""

    def __init__(self, conventions: Conventions, fixed: dict[str, Any]) -> None:
        super().__init__(conventions.replace(**fixed))
        self._declared, self._fixed = conventions, fixed

    def configured(self, **changes: Any) -> _Fixed:
        return _Fixed(self._declared.replace(**changes), self._fixed)


def _factors(results: Iterable[Result]) -> list[float]:
    """Return the commonest factors by which all entries of a finding are off."""
    seen: Counter[float] = Counter()
    for found in (found for result in results for found in result.findings):
        if found.compared is None or found.compared[0].shape != found.compared[1].shape:
            continue
        got, expected = (each.double() for each in found.compared)
        ratios = (got / expected)[expected != 0]
        if ratios.numel() and ratios.isfinite().all():
            factor = float(ratios.median())
            if bool(((ratios - factor).abs() <= 1e-3 * abs(factor)).all()) and abs(factor - 1) > 1e-3:
                seen[float(f"{factor:.3g}")] += 1
    return [factor for factor, _ in seen.most_common(3)]
