"""The KL term: the declared estimator, its gradient, its sign and its weight in the loss."""

from dataclasses import replace

import torch
from torch import Generator

from rlcanary import reference
from rlcanary.checks import cases
from rlcanary.checks.oracle import exact_loss
from rlcanary.checks.registry import check
from rlcanary.checks.subject import Subject
from rlcanary.conventions import Conventions


@check("kl.declared_estimator", needs=("kl",))
def declared_estimator(subject: Subject, rng: Generator) -> None:
    """Each token's KL is the declared estimator of the declared direction, in value and in gradient.

    Silent because every estimator is near zero while the policy is near the reference. With the ratio upside down, k3
    explodes exactly where the policy reinforces; with the wrong gradient, the value on the dashboard is still right.
    Look at which of the two logprobs is subtracted from which, and at clamps, beyond which the gradient is zero.
    """
    for rows, width in ((1, 1), (2, 2), (2, 3)):
        with subject.case(rows, width):
            logprobs_BT = cases.uniform(rng, rows, width, low=-3, high=-0.5).requires_grad_()
            ref_BT = (logprobs_BT.detach() + cases.uniform(rng, rows, width, low=-1, high=1)).round(decimals=2)
            exact_BT = logprobs_BT.detach().double().requires_grad_()
            expected_BT = reference.kl(exact_BT, ref_BT.double(), subject.conventions)
            (gradient_BT,) = torch.autograd.grad(expected_BT.sum(), exact_BT)
            name = subject.conventions.kl_estimator
            call = subject.call("kl", logprobs_BT, ref_BT)
            call.expect(expected_BT, f"KL differs from the declared estimator {name}")
            call.expect_gradient(gradient_BT, f"the gradient of the KL is not that of the declared estimator {name}")


@check("kl.zero_at_reference", needs=("kl",))
def zero_at_reference(subject: Subject, rng: Generator) -> None:
    """Where the policy equals the reference the KL is zero.

    Silent because a small constant looks like a small KL. Look for logprobs of different precision, temperature or
    position on the two sides.
    """
    logprobs_BT = cases.uniform(rng, 2, 3, low=-3, high=-0.5)
    subject.call("kl", logprobs_BT, logprobs_BT.clone()).expect(torch.zeros(2, 3), "KL of equal logprobs is not zero")


def _is_biased(conventions: Conventions) -> str | None:
    if conventions.kl_estimator not in ("k1", "k3"):
        return f"{conventions.kl_estimator} is not an unbiased estimator"
    if conventions.kl_direction != "policy_to_reference":
        return "samples of the policy do not estimate KL(reference ‖ policy)"
    return None


@check("kl.expectation_is_the_divergence", needs=("kl",), applies=_is_biased)
def expectation_is_the_divergence(subject: Subject, rng: Generator) -> None:
    """Averaged over the policy's own distribution, an unbiased estimator gives KL(policy ‖ reference) exactly.

    Silent because a KL of the other direction, or with the ratio inverted, is also positive and also small. Look at
    the sign inside the exponential.
    """
    policy_V = cases.uniform(rng, 4, low=-1, high=1).log_softmax(dim=0)
    ref_V = cases.uniform(rng, 4, low=-1, high=1).log_softmax(dim=0)
    call = subject.call("kl", policy_V.unsqueeze(0), ref_V.unsqueeze(0))
    exact = float((policy_V.double().exp() * (policy_V.double() - ref_V.double())).sum())
    got = float((policy_V.double().exp() * call.value.squeeze(0).double()).sum())
    weights = [round(value, 9) for value in policy_V.double().exp().tolist()]
    call.expect_true(
        abs(got - exact) <= 1e-5,
        f"the estimates average to {got:.6f} over the policy's distribution, KL(policy ‖ reference) is {exact:.6f}",
        f"abs(float((torch.tensor([{weights}]) * got).sum()) - {exact:.9f}) <= 1e-5",
    )


def _kl_is_in_reward(conventions: Conventions) -> str | None:
    return "the KL is in the reward" if conventions.kl_placement == "reward" else None


@check("kl.pulls_towards_reference", needs=("policy_loss",), applies=_kl_is_in_reward)
def pulls_towards_reference(subject: Subject, rng: Generator) -> None:
    """With zero advantages the loss is kl_coef times the aggregated KL, and its gradient descends towards the reference.

    Silent because the coefficient is small: with the sign wrong the policy is pushed away from the reference and only
    the KL curve climbs a little faster. Look at the sign of the term in the minimised loss, at the coefficient being
    applied once, and at the aggregation over the same tokens as the policy term.
    """
    if subject.conventions.kl_coef == 0:
        subject = subject.configured(kl_coef=0.5)
    for batch in cases.policy_batches(rng, on_policy=True):
        batch = replace(batch, advantages=torch.zeros_like(batch.advantages))
        with subject.case(batch):
            call = subject.call("policy_loss", batch)
            loss, gradient_BT = exact_loss(batch, subject.conventions)
            call.expect(loss, f"with zero advantages the loss is not {subject.conventions.kl_coef} times the KL")
            call.expect_gradient(
                gradient_BT, "with zero advantages the gradient is not that of the KL term", "logprobs"
            )
