"""Drawn rows of a loss: every regime of its ratios, holes of tool tokens, rows without a trained token, uneven groups.

Shapes: B rows, T positions, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Generator, Tensor

from rlcanary.checks.closeness import close, tolerance
from rlcanary.checks.worlds.inputs import uniform
from rlcanary.checks.worlds.oracle import exact_update
from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.batch import PolicyBatch
from rlcanary.contract.conventions import Conventions


def whole(rng: Generator, low: int, high: int) -> int:
    """Draw a whole number from low to high, both included."""
    return int(torch.randint(low, high + 1, (), generator=rng))


def one_of(rng: Generator, choices: Sequence[Any]) -> Any:
    """Draw one of these choices."""
    return choices[whole(rng, 0, len(choices) - 1)]


def mask(rng: Generator, rows: int, width: int) -> Tensor:
    """[rows, width] bool: rows that train all, a beginning, pieces with tool tokens between them, an end, or nothing."""
    kept_BT = torch.zeros(rows, width, dtype=torch.bool)
    for row in range(rows):
        length = whole(rng, 1, width)
        kinds = {
            "all": torch.ones(width, dtype=torch.bool),
            "beginning": torch.arange(width) < length,
            "pieces": (torch.rand(width, generator=rng) < 0.6) & (torch.arange(width) < length),
            "end": torch.arange(width) >= width - length,
            "nothing": torch.zeros(width, dtype=torch.bool),
        }
        kept_BT[row] = kinds[one_of(rng, [*kinds, "pieces", "beginning"])]
    return kept_BT


def sizes(rng: Generator, size: int) -> list[int]:
    """Draw the sizes of one to four groups, which differ."""
    return [whole(rng, 1, max(2, size // 2)) for _ in range(whole(rng, 1, min(size, 4)))]


def logits(rng: Generator, size: int) -> tuple[Tensor, Tensor]:
    """[B, T, V] logits that require a gradient, flat to sharp and sometimes far from zero, and [B, T] ids."""
    shape = whole(rng, 1, size), whole(rng, 1, size), whole(rng, 2, 2 + 3 * size)
    spread, offset = one_of(rng, (0.0, 1.0, 3.0, 15.0)), one_of(rng, (0.0, 0.0, -40.0, 25.0))
    logits_BTV = uniform(rng, *shape, low=-spread, high=spread) + offset
    return logits_BTV.requires_grad_(), torch.randint(shape[-1], shape[:2], generator=rng)


def policy_batch(rng: Generator, size: int, conventions: Conventions, *, on_policy: bool = False) -> PolicyBatch:
    """Draw a batch of a loss.

    Log-ratios lie on both sides of every declared bound and clamp, some of them far out; logprobs are those of certain,
    ordinary or hardly possible tokens; advantages have both signs, are small or large, and some are zero. Batches whose loss
    hangs on the rounding of its float32 inputs, such as a ratio on a bound, are drawn again.

    Args:
        rng: the generator.
        size: the order of magnitude of rows and positions.
        conventions: the declared bounds and clamps.
        on_policy: whether all ratios are 1.
    """
    for _ in range(20):
        batch = _policy_batch(rng, size, conventions, on_policy)
        if _is_well_conditioned(rng, batch, conventions):
            return batch
    raise NotProvided("no drawn batch is far enough from every bound")


def _policy_batch(rng: Generator, size: int, conventions: Conventions, on_policy: bool) -> PolicyBatch:
    groups = sizes(rng, size)
    rows, width = sum(groups), whole(rng, 1, 2 * size)
    low, high = one_of(rng, ((-3.0, -0.5), (-3.0, -0.5), (-0.01, 0.0), (-60.0, -20.0)))
    logprobs_BT = uniform(rng, rows, width, low=low, high=high, decimals=3)
    edges = _edges(conventions)
    drift_BT, mismatch_BT, ref_BT = (_log_ratios(rng, rows, width, edges[name]) for name in ("ratio", "weight", "kl"))
    drift_BT, mismatch_BT = (each * (not on_policy) for each in (drift_BT, mismatch_BT))
    advantages_B = uniform(rng, rows, low=-1.5, high=1.5) * one_of(rng, (1.0, 1.0, 0.01, 30.0))
    advantages_B[torch.rand(rows, generator=rng) < 0.15] = 0.0
    return PolicyBatch(
        logprobs=logprobs_BT.clone().requires_grad_(),
        old_logprobs=(logprobs_BT - drift_BT).round(decimals=5),
        advantages=advantages_B,
        mask=mask(rng, rows, width),
        ref_logprobs=(logprobs_BT - ref_BT).round(decimals=5),
        sampler_logprobs=(logprobs_BT - drift_BT + mismatch_BT).round(decimals=5),
        entropy=uniform(rng, rows, width, low=0.0, high=4.0),
        group_ids=torch.arange(len(groups)).repeat_interleave(torch.tensor(groups)),
    )


def _edges(conventions: Conventions) -> dict[str, list[float]]:
    """Return the log-ratios at which a bound or clamp of the ratio, of the correction and of the KL starts to act."""
    clips = {-1: conventions.clip_low, 1: conventions.clip_high}
    ratios = [1 + sign * bound for sign, bound in clips.items() if bound is not None]
    ratios += [conventions.dual_clip] if conventions.dual_clip is not None else []
    clamp = conventions.log_ratio_clamp
    weights = (conventions.importance_low, conventions.importance_high)
    kl = [bound for bound in (conventions.kl_input_clamp, conventions.kl_output_clamp) if bound is not None]
    return {
        "ratio": [math.log(ratio) for ratio in ratios if ratio > 0] + ([clamp, -clamp] if clamp is not None else []),
        "weight": [math.log(bound) for bound in weights if bound > 0],
        "kl": [sign * bound for bound in kl for sign in (1, -1)],
    }


def _log_ratios(rng: Generator, rows: int, width: int, edges: Sequence[float]) -> Tensor:
    """[rows, width]: near zero, on either side of an edge, or far out."""
    ratios_BT = uniform(rng, rows, width, low=-0.7, high=0.7, decimals=3)
    kind_BT = torch.rand(rows, width, generator=rng)
    side_BT = one_of(rng, (0.6, 0.9, 1.1, 1.5)) * torch.ones(rows, width)
    edge_BT = torch.tensor(list(edges) or [0.0])[torch.randint(len(edges) or 1, (rows, width), generator=rng)]
    far_BT = uniform(rng, rows, width, low=-6.0, high=6.0)
    is_far = one_of(rng, (0.0, 0.0, 0.2))
    return torch.where(kind_BT < is_far, far_BT, torch.where(kind_BT > 0.6, edge_BT * side_BT, ratios_BT))


def _is_well_conditioned(rng: Generator, batch: PolicyBatch, conventions: Conventions) -> bool:
    """Tell whether roundings of the inputs change loss, gradient and clip fraction by less than a check tolerates."""
    outcomes = []
    for scale in (0.0, 1.0, 1.0, 1.0):
        moved: dict[str, Any] = {}
        for field in fields(batch):
            value_BT = getattr(batch, field.name)
            if isinstance(value_BT, Tensor) and value_BT.is_floating_point():
                noise_BT = (torch.rand(value_BT.shape, generator=rng).double() - 0.5) * 2.0**-21 * scale
                moved[field.name] = value_BT.detach().double() * (1 + noise_BT)
        output, gradient_BT = exact_update(replace(batch, **moved), conventions)
        outcomes.append((output.loss.detach(), gradient_BT, output.metrics))
    (loss, gradient_BT, metrics), *others = outcomes
    rtol, atol = tolerance(loss.float(), loss)
    gradient_atol = tolerance(gradient_BT.float(), gradient_BT)[1]
    return all(
        close(other, loss, rtol / 4, atol / 4)
        and close(other_BT, gradient_BT, rtol / 4, gradient_atol / 4)
        and (other_metrics["clip_fraction"] == metrics["clip_fraction"] or math.isnan(metrics["clip_fraction"]))
        for other, other_BT, other_metrics in others
    )
