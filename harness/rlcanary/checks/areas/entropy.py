"""Entropy: the value that dashboards watch for collapse, and the gradient of its bonus."""

import torch
from torch import Generator, Tensor

from rlcanary.checks.check import check
from rlcanary.checks.subject import Subject
from rlcanary.checks.worlds import inputs as cases


def _exact(logits_BTV: Tensor) -> Tensor:
    log_softmax_BTV = logits_BTV.double().log_softmax(dim=-1)
    return -(log_softmax_BTV.exp() * log_softmax_BTV).sum(dim=-1)


@check("entropy.is_shannon_entropy", needs=("entropy",))
def is_shannon_entropy(subject: Subject, rng: Generator) -> None:
    """The entropy is -Σ p log p over the vocabulary in nats, in value and in gradient.

    Silent because a flat curve at zero, or the wrong unit, goes unnoticed until the policy has collapsed. Look for a
    placeholder of zeros, log2, and a mean where the sum over the vocabulary belongs.
    """
    for shape in ((1, 1, 2), (2, 2, 3), (2, 3, 7)):
        with subject.case(shape):
            logits_BTV = cases.logits(rng, *shape)
            call = subject.call("entropy", logits_BTV)
            call.expect(_exact(logits_BTV.detach()), "entropy differs from -Σ p log p")
            if call.output.requires_grad:
                leaf_BTV = logits_BTV.detach().double().requires_grad_()
                (gradient,) = torch.autograd.grad(_exact(leaf_BTV).sum(), leaf_BTV)
                call.expect_gradient(gradient, "the gradient of the entropy is not -p (log p + H)")


@check("entropy.filtered_logits", needs=("entropy",))
def filtered_logits(subject: Subject, rng: Generator) -> None:
    """Logits at -inf, as after a top-k filter, contribute nothing: the entropy is that of the kept entries.

    Silent because the NaN of 0 × -inf reaches only the dashboard, or is averaged away. Look for `p * log p` without a
    guard at p = 0.
    """
    logits_BTV = cases.logits(rng, 2, 2, 5).detach()
    kept = _exact(logits_BTV[..., :3])
    logits_BTV[..., 3:] = -torch.inf
    subject.call("entropy", logits_BTV).expect(kept, "the entropy of a row with entries at -inf is wrong")
