"""Answers in mathematics: `rlcanary.grpo.rewards.math`, in processes with a time limit."""

import functools

from rlcanary.grpo.rewards import math as ours
from rlcanary.grpo.rewards.by_name import VerifiersByName
from rlcanary.grpo.rewards.numbers import number, numbers
from rlcanary.grpo.rewards.verifier import judge
from rlvr_experiments.verifiers import Judged


@functools.cache
def pool(workers, timeout_s):
    """Start the workers, once for each size and limit."""
    return VerifiersByName(workers=workers, timeout_s=timeout_s)["math"]


class MathVerifier(Judged):
    """Compares expressions. A worker is always warm."""

    def __init__(self, timeout=5.0, max_workers=4, warmup=True):
        if not warmup:
            raise ValueError("warmup=False: a worker warms up before its first call")
        super().__init__(pool(max_workers, timeout), "answer")


def _verify_single(response, target, fallback_extraction=True):
    if not fallback_extraction:
        raise ValueError(
            "fallback_extraction=False: the last number is always looked for where there is no other answer"
        )
    return judge(ours.MathVerifier(), response, target).value or 0.0


def _extract_last_number(text):
    found = numbers(text)
    return str(found[-1]) if found else None


def _normalize_number(text):
    value = number(text)
    return None if value is None else f"{value.normalize():f}"
