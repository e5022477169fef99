"""The algorithms of papers as configurations of an adapter."""

from __future__ import annotations

from dataclasses import fields

from rlcanary.contract.adapter import Adapter, NotProvided
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.presets import CREDIT_PAPERS, GRPO, PAPERS

ALGORITHMS = PAPERS | CREDIT_PAPERS

WORDS = (
    *("objective", "ratio_level", "aggregation"),
    *("advantage_baseline", "advantage_scale", "token_credit", "whitening"),
)
"""The conventions that make an algorithm, besides those in which it differs from GRPO."""


def under(adapter: Adapter, wanted: Conventions) -> Adapter:
    """Return an adapter of the same codebase under an algorithm.

    It has the algorithm if it takes `WORDS` and all conventions in which the paper differs from GRPO; the rest are its own.
    A clip that the paper has not stays as the codebase has it: it holds nothing where the policy that sampled is the one in
    training.

    Raises:
        NotProvided: the codebase has no such setting.
    """
    differs = [
        each.name
        for each in fields(Conventions)
        if getattr(wanted, each.name) != getattr(GRPO, each.name)
        and not (each.name in ("clip_low", "clip_high") and getattr(wanted, each.name) is None)
    ]
    changes = {word: getattr(wanted, word) for word in (*WORDS, *differs)}
    return adapter.configured(
        **{word: value for word, value in changes.items() if getattr(adapter.conventions, word) != value}
    )


def algorithms_of(adapter: Adapter) -> dict[str, Adapter]:
    """Return the adapter as it is ("default"), and under each algorithm that it has settings for."""
    found = {"default": adapter}
    for name, wanted in ALGORITHMS.items():
        try:
            found[name] = under(adapter, wanted)
        except NotProvided:
            continue
    return found
