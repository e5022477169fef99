"""The ranges of the numbers among the conventions. None, where a convention takes it, is in every range."""

import math
from collections.abc import Callable
from typing import Any

Range = tuple[Callable[[Any], bool], str]


def _all(names: tuple[str, ...], holds: Callable[[Any], bool], otherwise: str) -> dict[str, Range]:
    return dict.fromkeys(names, (holds, otherwise))


RANGES: dict[str, Range] = {
    **_all(
        ("advantage_ddof", "logged_std_ddof", "whitening_ddof"), lambda value: value in (0, 1), "is neither 0 nor 1"
    ),
    **_all(
        (
            *("aggregation_constant", "preference_beta", "sapo_temperature_positive", "sapo_temperature_negative"),
            *("overlong_buffer", "overlong_penalty", "value_coef", "temperature"),
        ),
        lambda value: 0 < value < math.inf,
        "is not positive and finite",
    ),
    **_all(
        (
            *("max_grad_norm", "reward_clip", "log_ratio_clamp", "kl_input_clamp", "kl_output_clamp"),
            *("value_clip", "importance_high"),
        ),
        lambda value: value > 0,
        "is not positive",
    ),
    **_all(
        ("advantage_eps", "kl_coef", "evaluation_temperature", "engine_tolerance", "preference_supervised_coef"),
        lambda value: 0 <= value < math.inf,
        "is not 0 or more and finite",
    ),
    **_all(("clip_low", "clip_high", "importance_low"), lambda value: value >= 0, "is not 0 or more"),
    **_all(("entropy_coef", "preference_margin", "pass_threshold", "off_policy_mask"), math.isfinite, "is not finite"),
    **_all(("epochs_per_rollout", "mini_batches"), lambda value: value >= 1, "is below 1"),
    **_all(("discount", "gae_lambda", "critic_lambda"), lambda value: 0 <= value <= 1, "does not lie between 0 and 1"),
    **_all(
        ("supervised_label_smoothing", "distillation_label_weight"), lambda value: 0 <= value < 1, "is not in [0, 1)"
    ),
    **_all(("preference_label_smoothing",), lambda value: 0 <= value < 0.5, "is not in [0, 0.5)"),
    **_all(("top_entropy",), lambda value: 0 < value <= 1, "is not in (0, 1]"),
    **_all(("dual_clip",), lambda value: value > 1, "has to be above 1: it bounds the ratio of a negative advantage"),
    **_all(
        ("distillation_beta",),
        lambda value: 0 < value < 1,
        "is not between 0 and 1: its limits are the forward and the reverse KL, which have names",
    ),
}
"""Of each number whether a value is in its range, and what to say if not."""


def out_of_range(name: str, value: Any) -> str | None:
    """Say what is wrong with the value of a convention; None if nothing is."""
    holds, otherwise = RANGES.get(name, (lambda _: True, ""))
    return None if value is None or holds(value) else f"{name}={value!r} {otherwise}"
