"""Mistakes in losses and metrics over micro-batches or ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from rlcanary import reference
from rlcanary.bugs.mistakes.planting import Function, Patches
from rlcanary.contract.batch import LossOutput, PolicyBatch
from rlcanary.contract.conventions import Conventions


def _own_counts(batch: PolicyBatch) -> PolicyBatch:
    return replace(batch, global_tokens=None, global_sequences=None)


def _of_pieces(combine: Callable[[Tensor], Tensor]) -> Patches:
    """Patch the micro-batched loss to combine losses of pieces that know only their own counts."""

    def patch(exact: Function) -> Function:
        def accumulated_loss(batch: PolicyBatch, n_micro: int, conventions: Conventions) -> LossOutput:
            pieces = map(_own_counts, reference.split(batch, n_micro, conventions))
            losses = [reference.policy_loss(piece, conventions).loss for piece in pieces]
            return LossOutput(combine(torch.stack(losses)), exact(batch, n_micro, conventions).metrics)

        return accumulated_loss

    return {"losses.accumulated_loss": patch}


def _in_pieces(logged: Callable[[list[LossOutput], LossOutput], dict[str, float]]) -> Patches:
    """Patch the metrics of the micro-batched loss to be made from the metrics of its pieces."""

    def patch(exact: Function) -> Function:
        def accumulated_loss(batch: PolicyBatch, n_micro: int, conventions: Conventions) -> LossOutput:
            pieces = map(_own_counts, reference.split(batch, n_micro, conventions))
            whole = exact(batch, n_micro, conventions)
            outputs = [reference.policy_loss(piece, conventions) for piece in pieces]
            return LossOutput(whole.loss, logged(outputs, whole))

        return accumulated_loss

    return {"losses.accumulated_loss": patch}


def _weighted_by_rows(exact: Function) -> Function:
    """Weight the token mean of each piece by its share of the rows."""

    def accumulated_loss(batch: PolicyBatch, n_micro: int, conventions: Conventions) -> LossOutput:
        pieces = reference.split(batch, n_micro, conventions)
        losses = [
            reference.policy_loss(_own_counts(piece), conventions).loss * len(piece.mask) / len(batch.mask)
            for piece in pieces
        ]
        return LossOutput(torch.stack(losses).sum(), exact(batch, n_micro, conventions).metrics)

    return accumulated_loss


def _without_empty_pieces(exact: Function) -> Function:
    """Divide by the number of pieces that train a token."""

    def accumulated_loss(batch: PolicyBatch, n_micro: int, conventions: Conventions) -> LossOutput:
        pieces = reference.split(batch, n_micro, conventions)
        real = sum(bool(piece.mask.any()) for piece in pieces)
        output = exact(batch, n_micro, conventions)
        return LossOutput(output.loss * len(pieces) / max(real, 1), output.metrics)

    return accumulated_loss


def _gradient_of(pieces_of: Callable[[list[Tensor], int], Tensor]) -> Patches:
    """Patch the gradient of the micro-batched loss alone; the value stays."""

    def patch(exact: Function) -> Function:
        def accumulated_loss(batch: PolicyBatch, n_micro: int, conventions: Conventions) -> LossOutput:
            output = exact(batch, n_micro, conventions)
            pieces = reference.split(batch, n_micro, conventions)
            moving = pieces_of([reference.policy_loss(piece, conventions).loss for piece in pieces], n_micro)
            return LossOutput(moving + (output.loss - moving).detach(), output.metrics)

        return accumulated_loss

    return {"losses.accumulated_loss": patch}


def _times_pieces(power: int) -> Patches:
    return _rescaled(lambda _, n: float(n) ** power)


def _rescaled(factor: Callable[[PolicyBatch, int], float]) -> Patches:
    """Patch the micro-batched loss to be multiplied by a factor, made from the batch and the number of pieces."""

    def patch(exact: Function) -> Function:
        def accumulated_loss(batch: PolicyBatch, n_micro: int, conventions: Conventions) -> LossOutput:
            output = exact(batch, n_micro, conventions)
            return LossOutput(output.loss * factor(batch, n_micro), output.metrics)

        return accumulated_loss

    return {"losses.accumulated_loss": patch}


# Each mistake patches functions of the oracle by name.
SPLIT_MISTAKES: dict[str, Patches] = {
    "each micro-batch or rank is normalised by its own counts and these are averaged": _of_pieces(Tensor.mean),
    "each micro-batch or rank is normalised by its own counts and these are summed": _of_pieces(Tensor.sum),
    "the loss is multiplied by the number of micro-batches or ranks": _times_pieces(1),
    "the loss is divided by the number of micro-batches or ranks once more": _times_pieces(-1),
    "each piece's token mean is weighted by its rows": {"losses.accumulated_loss": _weighted_by_rows},
    "micro-batches or ranks without a trained token are not counted": {
        "losses.accumulated_loss": _without_empty_pieces
    },
    "the loss is divided by the number of rows, and multiplied by that of pieces": _rescaled(
        lambda batch, n: n / len(batch.mask)
    ),
    "the gradient, not the loss, is multiplied by the number of micro-batches or ranks": _gradient_of(
        lambda losses, n: torch.stack(losses).sum() * n
    ),
    "the gradient, not the loss, is divided by the number of micro-batches or ranks": _gradient_of(
        lambda losses, n: torch.stack(losses).sum() / n
    ),
    "only the first micro-batch or rank has a gradient": _gradient_of(lambda losses, _: losses[0]),
    "only the last micro-batch or rank has a gradient": _gradient_of(lambda losses, _: losses[-1]),
    "the last micro-batch or rank has no gradient": _gradient_of(
        lambda losses, _: torch.stack(losses[:-1] or losses).sum()
    ),
    "metrics are means of the pieces' means": _in_pieces(
        lambda outputs, _: {name: sum(o.metrics[name] for o in outputs) / len(outputs) for name in outputs[0].metrics}
    ),
    "metrics are sums over the pieces": _in_pieces(
        lambda outputs, _: {name: sum(o.metrics[name] for o in outputs) for name in outputs[0].metrics}
    ),
    "metrics are those of the first piece": _in_pieces(lambda outputs, _: outputs[0].metrics),
    "metrics are those of the last piece": _in_pieces(lambda outputs, _: outputs[-1].metrics),
    "the smallest and the largest ratio are averaged over the pieces": _in_pieces(
        lambda outputs, whole: {
            **whole.metrics,
            **{name: sum(o.metrics[name] for o in outputs) / len(outputs) for name in ("ratio_min", "ratio_max")},
        }
    ),
    "the smallest and the largest ratio are divided by the number of pieces": _in_pieces(
        lambda outputs, whole: {
            **whole.metrics,
            **{name: whole.metrics[name] / len(outputs) for name in ("ratio_min", "ratio_max")},
        }
    ),
}
