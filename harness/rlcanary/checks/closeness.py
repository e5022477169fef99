"""Comparison of results: tolerances, closeness and deviations."""

import math
from typing import Any

import torch
from torch import Tensor


def tolerance(got: Tensor, expected: Tensor, scale: float = 1.0) -> tuple[float, float]:
    """Return relative and absolute tolerance for a result in this dtype, computed from numbers as large as `scale`.

    In float32 the relative tolerance of 1e-4 is a thousand roundings wide and well below the effect of any shipped bug
    measured so far.
    """
    roundings = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
    rounding = roundings.get(got.dtype, 0.0)
    finite = expected[expected.isfinite()] if expected.is_floating_point() else expected
    magnitude = float(finite.abs().max()) if finite.numel() else 0.0
    return max(1000 * rounding, 1e-9), 50 * rounding * max(scale, magnitude, 1e-3)


def close(got: Tensor, expected: Tensor, rtol: float, atol: float) -> bool:
    """Tell whether all entries agree; NaN agrees with NaN and infinities with themselves."""
    return torch.allclose(got.double(), expected.double(), rtol=rtol, atol=atol, equal_nan=True)


def deviation(got: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest expected number (absolute if that is 0); NaN is inf."""
    difference = (got.detach().double() - expected.double()).abs()
    if not difference.numel():
        return 0.0
    largest, size = float(difference.nan_to_num(math.inf).max()), float(expected.double().abs().max())
    return largest / size if 0 < size < math.inf else largest


def share_of_entries(got: Any, expected: Any) -> float | None:
    """Return the fraction of entries of a list that differ."""
    if not (isinstance(got, list) and isinstance(expected, list)) or len(got) != len(expected):
        return None
    return [one == other for one, other in zip(got, expected, strict=True)].count(False) / len(expected)
