"""The KL term: the declared estimator, its gradient, its sign and its weight in the loss."""

import math
from dataclasses import replace

import torch
from torch import Generator, Tensor

from rlcanary import reference
from rlcanary.checks.check import check
from rlcanary.checks.literal import literal
from rlcanary.checks.subject import Finding, Subject
from rlcanary.checks.worlds import inputs as cases
from rlcanary.checks.worlds.oracle import exact_loss
from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.batch import PolicyBatch
from rlcanary.contract.conventions import Conventions


@check("kl.declared_estimator", needs=("kl",))
def declared_estimator(subject: Subject, rng: Generator) -> None:
    """Each token's KL is the declared estimator of the declared direction, in value and in gradient.

    Silent because every estimator is near zero while the policy is near the reference. With the ratio upside down, k3
    explodes exactly where the policy reinforces; with the wrong gradient, the value on the dashboard is still right.
    Look at which of the two logprobs is subtracted from which, and at clamps, beyond which the gradient is zero.
    """
    for rows, width in ((1, 1), (2, 2), (2, 3)):
        logprobs_BT = cases.uniform(rng, rows, width, low=-3, high=-0.5)
        _expect_declared(subject, logprobs_BT, logprobs_BT + cases.uniform(rng, rows, width, low=-1, high=1))
    for name, edges in _edges(subject.conventions).items():
        log_ratio_1T = torch.tensor([[factor * edge for edge in edges for factor in (0.9, 1.1)]])
        # Neither of the two probabilities is above 1.
        logprobs_1T = log_ratio_1T.clamp(max=0) - 0.5
        _expect_declared(subject, logprobs_1T, logprobs_1T - log_ratio_1T, f", on both sides of {name}")


def _expect_declared(subject: Subject, logprobs_BT: Tensor, ref_BT: Tensor, case: str = "") -> None:
    with subject.case(logprobs_BT, case):
        exact_BT = logprobs_BT.double().requires_grad_()
        expected_BT = reference.kl(exact_BT, ref_BT.double(), subject.conventions)
        (gradient_BT,) = torch.autograd.grad(expected_BT.sum(), exact_BT)
        told = f"the declared estimator {subject.conventions.kl_estimator}{case}"
        call = subject.call("kl", logprobs_BT.clone().requires_grad_(), ref_BT)
        call.expect(expected_BT, f"KL differs from {told}")
        call.expect_gradient(gradient_BT, f"the gradient of the KL is not that of {told}")


def _edges(conventions: Conventions) -> dict[str, list[float]]:
    """Return the log-ratios at which each declared clamp starts to act."""
    edges = {}
    if conventions.kl_input_clamp is not None:
        edges["kl_input_clamp"] = [-conventions.kl_input_clamp, conventions.kl_input_clamp]
    if conventions.kl_output_clamp is not None:
        edges["kl_output_clamp"] = [_reaching(conventions.kl_output_clamp, sign, conventions) for sign in (-1, 1)]
    return edges


def _reaching(estimate: float, sign: int, conventions: Conventions) -> float:
    """Find by bisection the log-ratio of this sign whose estimate is this large."""
    # |x|, x²/2 and exp(-x) - 1 + x, which is above x - 1, are all larger at the upper end.
    low, high = 0.0, estimate + math.sqrt(2 * estimate) + 2
    for _ in range(60):
        middle = (low + high) / 2
        if float(_unclamped(torch.tensor(sign * middle, dtype=torch.float64), conventions).abs()) < estimate:
            low = middle
        else:
            high = middle
    return sign * high


def _unclamped(log_ratio: Tensor, conventions: Conventions) -> Tensor:
    free = conventions.replace(kl_input_clamp=None, kl_output_clamp=None)
    return reference.kl(log_ratio, torch.zeros_like(log_ratio), free)


def _reference_near(policy_V: Tensor, far_V: Tensor, conventions: Conventions) -> Tensor:
    """Return logprobs of a reference model so near the policy that no clamp acts on any token.

    Raises:
        NotProvided: the clamps are so tight that almost nothing is left to estimate.
    """
    ratio_bound, estimate_bound = (
        math.inf if clamp is None else 0.9 * clamp
        for clamp in (conventions.kl_input_clamp, conventions.kl_output_clamp)
    )
    for halvings in range(6):
        ref_V = (policy_V + (far_V - policy_V) * 0.5**halvings).log_softmax(dim=0)
        log_ratio_V = policy_V - ref_V
        estimate_V = _unclamped(log_ratio_V, conventions)
        if log_ratio_V.abs().max() < ratio_bound and estimate_V.abs().max() < estimate_bound:
            return ref_V
    raise NotProvided("the clamps of the KL leave next to nothing to estimate")


@check("kl.zero_at_reference", needs=("kl",))
def zero_at_reference(subject: Subject, rng: Generator) -> None:
    """The KL is zero when the policy equals the reference.

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
    ref_V = _reference_near(policy_V, ref_V, subject.conventions)
    call = subject.call("kl", policy_V.unsqueeze(0), ref_V.unsqueeze(0))
    exact = float((policy_V.double().exp() * (policy_V.double() - ref_V.double())).sum())
    got = float((policy_V.double().exp() * call.value.squeeze(0).double()).sum())
    weights = [round(value, 9) for value in policy_V.double().exp().tolist()]
    # Near the policy KL(policy ‖ reference) and KL(reference ‖ policy) are close to each other.
    rounding = min(1e-5, 1e-6 + 1e-3 * exact)
    call.expect_true(
        abs(got - exact) <= rounding,
        f"the estimates average to {got:.6f} over the policy's distribution, KL(policy ‖ reference) is {exact:.6f}",
        f"abs(float((torch.tensor([{weights}]) * got).sum()) - {exact:.9f}) <= {rounding:.9f}",
        magnitude=abs(got - exact) / abs(exact),
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
    _expect_pull(subject)


def _expect_pull(subject: Subject) -> None:
    """A step down the loss lowers KL(policy ‖ reference), over rows of one token as frequent as the policy draws it."""
    with subject.case("rows of one token, as often as the policy draws it"):
        reason = _has_no_pull(subject.conventions)
        if reason is not None:
            raise NotProvided(reason)
        tokens_B = torch.tensor([0, 0, 0, 0, 1, 1, 2, 3])
        policy_V = torch.tensor([4, 2, 1, 1]).div(8).log()
        ref_V = _reference_near(policy_V, policy_V.flip(0), subject.conventions)
        logprobs_BT = policy_V[tokens_B].unsqueeze(1)
        batch = PolicyBatch(
            logprobs=logprobs_BT.clone().requires_grad_(),
            old_logprobs=logprobs_BT,
            advantages=torch.zeros(len(tokens_B)),
            mask=torch.ones(len(tokens_B), 1, dtype=torch.bool),
            ref_logprobs=ref_V[tokens_B].unsqueeze(1),
            sampler_logprobs=logprobs_BT,
            entropy=torch.ones(len(tokens_B), 1),
            group_ids=torch.arange(len(tokens_B)) // 2,
        )
        call = subject.call("policy_loss", batch)
        gradient_BT = call.gradient("logprobs")
        subject.compared()
        # Gradient of the logits, whose log softmax the logprobs are.
        one_hot_BV = torch.nn.functional.one_hot(tokens_B, len(policy_V))
        loss_V = (gradient_BT * (one_hot_BV - policy_V.exp())).sum(dim=0)
        log_ratio_V = policy_V - ref_V
        divergence_V = policy_V.exp() * (log_ratio_V - (policy_V.exp() * log_ratio_V).sum())
        cosine = float(torch.nn.functional.cosine_similarity(loss_V, divergence_V, dim=0))
        if not cosine > 0:
            lines = [
                "(gradient,) = torch.autograd.grad(adapter.policy_loss(arguments[0]).loss, arguments[0].logprobs)",
                f"one_hot = torch.nn.functional.one_hot(torch.tensor({tokens_B.tolist()}), {len(policy_V)})",
                f"policy = torch.tensor({policy_V.exp().tolist()})",
                "of_loss = (gradient * (one_hot - policy)).sum(dim=0)",
                f"of_divergence = {literal(divergence_V)}",
                "cosine = torch.nn.functional.cosine_similarity(of_loss, of_divergence, dim=0)",
                "assert cosine > 0, (of_loss, of_divergence)",
            ]
            raise Finding(
                "a step down the loss does not bring the policy nearer to the reference: the gradient has cosine "
                f"{cosine:.4f} with that of KL(policy ‖ reference)",
                call.snippet(lines),
            )


def _has_no_pull(conventions: Conventions) -> str | None:
    if conventions.kl_estimator != "k1":
        return None
    if conventions.kl_direction == "reference_to_policy":
        return "k1 of KL(reference ‖ policy) is minus the divergence on the policy's own samples"
    if not (conventions.kl_score_term or conventions.kl_ratio_weighted):
        return "k1 without its score-function part has no gradient on average"
    return None
