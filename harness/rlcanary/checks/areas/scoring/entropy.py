"""Entropy: the value that dashboards watch for collapse, and the gradient of its bonus."""

from collections.abc import Iterator

import torch
from torch import Generator, Tensor

from rlcanary.checks.asserts import assert_close, gradient, soft
from rlcanary.checks.case import Case
from rlcanary.checks.check import check
from rlcanary.checks.worlds import inputs, rows
from rlcanary.contract.adapter import Adapter


def exact_entropy(logits_BTV: Tensor) -> Tensor:
    """Compute -Σ p log p over the last axis in float64."""
    log_softmax_BTV = logits_BTV.double().log_softmax(dim=-1)
    return -(log_softmax_BTV.exp() * log_softmax_BTV).sum(dim=-1)


def _logits(rng: Generator) -> Iterator[Case]:
    for shape in ((1, 1, 2), (2, 2, 3), (2, 3, 7), (1, 300, 3), (70, 1, 3), (1, 1, 2000)):
        yield Case(shape, logits_BTV=inputs.logits(rng, *shape))


def _drawn(rng: Generator, size: int) -> Case:
    logits_BTV, _ = rows.logits(rng, size)
    return Case(logits_BTV=logits_BTV, scale=max(1.0, float(logits_BTV.detach().abs().max())))


@check("entropy.is_shannon_entropy", needs=("entropy",), cases=_logits, draws=_drawn)
def is_shannon_entropy(adapter: Adapter, logits_BTV: Tensor, scale: float = 1.0) -> None:
    """The entropy is -Σ p log p over the vocabulary in nats, in value and in gradient.

    Silent because a flat curve at zero, or the wrong unit, goes unnoticed until the policy has collapsed. Look for a
    placeholder of zeros, log2, and a mean where the sum over the vocabulary belongs.
    """
    entropy_BT, exact_BT = adapter.entropy(logits_BTV.clone()), exact_entropy(logits_BTV)
    with soft():
        assert_close(entropy_BT, exact_BT, "entropy differs from -Σ p log p", scale=scale)
    if entropy_BT.requires_grad:
        wanted_BTV = gradient(exact_BT, logits_BTV)
        told = "the gradient of the entropy is not -p (log p + H)"
        assert_close(gradient(entropy_BT, logits_BTV), wanted_BTV, told, scale=scale, quantity="gradient")


def _filtered(rng: Generator) -> Iterator[Case]:
    logits_BTV = inputs.logits(rng, 2, 2, 5).detach()
    logits_BTV[..., 3:] = -torch.inf
    yield Case(logits_BTV=logits_BTV)


@check("entropy.filtered_logits", severity="dashboard", needs=("entropy",), cases=_filtered)
def filtered_logits(adapter: Adapter, logits_BTV: Tensor) -> None:
    """Logits at -inf, as after a top-k filter, contribute nothing: the entropy is that of the kept entries.

    Silent because the NaN of 0 × -inf reaches only the dashboard, or is averaged away. Look for `p * log p` without a
    guard at p = 0.
    """
    kept_BT = exact_entropy(logits_BTV[..., :3])
    assert_close(adapter.entropy(logits_BTV), kept_BT, "the entropy of a row with entries at -inf is wrong")
