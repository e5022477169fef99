"""Mistakes in the policy loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlcanary.bugs.mistakes.planting import Function, Patches, on_batch
from rlcanary.contract.batch import LossOutput, PolicyBatch
from rlcanary.contract.conventions import Conventions


def _on_conventions(change: Callable[[Conventions], dict[str, Any]]) -> Patches:
    """Patch the loss to be computed under changed conventions, whatever is set."""
    return {
        "losses.policy_loss": lambda exact: (
            lambda batch, conventions, *rest: exact(batch, conventions.replace(**change(conventions)), *rest)
        )
    }


def _kl_subtracted(
    exact: Callable[..., LossOutput], batch: PolicyBatch, conventions: Conventions, *rest: Any
) -> LossOutput:
    output, without = exact(batch, conventions, *rest), exact(batch, conventions.replace(kl_coef=0.0), *rest)
    return LossOutput(2 * without.loss - output.loss, output.metrics)


def _on_mask(change: Callable[[Tensor], Tensor]) -> Patches:
    return on_batch(lambda batch: replace(batch, mask=change(batch.mask.bool())))


def _on_labels(change: Callable[[Tensor], Tensor]) -> Patches:
    """Patch the supervised loss to be computed with another mask."""
    return {
        "supervised.supervised_loss": lambda exact: (
            lambda batch, *rest: exact(replace(batch, mask=change(batch.mask.bool())), *rest)
        )
    }


def _without_last(mask_BT: Tensor) -> Tensor:
    return _without_first(mask_BT.flip(1)).flip(1)


def _without_first(mask_BT: Tensor) -> Tensor:
    return mask_BT.logical_and(mask_BT.cumsum(dim=1) != 1)


def _later(mask_BT: Tensor) -> Tensor:
    return torch.nn.functional.pad(mask_BT, (1, 0))[:, :-1]


def _earlier(mask_BT: Tensor) -> Tensor:
    return torch.nn.functional.pad(mask_BT, (0, 1))[:, 1:]


def _swapped_sampler(batch: PolicyBatch) -> PolicyBatch:
    return batch if batch.sampler_logprobs is None else replace(batch, old_logprobs=batch.sampler_logprobs)


def _without_entropy_gradient(batch: PolicyBatch) -> PolicyBatch:
    return batch if batch.entropy is None else replace(batch, entropy=batch.entropy.detach())


def _over_all_positions(exact: Function) -> Function:
    def aggregate(values_BT: Tensor, batch: PolicyBatch, conventions: Conventions) -> Tensor:
        kept_BT = values_BT.masked_fill(~batch.mask.bool(), 0)
        total: Tensor = exact(kept_BT, replace(batch, mask=torch.ones_like(batch.mask)), conventions)
        return total

    return aggregate


def _nothing_over_nothing(pick: Callable[[Tensor], Tensor]) -> Patches:
    """Patch the loss to divide the picked rows without a trained token by the number of their tokens, which is 0."""

    def patch(exact: Function) -> Function:
        def policy_loss(batch: PolicyBatch, *rest: Any) -> LossOutput:
            output: LossOutput = exact(batch, *rest)
            mask_BT = batch.mask.bool()
            picked_B = pick(mask_BT.any(dim=1))
            if not picked_B.any():
                return output
            nothing = (batch.logprobs * mask_BT)[picked_B].sum() / mask_BT[picked_B].sum()
            return replace(output, loss=output.loss + nothing)

        return policy_loss

    return {"losses.policy_loss": patch}


def _metrics_of_padding(exact: Function) -> Function:
    def policy_loss(batch: PolicyBatch, *rest: Any) -> LossOutput:
        everywhere = exact(replace(batch, mask=torch.ones_like(batch.mask)), *rest)
        return LossOutput(exact(batch, *rest).loss, everywhere.metrics)

    return policy_loss


def _whatever_side(exact: Function) -> Function:
    """Clip the ratio on both sides, whatever the sign of the advantage."""

    def surrogate(
        logprobs_BT: Tensor, log_ratio_BT: Tensor, advantages_BT: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor]:
        _, (low_BT, high_BT), _ = rest
        held_BT = log_ratio_BT.clamp(low_BT, high_BT)
        loss_BT: Tensor = exact(logprobs_BT, held_BT, advantages_BT, *rest)[0]
        return loss_BT, (held_BT != log_ratio_BT) & (advantages_BT != 0)

    return surrogate


def _dual_clip_of_any_sign(exact: Function) -> Function:
    """Bound the loss by the dual clip at a positive advantage too: the bound is below any loss, and no gradient is left."""

    def surrogate(*given: Any) -> tuple[Tensor, Tensor]:
        loss_BT, is_clipped_BT = exact(*given)
        advantages_BT, conventions = given[2], given[-1]
        if conventions.dual_clip is not None and conventions.objective == "clip":
            loss_BT = torch.minimum(loss_BT, -conventions.dual_clip * advantages_BT)
        return loss_BT, is_clipped_BT

    return surrogate


def _mean_one(weights_BT: Tensor, mask_BT: Tensor) -> Tensor:
    kept = weights_BT[mask_BT.bool()]
    return weights_BT / kept.mean() if kept.numel() and kept.mean() > 0 else weights_BT


# Each mistake patches functions of the oracle by name.
OBJECTIVE_MISTAKES: dict[str, Patches] = {
    "the padding is trained": _on_mask(torch.ones_like),
    "the mask is shifted by one: each row trains the token after": _on_mask(_later),
    "the mask is shifted by one: each row trains the token before": _on_mask(_earlier),
    "the last token of each completion is not trained": _on_mask(_without_last),
    "the first token of each completion is not trained": _on_mask(_without_first),
    "the mask of the labels is one token late": _on_labels(_later),
    "the mask of the labels is one token early": _on_labels(_earlier),
    "everything is trained as labels, prompts and padding included": _on_labels(torch.ones_like),
    "the KL has no gradient": {"kl.kl": lambda exact: lambda *given: exact(*given).detach()},
    "the logprobs of policy and reference are swapped in the KL": {
        "kl.kl": lambda exact: lambda logprobs, ref, *rest: exact(ref, logprobs, *rest)
    },
    "the ratio is detached: the policy term has no gradient": {
        "losses._log_ratio": lambda exact: lambda *given: exact(*given).detach()
    },
    "the ratio is upside down": {"losses._log_ratio": lambda exact: lambda new, old, *rest: exact(old, new, *rest)},
    "the ratio is always 1: the old logprobs are not used": on_batch(
        lambda batch: replace(batch, old_logprobs=batch.logprobs.detach())
    ),
    "the ratio is taken against the sampler's logprobs": on_batch(_swapped_sampler),
    "the ratio is clipped on both sides whatever the sign of the advantage": {"losses._surrogate": _whatever_side},
    "the dual clip bounds the loss at a positive advantage too": {"losses._surrogate": _dual_clip_of_any_sign},
    "the advantages have the wrong sign in the loss": on_batch(
        lambda batch: replace(batch, advantages=-batch.advantages)
    ),
    "the sign of the advantages is lost in the loss": on_batch(
        lambda batch: replace(batch, advantages=batch.advantages.abs())
    ),
    "the KL is subtracted from the loss": {"losses.policy_loss": lambda exact: partial(_kl_subtracted, exact)},
    "the KL is left out of the loss": _on_conventions(lambda _: {"kl_coef": 0.0}),
    "the entropy bonus is added to the loss": _on_conventions(lambda now: {"entropy_coef": -now.entropy_coef}),
    "the entropy bonus has no gradient": on_batch(_without_entropy_gradient),
    "the entropy bonus is left out of the loss": _on_conventions(lambda _: {"entropy_coef": 0.0}),
    "the KL is counted twice": _on_conventions(lambda now: {"kl_coef": 2 * now.kl_coef}),
    "the correction for the sampler is applied twice": {
        "losses.importance_weights": lambda exact: lambda *given: exact(*given).square()
    },
    "the correction for the sampler is normalised to mean 1": {
        "losses.importance_weights": lambda exact: lambda *given: _mean_one(exact(*given), given[2])
    },
    "the correction for the sampler carries a gradient": {
        "losses.importance_weights": lambda exact: lambda new, *rest: exact(new, *rest) * (new - new.detach()).exp()
    },
    "the ratio is squared": {"losses._log_ratio": lambda exact: lambda *given: 2 * exact(*given)},
    "the ratio is approximated by 1 plus its logarithm": {
        "losses._log_ratio": lambda exact: lambda *given: exact(*given).clamp(min=-0.999).log1p()
    },
    "the loss is divided by all positions, padding included": {"losses.aggregate": _over_all_positions},
    "a row without a trained token is divided by its 0 tokens: the loss is NaN": _nothing_over_nothing(
        torch.logical_not
    ),
    "a batch without a trained token is divided by its 0 tokens: the loss is NaN": _nothing_over_nothing(
        lambda is_trained_B: ~is_trained_B.any().expand_as(is_trained_B)
    ),
    "the metrics count padding": {"losses.policy_loss": _metrics_of_padding},
    "the importance weights are upside down": {
        "losses.importance_weights": lambda exact: lambda new, sampler, *rest: exact(sampler, new, *rest)
    },
}
