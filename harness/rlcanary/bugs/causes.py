"""The candidates among which a failure's cause is searched: declarations, general mistakes, factors and the museum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from itertools import combinations
from typing import Any, get_args, get_type_hints

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.bugs.mistakes import MISTAKES
from rlcanary.bugs.mistakes.factors import scalings
from rlcanary.bugs.mistakes.planting import LOSSES, Mistaken, reached_by
from rlcanary.bugs.museum import all_bugs
from rlcanary.checks.check import Check, Result
from rlcanary.checks.findings.diagnosis import SECONDS, Candidate, Diagnosis, diagnose
from rlcanary.checks.findings.grouping import factor_of
from rlcanary.contract.adapter import CAPABILITIES, Adapter
from rlcanary.contract.conventions import Conventions, choices


def causes_of(
    checks: Sequence[Check],
    results: Sequence[Result],
    adapter: Adapter,
    seed: int = 0,
    timeout: float = 0,
    seconds: float = SECONDS,
) -> Diagnosis:
    """Find the causes of the failures among the results of an adapter, as `diagnose` does."""
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
        yield Candidate(f"{words}, whatever is set", _Adjusted(declared, partial(_fixed, changes)), _reached(changes))
    yield from _settings(declared, [found.fingerprint.case for result in results for found in result.findings])
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
        elif words := choices(field.name):
            values = words
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


OTHER_SPLITS = frozenset({"accumulated_other_loss", "sharded_other_loss"})
REACHED: dict[tuple[str, ...], frozenset[str]] = {
    ("advantage_", "reward_", "singleton", "nan_"): frozenset({"advantages", "train_step", "rl_step"}),
    ("token_credit", "baseline_weighting", "whitening", "discount", "gae_lambda", "critic_lambda"): frozenset(
        {"token_advantages", "train_step", "rl_step"}
    ),
    ("value_",): frozenset({"value_loss"}) | OTHER_SPLITS,
    ("overlong_",): frozenset({"shape_rewards"}),
    ("mask_truncated",): frozenset({"make_batch", "rl_step"}),
    ("temperature", "old_logprobs", "training_", "max_grad"): frozenset({"train_step", "rl_step"}),
    ("kl_",): LOSSES | {"kl"},
    ("importance_",): LOSSES | {"importance_weights"},
    ("epochs_per_rollout", "mini_batches", "schedule_advances"): frozenset({"rl_step", "run_plan"}),
    ("logged_updates",): frozenset({"rl_step"}),
    ("logged_", "length_counts_eos", "unscored"): frozenset({"rollout_metrics", "merged_metrics"}),
    ("best_at_k", "vote_tie", "overall_score"): frozenset({"evaluation_metrics"}),
    ("pass_threshold",): frozenset({"evaluation_metrics", "rollout_metrics", "merged_metrics"}),
    ("evaluation_",): frozenset({"evaluate"}),
    ("supervised_",): frozenset({"supervised_loss", "preference_loss"}) | OTHER_SPLITS,
    ("distillation_",): frozenset({"distillation_loss"}) | OTHER_SPLITS,
    ("preference_",): frozenset({"preference_loss"}) | OTHER_SPLITS,
    ("data_order",): frozenset({"data_order", "run_plan"}),
    ("buffer_",): frozenset({"new_buffer", "put_groups", "take_groups"}),
    ("sync_",): frozenset({"sync_weights"}),
    ("answer_taken",): frozenset({"verify"}),
    ("prompt_style", "long_prompt", "equal_prompts"): frozenset({"prepare"}),
    ("decayed",): frozenset({"build"}),
}
"""The capabilities whose result depends on conventions, by the beginnings of their names; the losses on all others."""


def _reached(changes: dict[str, Any]) -> frozenset[str]:
    """Return the capabilities whose result depends on the first of these conventions."""
    name = next(iter(changes))
    found = (reached for beginnings, reached in REACHED.items() if name.startswith(beginnings))
    return next(found, LOSSES)


# Defaults of codebases, which `setting or default` puts in the place of an explicit 0 or None.
DEFAULTS: dict[str, tuple[float, ...]] = {
    "kl_coef": (0.001, 0.01, 0.04, 0.1),
    "entropy_coef": (0.001, 0.01, 0.1),
    "clip_low": (0.2,),
    "clip_high": (0.2, 0.28),
    "dual_clip": (3.0,),
    "log_ratio_clamp": (10.0, 20.0),
    "kl_output_clamp": (10.0,),
    "advantage_ddof": (1,),
    "advantage_eps": (1e-8, 1e-6, 1e-4),
    "evaluation_temperature": (1.0,),
    "max_grad_norm": (1.0,),
}


def _settings(declared: Conventions, cases: Sequence[str]) -> Iterator[Candidate]:
    """Yield settings that are ignored, computed as another value, or replaced by a default where they are 0 or None."""

    def candidate(words: str, name: str, change: Callable[[Conventions], dict[str, Any]]) -> Candidate:
        return Candidate(words, _Adjusted(declared, change), _reached({name: None}))

    for name in (field.name for field in fields(Conventions)):
        now, values = getattr(declared, name), choices(name)
        yield candidate(f"{name} is ignored: it stays {now!r}", name, partial(_fixed, {name: now}))
        for default in DEFAULTS.get(name, ()):
            words = f"{name} is {default!r} where it is set to 0 or None"
            yield candidate(words, name, partial(_defaulted, name, default))
        # The cases of checks that set an option name its value.
        for asked in (value for value in values if any(value in case for case in cases)):
            for other in values:
                if other != asked:
                    words = f"{name} {asked!r} is computed as {other!r}"
                    yield candidate(words, name, partial(_confused, name, {asked: other}))
        for one, other in combinations(values, 2):
            words = f"{name} {one!r} and {other!r} are swapped"
            yield candidate(words, name, partial(_confused, name, {one: other, other: one}))


def _fixed(changes: dict[str, Any], _: Conventions) -> dict[str, Any]:
    return changes


def _defaulted(name: str, default: float, now: Conventions) -> dict[str, Any]:
    return {name: getattr(now, name) or default}


def _confused(name: str, others: dict[str, str], now: Conventions) -> dict[str, Any]:
    return {name: others.get(getattr(now, name), getattr(now, name))}


class _Adjusted(ReferenceAdapter):
    """The oracle under conventions that are not those which are set."""

    def __init__(self, asked: Conventions, change: Callable[[Conventions], dict[str, Any]]) -> None:
        super().__init__(asked.replace(**change(asked)))
        self._asked, self._change = asked, change

    def configured(self, **changes: Any) -> _Adjusted:
        return _Adjusted(self._asked.replace(**changes), self._change)


def _factors(results: Iterable[Result]) -> list[float]:
    """Return the commonest factors by which all entries of a finding are off."""
    factors = [factor_of(found) for result in results for found in result.findings]
    seen = Counter(float(f"{factor:.3g}") for factor in factors if factor is not None)
    return [factor for factor, _ in seen.most_common(3)]
