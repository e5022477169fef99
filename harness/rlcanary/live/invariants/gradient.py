"""The gradient that each token's logprob receives is the one of the declared loss, scale included."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import get_args, get_type_hints

import torch
from torch import Tensor

from rlcanary import reference
from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.conventions import Conventions
from rlcanary.live.findings import Finding
from rlcanary.live.invariants.advantages import declared, rounds
from rlcanary.live.record import Record

# Conventions of the loss, whose other words are tried as an explanation.
EXPLAINS = ("aggregation", "ratio_level", "objective", "kl_estimator", "importance_level", "old_logprobs")


def judge(record: Record) -> Iterator[Finding]:
    """Compare the gradient with the declared one; without conventions judge the laws alone."""
    if record.is_rollout:
        return
    got_BT = record.gradient
    if not got_BT.isfinite().all():
        places = (~got_BT.isfinite()).nonzero()
        row, place = places[0].tolist()
        told = f"{len(places)} tokens have a gradient that is not finite, the first is token {place} of row {row}"
        yield Finding("gradient.not_finite", told, float(len(places)))
        return
    outside_BT = got_BT.masked_fill(record.mask, 0)
    size = float(got_BT.norm())
    if float(outside_BT.norm()) > 1e-6 * size and size > 0:
        row, place = divmod(int(outside_BT.abs().argmax()), got_BT.shape[1])
        count = int((outside_BT != 0).sum())
        told = f"{count} tokens outside of the mask are trained, most of all token {place} of row {row}"
        yield Finding("gradient.outside_the_mask", told, float(outside_BT.norm()) / size)
    expected_BT = expected(record)
    if expected_BT is not None:
        yield from _compared(record, got_BT.masked_fill(~record.mask, 0), expected_BT)


def expected(record: Record) -> Tensor | None:
    """Compute the gradient [B, T] of the declared loss; None where the record or the conventions lack a piece of it."""
    conventions = record.conventions
    advantages = record.advantages if record.advantages is not None else declared(record)
    if conventions is None or advantages is None or not record.declares_its_loss:
        return None
    batch = record.policy_batch(advantages)
    if batch.old_logprobs[batch.mask].isnan().any():
        return None  # The mask is the mistake, and has a finding of its own.
    with torch.enable_grad():  # a run may end its updates without
        loss = reference.policy_loss(batch, conventions).loss
        if not loss.requires_grad:
            return torch.zeros_like(record.gradient)
        (gradient_BT,) = torch.autograd.grad(loss, [batch.logprobs], allow_unused=True)
    return torch.zeros_like(record.gradient) if gradient_BT is None else gradient_BT


def _compared(record: Record, got_BT: Tensor, expected_BT: Tensor) -> Iterator[Finding]:
    near_BT = _near_a_bound(record)
    if record.advantages is None and record.rewards is not None and record.group_ids is not None:
        near_BT |= rounds(record)[:, None] & record.mask  # the run's own are not known to the last bit
    got_BT, expected_BT = got_BT.masked_fill(near_BT, 0), expected_BT.masked_fill(near_BT, 0)
    got, wanted = float(got_BT.norm()), float(expected_BT.norm())
    if max(got, wanted) < 1e-12:
        return
    if wanted < 1e-9 * got:
        yield Finding("gradient.should_be_zero", f"the declared gradient is zero, and tokens get one of {got:.3g}", got)
        return
    if got < 1e-9 * wanted:
        yield Finding("gradient.missing", "no gradient reaches the logprobs, and the declared one is not zero", 1.0)
        return
    factor, cosine = _factor(got_BT, expected_BT)
    rounding = 4 * record.eps
    if 1 - cosine > max(1e-4, rounding**2):
        off_BT = (got_BT - expected_BT).abs()
        row, place = divmod(int(off_BT.argmax()), off_BT.shape[1])
        count = int((off_BT > 0.01 * expected_BT.abs().max()).sum())
        told = (
            f"the gradient per token is not the declared one (cosine {cosine:.4f}): {count} of {int(record.mask.sum())} "
            f"tokens differ, most of all token {place} of row {row}, which gets {float(got_BT[row, place]):.4g} instead of "
            f"{float(expected_BT[row, place]):.4g}{_cause(record, got_BT, near_BT)}"
        )
        yield Finding("gradient.direction", told, 1 - cosine)
    elif abs(factor - 1) > max(1e-3, rounding):
        cause = _cause(record, got_BT, near_BT) or _counted(record, factor)
        told = f"the update is {factor:.4g} times the declared one (cosine {cosine:.4f}){cause}"
        yield Finding("gradient.scale", told, abs(factor - 1))


def _factor(got_BT: Tensor, expected_BT: Tensor) -> tuple[float, float]:
    """Return the factor that fits best, and the cosine."""
    product = float((got_BT * expected_BT).sum())
    return product / float(expected_BT.square().sum()), product / float(got_BT.norm() * expected_BT.norm())


def _near_a_bound(record: Record) -> Tensor:
    """Mark the tokens whose ratio is so near a clip bound that rounding decides on which side it is."""
    conventions = record.conventions
    assert conventions is not None
    batch = record.policy_batch(torch.zeros(len(record.mask), dtype=torch.float64))
    ratio_BT = reference.importance_ratio(batch.logprobs.detach(), batch.old_logprobs, record.mask, conventions)
    near_BT = torch.zeros_like(record.mask)
    for bound, sign in ((conventions.clip_low, -1), (conventions.clip_high, 1)):
        if bound is not None:
            near_BT |= (ratio_BT - (1 + sign * bound)).abs() < max(1e-4, 8 * record.eps)
    return near_BT & record.mask


def _unwatched(record: Record) -> list[int]:
    """List the rows with trained tokens that no micro-batch had; none where it is not known which rows they had."""
    watched = {row for rows in record.pieces for row in rows.tolist()}
    return [
        row for row, is_trained in enumerate(record.mask.any(dim=1)) if is_trained and watched and row not in watched
    ]


def _cause(record: Record, got_BT: Tensor, near_BT: Tensor) -> str:
    """Name what explains the gradient exactly: micro-batches that are averaged by themselves, or another convention.

    Where rows were never watched, nothing is known of their gradient, and they are named instead.
    """
    if rows := _unwatched(record):
        more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
        return f"; `watch` was given no logprobs of row {rows[0]}{more}"
    rounding = max(1e-3, 4 * record.eps)

    def explains(candidate_BT: Tensor | None) -> bool:
        if candidate_BT is None or float(candidate_BT.norm()) == 0:
            return False
        factor, cosine = _factor(got_BT, candidate_BT.masked_fill(near_BT, 0))
        return abs(factor - 1) < rounding and 1 - cosine < max(1e-5, rounding**2)

    if len(record.pieces) > 1 and explains(_mean_of_pieces(record)):
        return (
            f": it is the mean of the losses of {len(record.pieces)} micro-batches, each averaged over its own tokens"
        )
    assert record.conventions is not None
    for name, other in _neighbours(record.conventions):
        try:
            candidate_BT = expected(record.under(**{name: other}))
        except (ValueError, NotProvided):
            continue  # It asks for logprobs that the run does not have, or for other counts.
        if explains(candidate_BT):
            return f": it is that of {name}={other!r}, and {getattr(record.conventions, name)!r} is declared"
    return ""


def _counted(record: Record, factor: float) -> str:
    """Name what is counted in an update and has this factor as its share or its number."""
    counts = {"micro-batches": len(record.pieces), "rows": len(record.mask), "tokens": int(record.mask.sum())}
    if record.group_ids is not None:
        counts["groups"] = len(record.group_ids.unique())
        counts["rows of a group"] = len(record.mask) // counts["groups"]
    factors = {
        float(
            record.mask.double().mean()
        ): "the share of the trained tokens among all columns: it averages over padding"
    }
    for name, count in counts.items():
        factors.setdefault(float(count), f"the number of {name}")
        factors.setdefault(1 / max(1, count), f"1 / {count}, the number of {name}")
    for value, told in factors.items():
        if value not in (0, 1) and abs(factor / value - 1) < max(1e-3, 4 * record.eps):
            return f", which is {told}"
    return ""


def _mean_of_pieces(record: Record) -> Tensor | None:
    """Compute the gradient of the mean of the losses of the micro-batches, each as if it were the whole update."""
    total_BT = torch.zeros_like(record.gradient)
    whole = replace(record, advantages=declared(record) if record.advantages is None else record.advantages)
    for rows in record.pieces:
        piece_BT = expected(whole.rows(rows))
        if piece_BT is None:
            return None
        total_BT[rows] += piece_BT / len(record.pieces)
    return total_BT


def _neighbours(conventions: Conventions) -> Iterator[tuple[str, str]]:
    hints = get_type_hints(Conventions)
    for name in EXPLAINS:
        for other in _literals(hints[name]):
            if other not in ("custom", getattr(conventions, name)):
                yield name, other


def _literals(hint: object) -> list[str]:
    """List the words of a field, which may be a union with a function."""
    found: list[str] = []
    for part in get_args(hint):
        found += [part] if isinstance(part, str) else _literals(part)
    return found
