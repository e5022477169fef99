"""The KL term: the declared estimator, its gradient, its sign and its weight in the loss."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, get_args

import torch
from torch import Generator, Tensor

from rlcanary import reference
from rlcanary.checks.asserts import assert_close, assert_true, gradient, soft
from rlcanary.checks.case import Case
from rlcanary.checks.check import check
from rlcanary.checks.worlds import inputs, rows
from rlcanary.checks.worlds.oracle import exact_loss
from rlcanary.contract.adapter import Adapter, NotProvided
from rlcanary.contract.batch import PolicyBatch
from rlcanary.contract.conventions import Conventions, KlDirection, KlEstimator


def _logprobs(conventions: Conventions, rng: Generator) -> Iterator[Case]:
    for shape in ((1, 1), (2, 2), (2, 3)):
        given = _near(rng, *shape)
        yield Case(given["ref_BT"], **given, place="")
    for name, edges in inputs.kl_clamp_edges(conventions).items():
        yield _both_sides(name, edges)
    for changes in _other_kinds(conventions):
        yield Case(changes, changes=changes, **given, place=f" under {changes}")
    for estimator, clamp in product(get_args(KlEstimator), ({"kl_input_clamp": 0.5}, {"kl_output_clamp": 0.25})):
        changes = {"kl_estimator": estimator, **clamp}
        for name, edges in inputs.kl_clamp_edges(conventions.replace(**changes)).items():
            if name in clamp:
                yield _both_sides(name, edges, changes)
    # An estimate that overflows before its clamp.
    for direction in get_args(KlDirection):
        changes = {"kl_output_clamp": 10.0, "kl_direction": direction}
        far = _both_sides("kl_output_clamp", [-100.0, 100.0], changes)
        yield Case(far.label, "far out", changes=changes, **far.inputs)
    for rows_and_width in ((70, 1), (1, 300)):
        given = _near(rng, *rows_and_width)
        # Some of so many differences would lie on a clamp, where two gradients are correct.
        given["ref_BT"] = given["ref_BT"] + 0.003
        yield Case(given["ref_BT"], **given, place="")


def _near(rng: Generator, rows: int, width: int) -> dict[str, Any]:
    logprobs_BT = inputs.uniform(rng, rows, width, low=-3, high=-0.5)
    ref_BT = logprobs_BT + inputs.uniform(rng, rows, width, low=-1, high=1)
    # No probability is above 1; the differences stay.
    excess_BT = (ref_BT + 0.1).clamp(min=0)
    logprobs_BT, ref_BT = logprobs_BT - excess_BT, ref_BT - excess_BT
    return {"logprobs_BT": logprobs_BT.requires_grad_(), "ref_BT": ref_BT.detach()}


def _both_sides(name: str, edges: Sequence[float], changes: dict[str, Any] | None = None) -> Case:
    (logprobs_1T, ref_1T), place = inputs.beside(edges), f"on both sides of {name}"
    given = {"logprobs_BT": logprobs_1T.clone().requires_grad_(), "ref_BT": ref_1T, "place": f", {place}"}
    return Case(changes or logprobs_1T, place, changes=changes, **given)


def _other_kinds(conventions: Conventions) -> Iterator[dict[str, Any]]:
    """Yield every estimator in both directions, and without a weight also with its score-function part."""
    parts = (False,) if conventions.kl_ratio_weighted else (False, True)
    for estimator, direction, part in product(get_args(KlEstimator), get_args(KlDirection), parts):
        yield {"kl_estimator": estimator, "kl_direction": direction, "kl_score_term": part}


def _drawn(conventions: Conventions, rng: Generator, size: int) -> Case:
    batch = rows.policy_batch(rng, size, conventions)
    return Case(logprobs_BT=batch.logprobs, ref_BT=batch.ref_logprobs, place="")


@check("kl.declared_estimator", needs=("kl",), cases=_logprobs, draws=_drawn)
def declared_estimator(adapter: Adapter, logprobs_BT: Tensor, ref_BT: Tensor, place: str) -> None:
    """Each token's KL is the declared estimator of the declared direction, in value and in gradient.

    Silent because every estimator is near zero while the policy is near the reference. With the ratio upside down, k3
    explodes exactly where the policy reinforces; with the wrong gradient, the value on the dashboard is still right.
    Look at which of the two logprobs is subtracted from which, and at clamps, beyond which the gradient is zero.
    """
    exact_BT = logprobs_BT.detach().double().requires_grad_()
    expected_BT = reference.kl(exact_BT, ref_BT.double(), adapter.conventions)
    kl_BT = adapter.kl(logprobs_BT.clone(), ref_BT)
    estimator = adapter.conventions.kl_estimator
    told = f"the declared estimator {getattr(estimator, '__name__', estimator)}{place}"
    with soft():
        assert_close(kl_BT, expected_BT, f"KL differs from {told}")
    told = f"the gradient of the KL is not that of {told}"
    assert_close(gradient(kl_BT, logprobs_BT), gradient(expected_BT, exact_BT), told, quantity="gradient")


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
        estimate_V = inputs.unclamped_kl(log_ratio_V, conventions)
        if log_ratio_V.abs().max() < ratio_bound and estimate_V.abs().max() < estimate_bound:
            return ref_V
    raise NotProvided("the clamps of the KL leave next to nothing to estimate")


def _equal_logprobs(rng: Generator) -> Iterator[Case]:
    yield Case(logprobs_BT=inputs.uniform(rng, 2, 3, low=-3, high=-0.5))


@check("kl.zero_at_reference", needs=("kl",), cases=_equal_logprobs)
def zero_at_reference(adapter: Adapter, logprobs_BT: Tensor) -> None:
    """The KL is zero when the policy equals the reference.

    Silent because a small constant looks like a small KL. Look for logprobs of different precision, temperature or
    position on the two sides.
    """
    kl_BT = adapter.kl(logprobs_BT, logprobs_BT.clone())
    assert_close(kl_BT, torch.zeros_like(logprobs_BT), "KL of equal logprobs is not zero")


def _is_biased(conventions: Conventions) -> str | None:
    if conventions.kl_estimator not in ("k1", "k3"):
        estimator = conventions.kl_estimator
        return f"{getattr(estimator, '__name__', estimator)} is not known to be unbiased"
    if conventions.kl_direction != "policy_to_reference":
        return "samples of the policy do not estimate KL(reference ‖ policy)"
    return None


def _two_distributions(conventions: Conventions, rng: Generator) -> Iterator[Case]:
    policy_V = inputs.uniform(rng, 4, low=-1, high=1).log_softmax(dim=0)
    far_V = inputs.uniform(rng, 4, low=-1, high=1).log_softmax(dim=0)
    yield Case(policy_V=policy_V, ref_V=_reference_near(policy_V, far_V, conventions))


@check("kl.expectation_is_the_divergence", needs=("kl",), applies=_is_biased, cases=_two_distributions)
def expectation_is_the_divergence(adapter: Adapter, policy_V: Tensor, ref_V: Tensor) -> None:
    """Averaged over the policy's own distribution, an unbiased estimator gives KL(policy ‖ reference) exactly.

    Silent because a KL of the other direction, or with the ratio inverted, is also positive and also small. Look at
    the sign inside the exponential.
    """
    probabilities_V = policy_V.double().exp()
    exact = float(probabilities_V @ (policy_V.double() - ref_V.double()))
    kl_V = adapter.kl(policy_V.unsqueeze(0), ref_V.unsqueeze(0)).squeeze(0)
    got = float(probabilities_V @ kl_V.detach().double())
    # Near the policy KL(policy ‖ reference) and KL(reference ‖ policy) are close to each other.
    rounding = min(1e-5, 1e-6 + 1e-3 * exact)
    assert_true(
        abs(got - exact) <= rounding,
        f"the estimates average to {got:.6f} over the policy's distribution, KL(policy ‖ reference) is {exact:.6f}",
        quantity="value",
        magnitude=abs(got - exact) / abs(exact),
    )


def _kl_is_in_reward(conventions: Conventions) -> str | None:
    return "the KL is in the reward" if conventions.kl_placement == "reward" else None


def _without_advantage(conventions: Conventions, rng: Generator) -> Iterator[Case]:
    changes = {} if conventions.kl_coef else {"kl_coef": 0.5}
    for shape in inputs.SHAPES:
        batch = inputs.policy_batch(rng, *shape, on_policy=True)
        yield Case(batch, changes=changes, batch=replace(batch, advantages=torch.zeros_like(batch.advantages)))
    if reason := _has_no_pull(conventions):
        raise NotProvided(reason)
    tokens_B = torch.tensor([0, 0, 0, 0, 1, 1, 2, 3])
    policy_V = torch.tensor([4, 2, 1, 1]).div(8).log()
    ref_V = _reference_near(policy_V, policy_V.flip(0), conventions)
    logprobs_BT, ref_BT = (each_V[tokens_B].unsqueeze(1) for each_V in (policy_V, ref_V))
    batch = replace(
        inputs.policy_batch(rng, 8, 1, (1,) * 8),
        logprobs=logprobs_BT.clone().requires_grad_(),
        old_logprobs=logprobs_BT,
        advantages=torch.zeros(8),
        ref_logprobs=ref_BT,
        sampler_logprobs=logprobs_BT,
    )
    label = "rows of one token, as often as the policy draws it"
    yield Case(label, changes=changes, batch=batch, tokens_B=tokens_B)


@check("kl.pulls_towards_reference", needs=("policy_loss",), applies=_kl_is_in_reward, cases=_without_advantage)
def pulls_towards_reference(adapter: Adapter, batch: PolicyBatch, tokens_B: Tensor | None = None) -> None:
    """With zero advantages the loss is kl_coef times the aggregated KL, and its gradient descends towards the reference.

    Silent because the coefficient is small: with the sign wrong the policy is pushed away from the reference and only
    the KL curve climbs a little faster. Look at the sign of the term in the minimised loss, at the coefficient being
    applied once, and at the aggregation over the same tokens as the policy term.
    """
    if tokens_B is not None:
        _assert_pull(adapter, batch, tokens_B)
        return
    expected, expected_BT = exact_loss(batch, adapter.conventions)
    loss = adapter.policy_loss(inputs.fresh(batch)).loss
    with soft():
        assert_close(loss, expected, f"with zero advantages the loss is not {adapter.conventions.kl_coef} times the KL")
    told = "with zero advantages the gradient is not that of the KL term"
    assert_close(gradient(loss, batch.logprobs), expected_BT, told, quantity="gradient")


def _assert_pull(adapter: Adapter, batch: PolicyBatch, tokens_B: Tensor) -> None:
    """Assert that a step down the loss lowers KL(policy ‖ reference), over rows as frequent as the policy draws them."""
    one_hot_BV = torch.nn.functional.one_hot(tokens_B).float()
    probabilities_V = one_hot_BV.mean(dim=0)
    log_ratio_B1 = (batch.logprobs - torch.as_tensor(batch.ref_logprobs)).detach()
    # Both are gradients with respect to logits, whose log softmax the logprobs are.
    divergence_V = ((log_ratio_B1 - log_ratio_B1.mean()) * one_hot_BV).mean(dim=0)
    gradient_B1 = gradient(adapter.policy_loss(inputs.fresh(batch)).loss, batch.logprobs)
    loss_V = (gradient_B1 * (one_hot_BV - probabilities_V)).sum(dim=0)
    cosine = float(torch.nn.functional.cosine_similarity(loss_V, divergence_V, dim=0))
    told = f"a step down the loss does not lower KL(policy ‖ reference): the cosine of their gradients is {cosine:.4f}"
    assert_true(cosine > 0, told, quantity="property")


def _has_no_pull(conventions: Conventions) -> str | None:
    if conventions.kl_estimator != "k1":
        return None
    if conventions.kl_direction == "reference_to_policy":
        return "k1 of KL(reference ‖ policy) is minus the divergence on the policy's own samples"
    if not (conventions.kl_score_term or conventions.kl_ratio_weighted):
        return "k1 without its score-function part has no gradient on average"
    return None
