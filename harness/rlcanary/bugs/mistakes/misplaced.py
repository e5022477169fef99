"""Mistakes that confuse, shift or fail to move tensors of a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from rlcanary.bugs.mistakes.planting import Patches, on_batch
from rlcanary.contract.batch import PolicyBatch

NOUNS = {
    "old_logprobs": "the old logprobs",
    "ref_logprobs": "the reference's logprobs",
    "sampler_logprobs": "the sampler's logprobs",
    "advantages": "the advantages",
    "mask": "the mask's rows",
    "group_ids": "the group ids",
}


def _moved(name: str, change: Callable[[Tensor], Tensor]) -> Patches:
    """Patch the loss to be computed with one tensor of the batch changed, where the batch has it."""

    def changed(batch: PolicyBatch) -> PolicyBatch:
        value = getattr(batch, name)
        changes: dict[str, Any] = {} if value is None else {name: change(value)}
        return replace(batch, **changes)

    return on_batch(changed)


def _taken_for(name: str, other: str) -> Patches:
    """Patch the loss to take one tensor of the batch for another, where the batch has both."""

    def changed(batch: PolicyBatch) -> PolicyBatch:
        mine, theirs = getattr(batch, name), getattr(batch, other)
        return batch if mine is None or theirs is None else replace(batch, **{name: theirs.detach()})

    return on_batch(changed)


def _left_behind(name: str, key: Callable[[PolicyBatch], Tensor]) -> Patches:
    """Patch the loss to sort the rows of all tensors but one."""

    def changed(batch: PolicyBatch) -> PolicyBatch:
        return replace(batch.rows(key(batch).argsort(descending=True, stable=True)), **{name: getattr(batch, name)})

    return on_batch(changed)


def _by_token(change: Callable[[Tensor, Tensor], Tensor]) -> Patches:
    """Patch the loss to be computed with other advantages, made from these and the mask."""
    return on_batch(lambda batch: replace(batch, advantages=change(batch.advantages, batch.mask.bool())))


def _whitened(values: Tensor, mask_BT: Tensor) -> Tensor:
    kept = values[mask_BT] if values.ndim == 2 else values
    return (values - kept.mean()) / (kept.std() + 1e-8) if kept.numel() > 1 else values


# Each mistake patches functions of the oracle by name.
MISPLACED: dict[str, Patches] = {
    **{
        f"{NOUNS[name]} are one position {told}": _moved(name, lambda value, by=by: value.roll(by, dims=-1))  # type: ignore[misc]
        for name in ("old_logprobs", "ref_logprobs", "sampler_logprobs")
        for told, by in (("late", 1), ("early", -1))
    },
    **{
        f"{NOUNS[name]} are those of the {told} row": _moved(name, lambda value, by=by: value.roll(by, dims=0))  # type: ignore[misc]
        for name in NOUNS
        for told, by in (("previous", 1), ("next", -1))
    },
    **{
        f"{NOUNS[name]} are in the opposite order of the rows": _moved(name, lambda value: value.flip(0))
        for name in NOUNS
    },
    **{
        f"the rows are sorted by {told}, and {NOUNS[name]} are not": _left_behind(name, key)
        for name in ("old_logprobs", "advantages", "mask")
        for told, key in (
            ("length", lambda batch: batch.mask.sum(dim=1)),
            ("advantage", lambda batch: batch.advantages.reshape(len(batch.mask), -1)[:, 0]),
        )
    },
    **{
        f"{NOUNS[name]} are taken for {NOUNS[other]}": _taken_for(other, name)
        for other in ("old_logprobs", "ref_logprobs", "sampler_logprobs")
        for name in ("old_logprobs", "ref_logprobs", "sampler_logprobs")
        if name != other and (name, other) != ("sampler_logprobs", "old_logprobs")
    },
    "the reference is the policy: the KL is 0": _taken_for("ref_logprobs", "logprobs"),
    "the policy's own logprobs are taken for the sampler's": _taken_for("sampler_logprobs", "logprobs"),
    "every completion gets the advantage of the first": _moved("advantages", lambda value: value[:1].expand_as(value)),
    "every completion gets the sum of all advantages": _moved(
        "advantages", lambda value: value.sum(dim=0, keepdim=True).expand_as(value)
    ),
    "every completion gets the mean of all advantages": _moved(
        "advantages", lambda value: value.mean(dim=0, keepdim=True).expand_as(value)
    ),
    "the advantages are squared in the loss": _moved("advantages", Tensor.square),
    "only the sign of the advantages is used": _moved("advantages", Tensor.sign),
    "negative advantages are dropped": _moved("advantages", lambda value: value.clamp(min=0)),
    "positive advantages are dropped": _moved("advantages", lambda value: value.clamp(max=0)),
    "the advantages are normalised again in the loss": _by_token(_whitened),
    "the advantages are centred again in the loss": _moved("advantages", lambda value: value - value.mean()),
    "the advantages of a row are summed over its tokens": _by_token(
        lambda values, mask_BT: (
            values.masked_fill(~mask_BT, 0).sum(dim=1, keepdim=True).expand_as(values) if values.ndim == 2 else values
        )
    ),
    "the advantages of a row are divided by its length": _by_token(
        lambda values, mask_BT: (
            values / (mask_BT.sum(dim=1, keepdim=values.ndim == 2).clamp(min=1) if len(mask_BT) else 1)
        )
    ),
}
