"""Known mistakes as changes of single functions of the oracle."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlcanary import reference
from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.contract.adapter import CAPABILITIES
from rlcanary.contract.batch import LossOutput, PolicyBatch
from rlcanary.contract.conventions import Conventions

Function = Callable[..., Any]
Patches = dict[str, Function]
"""Maps a function of the oracle, as `module.function`, to what makes the mistaken one of it."""

SCORING = ("token_logprobs", "completion_logprobs", "completion_scores", "packed_logprobs")
LOSSES = frozenset({"policy_loss", "accumulated_loss", "sharded_loss", "train_step"})


def _on_batch(change: Callable[[PolicyBatch], PolicyBatch]) -> Patches:
    """Patch the loss to be computed on a changed batch."""
    return {"losses.policy_loss": lambda exact: lambda batch, conventions: exact(change(batch), conventions)}


def _on_conventions(change: Callable[[Conventions], dict[str, Any]]) -> Patches:
    """Patch the loss to be computed under changed conventions, whatever is set."""
    return {
        "losses.policy_loss": lambda exact: (
            lambda batch, conventions: exact(batch, conventions.replace(**change(conventions)))
        )
    }


def _on_mask(change: Callable[[Tensor], Tensor]) -> Patches:
    return _on_batch(lambda batch: replace(batch, mask=change(batch.mask.bool())))


def _without_last(mask_BT: Tensor) -> Tensor:
    return _without_first(mask_BT.flip(1)).flip(1)


def _without_first(mask_BT: Tensor) -> Tensor:
    return mask_BT.logical_and(mask_BT.cumsum(dim=1) != 1)


def _later(mask_BT: Tensor) -> Tensor:
    return torch.nn.functional.pad(mask_BT, (1, 0))[:, :-1]


def _earlier(mask_BT: Tensor) -> Tensor:
    return torch.nn.functional.pad(mask_BT, (0, 1))[:, 1:]


def _own_counts(batch: PolicyBatch) -> PolicyBatch:
    return replace(batch, global_tokens=None, global_sequences=None)


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


def _metrics_of_padding(exact: Function) -> Function:
    def policy_loss(batch: PolicyBatch, conventions: Conventions) -> LossOutput:
        everywhere = exact(replace(batch, mask=torch.ones_like(batch.mask)), conventions)
        return LossOutput(exact(batch, conventions).loss, everywhere.metrics)

    return policy_loss


def _whatever_side(_: Function) -> Function:
    """Clip the ratio on both sides, whatever the sign of the advantage."""

    def surrogate(_: Tensor, log_ratio_BT: Tensor, advantages_BT: Tensor, conventions: Conventions) -> Any:
        low = 0.0 if conventions.clip_low is None else 1 - conventions.clip_low
        high = torch.inf if conventions.clip_high is None else 1 + conventions.clip_high
        ratio_BT = log_ratio_BT.exp()
        held_BT = ratio_BT.clamp(low, high)
        return -held_BT * advantages_BT, (held_BT != ratio_BT) & (advantages_BT != 0)

    return surrogate


def _of_pieces(combine: Callable[[Tensor], Tensor]) -> Patches:
    """Patch the micro-batched loss to combine losses of pieces that know only their own counts."""

    def patch(exact: Function) -> Function:
        def accumulated_loss(batch: PolicyBatch, n_micro: int, conventions: Conventions) -> LossOutput:
            pieces = map(_own_counts, reference.split(batch, n_micro, conventions))
            losses = [reference.policy_loss(piece, conventions).loss for piece in pieces]
            return LossOutput(combine(torch.stack(losses)), exact(batch, n_micro, conventions).metrics)

        return accumulated_loss

    return {"losses.accumulated_loss": patch}


def _times_pieces(power: int) -> Patches:
    def patch(exact: Function) -> Function:
        def accumulated_loss(batch: PolicyBatch, n_micro: int, conventions: Conventions) -> LossOutput:
            output = exact(batch, n_micro, conventions)
            return LossOutput(output.loss * float(n_micro) ** power, output.metrics)

        return accumulated_loss

    return {"losses.accumulated_loss": patch}


def _at_temperature(change: Callable[[float], float]) -> Patches:
    """Patch all scoring to another temperature."""

    def patch(exact: Function) -> Function:
        return lambda model, batch, temperature=1.0: exact(model, batch, change(temperature))

    return {f"logprobs.{name}": patch for name in SCORING}


# Each mistake patches functions of the oracle by name.
MISTAKES: dict[str, Patches] = {
    "the padding is trained": _on_mask(torch.ones_like),
    "the mask is shifted by one: each row trains the token after": _on_mask(_later),
    "the mask is shifted by one: each row trains the token before": _on_mask(_earlier),
    "the last token of each completion is not trained": _on_mask(_without_last),
    "the first token of each completion is not trained": _on_mask(_without_first),
    "the KL has no gradient": {"kl.kl": lambda exact: lambda *given: exact(*given).detach()},
    "the logprobs of policy and reference are swapped in the KL": {
        "kl.kl": lambda exact: lambda logprobs, ref, *rest: exact(ref, logprobs, *rest)
    },
    "the ratio is detached: the policy term has no gradient": {
        "losses._log_ratio": lambda exact: lambda *given: exact(*given).detach()
    },
    "the ratio is upside down": {"losses._log_ratio": lambda exact: lambda new, old, *rest: exact(old, new, *rest)},
    "the ratio is always 1: the old logprobs are not used": _on_batch(
        lambda batch: replace(batch, old_logprobs=batch.logprobs.detach())
    ),
    "the ratio is taken against the sampler's logprobs": _on_batch(_swapped_sampler),
    "the old logprobs are one position late": _on_batch(
        lambda batch: replace(batch, old_logprobs=batch.old_logprobs.roll(1, dims=1))
    ),
    "the old logprobs are one position early": _on_batch(
        lambda batch: replace(batch, old_logprobs=batch.old_logprobs.roll(-1, dims=1))
    ),
    "the ratio is clipped on both sides whatever the sign of the advantage": {"losses._surrogate": _whatever_side},
    "the advantages have the wrong sign in the loss": _on_batch(
        lambda batch: replace(batch, advantages=-batch.advantages)
    ),
    "the sign of the advantages is lost in the loss": _on_batch(
        lambda batch: replace(batch, advantages=batch.advantages.abs())
    ),
    "the KL is subtracted from the loss": _on_conventions(lambda now: {"kl_coef": -now.kl_coef}),
    "the KL is left out of the loss": _on_conventions(lambda _: {"kl_coef": 0.0}),
    "the entropy bonus is added to the loss": _on_conventions(lambda now: {"entropy_coef": -now.entropy_coef}),
    "the entropy bonus has no gradient": _on_batch(_without_entropy_gradient),
    "the loss is divided by all positions, padding included": {"losses.aggregate": _over_all_positions},
    "the metrics count padding": {"losses.policy_loss": _metrics_of_padding},
    "each micro-batch or rank is normalised by its own counts and these are averaged": _of_pieces(Tensor.mean),
    "each micro-batch or rank is normalised by its own counts and these are summed": _of_pieces(Tensor.sum),
    "the loss is multiplied by the number of micro-batches or ranks": _times_pieces(1),
    "the loss is divided by the number of micro-batches or ranks once more": _times_pieces(-1),
    "the importance weights are upside down": {
        "losses.importance_weights": lambda exact: lambda new, sampler, *rest: exact(sampler, new, *rest)
    },
    "the advantages have the wrong sign": {"advantages.advantages": lambda exact: lambda *given: -exact(*given)},
    "the advantages are taken over the whole batch, not over groups": {
        "advantages.advantages": lambda exact: (
            lambda rewards, groups, *rest: exact(rewards, torch.zeros_like(groups), *rest)
        )
    },
    "the temperature is left out": _at_temperature(lambda _: 1.0),
    "the logits are multiplied by the temperature": _at_temperature(lambda temperature: 1 / temperature),
    "the logits are divided by the temperature twice": _at_temperature(lambda temperature: temperature**2),
    "the logprobs are one position late": {
        "logprobs.token_logprobs": lambda exact: lambda logits, ids, *rest: exact(logits.roll(1, dims=1), ids, *rest)
    },
}

CALLING = {
    "kl.kl": LOSSES | {"kl"},
    "losses.importance_weights": LOSSES | {"importance_weights"},
    "advantages.advantages": frozenset({"advantages", "train_step"}),
    "logprobs.token_logprobs": frozenset({"token_logprobs"}),
    "logprobs.completion_logprobs": frozenset({"completion_logprobs", "train_step"}),
    "logprobs.completion_scores": frozenset({"train_step"}),
    "logprobs.packed_logprobs": frozenset({"packed_logprobs"}),
    "logprobs.entropy": frozenset({"entropy"}),
    "losses.accumulated_loss": frozenset({"accumulated_loss", "sharded_loss"}),
}


def reached_by(patches: Iterable[str]) -> frozenset[str]:
    """Return the capabilities that call one of these functions of the oracle."""
    return frozenset().union(*(CALLING.get(name, LOSSES) for name in patches))


def scalings(factor: float) -> dict[str, Patches]:
    """Return the mistakes of a constant factor."""
    told = f"{factor:g} times" if factor != -1 else "minus"

    def scaled(exact: Function) -> Function:
        def call(*given: Any) -> Any:
            output = exact(*given)
            return (
                LossOutput(output.loss * factor, output.metrics) if isinstance(output, LossOutput) else output * factor
            )

        return call

    def gradient(exact: Function) -> Function:
        def call(*given: Any) -> Any:
            output = exact(*given)
            moving = factor * (output.loss - output.loss.detach())
            return LossOutput(output.loss.detach() + moving, output.metrics)

        return call

    no_gradient = "the loss has no gradient" if factor == 0 else f"the gradient of the loss is {told} the declared one"
    return {
        f"the loss is {told} the declared one": {"losses.policy_loss": scaled},
        no_gradient: {"losses.policy_loss": gradient},
        f"the loss over micro-batches or ranks is {told} the declared one": {"losses.accumulated_loss": scaled},
        f"the advantages are {told} the declared ones": {"advantages.advantages": scaled},
        f"the KL is {told} the declared one": {"kl.kl": scaled},
        f"the entropy is {told} the true one": {"logprobs.entropy": scaled},
        f"the importance weights are {told} the declared ones": {"losses.importance_weights": scaled},
        f"the logprobs are {told} the true ones": {"logprobs.token_logprobs": scaled},
    }


@contextmanager
def _patched(patches: Patches) -> Iterator[None]:
    """Replace functions of the oracle, each in all modules that have it."""
    modules = [module for name, module in sys.modules.items() if name.split(".")[:2] == ["rlcanary", "reference"]]
    changed = []
    for path, patch in patches.items():
        module, _, name = path.partition(".")
        original = getattr(sys.modules[f"rlcanary.reference.{module}"], name)
        wrapper = patch(original)
        changed += [(each, name, original, wrapper) for each in modules if getattr(each, name, None) is original]
    for place, name, _, wrapper in changed:
        setattr(place, name, wrapper)
    try:
        yield
    finally:
        for place, name, original, _ in changed:
            setattr(place, name, original)


class Mistaken(ReferenceAdapter):
    """The oracle with a mistake in its capabilities; called from elsewhere, it has none."""

    def __init__(self, conventions: Conventions, patches: Patches) -> None:
        super().__init__(conventions)
        self._patches = patches
        self._is_inside = False

    def configured(self, **changes: Any) -> Mistaken:
        return Mistaken(self.conventions.replace(**changes), self._patches)

    def __getattribute__(self, name: str) -> Any:
        attribute = super().__getattribute__(name)
        # A capability that calls another one is patched once.
        if name not in CAPABILITIES or self._is_inside:
            return attribute

        def call(*given: Any, **named: Any) -> Any:
            self._is_inside = True
            try:
                with _patched(self._patches):
                    return attribute(*given, **named)
            finally:
                self._is_inside = False

        return call
