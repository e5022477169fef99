"""Gradients, tested without conventions: against the loss's own values, and against the enumerated policy gradient."""

import copy
import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Generator, Tensor

from rlcanary.checks.asserts import assert_true, gradient
from rlcanary.checks.case import Case
from rlcanary.checks.check import check
from rlcanary.checks.worlds import inputs, rows
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.batch import PolicyBatch
from rlcanary.contract.conventions import Conventions


def _has_stopped_gradients(conventions: Conventions) -> str | None:
    return "CISPO stops gradients on purpose" if conventions.objective == "cispo" else None


def _kl_is_not_its_slope(conventions: Conventions) -> bool:
    """Tell whether the KL's declared gradient differs from the slope of its value: by a score term or a clamped weight."""
    is_weight_held = conventions.kl_ratio_weighted and conventions.kl_input_clamp is not None
    return conventions.kl_coef != 0 and (conventions.kl_score_term or is_weight_held)


def _drifted(conventions: Conventions, rng: Generator) -> Iterator[Case]:
    changes = {"kl_coef": 0.0} if _kl_is_not_its_slope(conventions) else {}
    for shape in ((1, 1, (1,)), (2, 2, (2, 1)), (4, 3, (3, 1, 2, 2))):
        batch = _with_drift(rng, inputs.policy_batch(rng, *shape))
        yield Case(batch, changes=changes, batch=batch)


def _with_drift(rng: Generator, batch: PolicyBatch) -> PolicyBatch:
    """Move the ratios to both sides of 1; that of the first token, whose advantage is positive, is not clipped."""
    sizes_BT = inputs.uniform(rng, *batch.mask.shape, low=0.05, high=0.7)
    drift_BT = sizes_BT * (torch.rand(batch.mask.shape, generator=rng) - 0.5).sign()
    drift_BT[0, 0] = -drift_BT[0, 0].abs()
    return replace(batch, old_logprobs=(batch.logprobs.detach() - drift_BT).round(decimals=2))


def _drawn(conventions: Conventions, rng: Generator, size: int) -> Case:
    changes = {"kl_coef": 0.0} if _kl_is_not_its_slope(conventions) else {}
    shape = rows.whole(rng, 1, size), rows.whole(rng, 1, size)
    batch = _with_drift(rng, inputs.policy_batch(rng, *shape, None))
    return Case(changes=changes, batch=replace(batch, mask=rows.mask(rng, *shape)))


@check(
    "gradient.finite_differences",
    needs=("policy_loss",),
    applies=_has_stopped_gradients,
    cases=_drifted,
    draws=_drawn,
)
def finite_differences(adapter: Adapter, batch: PolicyBatch) -> None:
    """The gradient of the loss matches finite differences of its value.

    Silent because the optimizer sees only the gradient and the dashboard only the value: a detached factor, a value scaled
    after backward, or a weight that should not carry gradient leaves one of them right. Look for `detach()`, `.data`,
    `no_grad` and arithmetic on the loss after `backward()`.
    """
    step = 1e-2
    given = copy.deepcopy(batch)
    loss = adapter.policy_loss(given).loss
    gradient_BT = gradient(loss, given.logprobs)
    for row, position in batch.mask.nonzero().tolist():
        left = (float(loss.detach()) - _loss_at(adapter, batch, row, position, -step)) / step
        right = (_loss_at(adapter, batch, row, position, step) - float(loss.detach())) / step
        slope, bend = (left + right) / 2, abs(right - left) / 2
        if bend > 0.05 * max(abs(left), abs(right), 0.05):
            continue  # A clipping bound or a clamp lies within the step, where the slope is not unique.
        got = float(gradient_BT[row, position])
        assert_true(
            abs(got - slope) <= bend + 0.02 * max(abs(slope), abs(got), 0.05),
            f"at row {row}, position {position} the gradient is {got:.4g}, the slope of the loss {slope:.4g}",
            quantity=f"slope at row {row}, position {position}",
            magnitude=abs(got - slope) / (abs(slope) or 1.0),
        )


def _loss_at(adapter: Adapter, batch: PolicyBatch, row: int, position: int, step: float) -> float:
    moved = copy.deepcopy(batch)
    with torch.no_grad():
        moved.logprobs[row, position] += step
    return float(adapter.policy_loss(moved).loss.detach())


def _all_sequences(rng: Generator) -> Iterator[Case]:
    yield _sequences(rng, 3, 2)


def _drawn_sequences(rng: Generator, size: int) -> Case:
    return _sequences(rng, rows.whole(rng, 2, min(size + 1, 4)), rows.whole(rng, 1, min(size, 3)))


def _sequences(rng: Generator, vocabulary: int, width: int) -> Case:
    logits_TV = inputs.uniform(rng, width, vocabulary, low=-1, high=1).requires_grad_()
    ids_BT = torch.tensor(list(itertools.product(range(vocabulary), repeat=width)))
    rewards_B = inputs.uniform(rng, len(ids_BT), low=-1, high=1)
    changes = {"kl_coef": 0.0, "entropy_coef": 0.0}
    return Case(changes=changes, logits_TV=logits_TV, ids_BT=ids_BT, rewards_B=rewards_B)


@check(
    "gradient.is_the_policy_gradient",
    needs=("token_logprobs", "policy_loss"),
    cases=_all_sequences,
    draws=_drawn_sequences,
)
def is_the_policy_gradient(adapter: Adapter, logits_TV: Tensor, ids_BT: Tensor, rewards_B: Tensor) -> None:
    """Summed over all completions of a tiny policy, weighted by probability, the gradient points along ∇ E[reward].

    Silent because a wrong direction still moves the policy: with unevenly weighted tokens, advantages of other
    completions or probabilities at another temperature, the reward may rise for a while by luck. Look at everything
    between the logits and the loss; each part alone may be right.
    """
    logits_BTV = logits_TV.expand(len(ids_BT), *logits_TV.shape).contiguous()
    exact_BT = logits_BTV.double().log_softmax(dim=-1).gather(-1, ids_BT.unsqueeze(-1)).squeeze(-1)
    probabilities_B = exact_BT.sum(dim=1).exp()
    wanted_TV = gradient(probabilities_B @ rewards_B.double(), logits_TV)

    logprobs_BT = adapter.token_logprobs(logits_BTV, ids_BT, 1.0)
    scored_BT = logprobs_BT.detach().float()
    batch = PolicyBatch(
        logprobs=scored_BT.clone().requires_grad_(),
        old_logprobs=scored_BT,
        advantages=(rewards_B * probabilities_B.detach()).float() * 10,
        mask=torch.ones_like(ids_BT, dtype=torch.bool),
        ref_logprobs=scored_BT,
        sampler_logprobs=scored_BT,
        entropy=torch.zeros(ids_BT.shape),
        group_ids=torch.zeros(len(ids_BT), dtype=torch.long),
    )
    upstream_BT = gradient(adapter.policy_loss(batch).loss, batch.logprobs)
    got_TV = gradient(logprobs_BT, logits_TV, upstream_BT)
    cosine = float(torch.nn.functional.cosine_similarity(-got_TV.flatten(), wanted_TV.flatten(), dim=0))
    told = f"the descent direction has cosine {cosine:.4f} with the policy gradient"
    assert_true(cosine >= 0.999, told, quantity="direction", magnitude=1 - cosine)
