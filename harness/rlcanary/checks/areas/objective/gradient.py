"""Gradients, tested without conventions: against the loss's own values, and against the enumerated policy gradient."""

import copy
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Generator, Tensor

from rlcanary.checks.asserts import assert_close, assert_true, gradient, soft, unless_raised
from rlcanary.checks.case import Case
from rlcanary.checks.check import check
from rlcanary.checks.worlds import inputs, rows
from rlcanary.checks.worlds.training.descent import scene, watched
from rlcanary.checks.worlds.training.tiny_trainer import GROUPS, PAIR, tiny_policy
from rlcanary.contract.adapter import Adapter, NotProvided
from rlcanary.contract.batch import Group, PolicyBatch
from rlcanary.contract.conventions import Conventions


def _has_stopped_gradients(conventions: Conventions) -> str | None:
    if conventions.objective == "cispo":
        return "CISPO stops gradients on purpose"
    if conventions.is_own("objective"):
        return "an objective of one's own may stop gradients on purpose"
    return _leaves_rows_out(conventions)


def _leaves_rows_out(conventions: Conventions) -> str | None:
    if conventions.off_policy_mask is not None:
        return "rows far off policy are left out on purpose"
    return _is_own(conventions)


def _is_own(conventions: Conventions) -> str | None:
    return "an objective of one's own may weigh tokens on purpose" if conventions.is_own("objective") else None


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
    loss = adapter.policy_loss(inputs.fresh(batch)).loss
    gradient_BT = gradient(loss, batch.logprobs)
    for row, position in batch.mask.nonzero().tolist():
        left = (float(loss.detach()) - _loss_at(adapter, batch, row, position, -step)) / step
        right = (_loss_at(adapter, batch, row, position, step) - float(loss.detach())) / step
        slope, bend = (left + right) / 2, abs(right - left) / 2
        if bend > 0.05 * max(abs(left), abs(right), 0.05):
            continue  # A clipping bound or a clamp lies within the step, where the slope is not unique.
        got = float(gradient_BT[row, position])
        assert_true(
            math.isfinite(got) and abs(got - slope) <= bend + 0.02 * max(abs(slope), abs(got), 0.05),
            f"at row {row}, position {position} the gradient is {got:.4g}, the slope of the loss {slope:.4g}",
            quantity=f"slope at row {row}, position {position}",
            magnitude=abs(got - slope) / (abs(slope) or 1.0),
        )


def _loss_at(adapter: Adapter, batch: PolicyBatch, row: int, position: int, step: float) -> float:
    moved = inputs.fresh(batch)
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


def _sampled_elsewhere(rng: Generator) -> Iterator[Case]:
    for level in ("token", "sequence"):
        policy_V, sampler_V = (inputs.uniform(rng, 4, low=-1, high=1) for _ in range(2))
        changes = {"importance_level": level, "importance_low": 0.0, "importance_high": 100.0}
        changes |= {"importance_mode": "truncate", "kl_coef": 0.0, "entropy_coef": 0.0}
        rewards_V = inputs.uniform(rng, 4, low=-1, high=1)
        yield Case(level, changes=changes, policy_V=policy_V, sampler_V=sampler_V, rewards_V=rewards_V)


@check(
    "gradient.corrected_is_the_policy_gradient",
    needs=("policy_loss",),
    cases=_sampled_elsewhere,
    applies=_leaves_rows_out,
)
def corrected_is_the_policy_gradient(adapter: Adapter, policy_V: Tensor, sampler_V: Tensor, rewards_V: Tensor) -> None:
    """Averaged over what another sampler draws, the corrected gradient points along ∇ E[reward] of the policy.

    Silent because a correction that is upside down, or applied twice, leaves signs and sizes plausible while it doubles
    the bias that it is there to remove. Look at which logprob is subtracted from which, and at a ratio against the sampler
    beside a correction for the sampler.
    """
    policy_V = policy_V.double().log_softmax(dim=0).requires_grad_()
    drawn_V = sampler_V.double().softmax(dim=0)
    probabilities_V = policy_V.detach().exp()
    scored_V1 = policy_V.detach().float().unsqueeze(1)
    weighted_V, mask_V1 = (rewards_V * drawn_V).float() * 10, torch.ones(scored_V1.shape, dtype=torch.bool)
    batch = inputs.on_policy_batch(scored_V1, weighted_V, mask_V1)
    batch = replace(batch, sampler_logprobs=drawn_V.log().float().unsqueeze(1))
    upstream_V = gradient(adapter.policy_loss(inputs.fresh(batch)).loss, batch.logprobs).squeeze(1).double()
    # Gradients with respect to the policy's logits, whose log softmax the logprobs are.
    got_V = -(upstream_V - probabilities_V * upstream_V.sum())
    wanted_V = probabilities_V * (rewards_V.double() - probabilities_V @ rewards_V.double())
    cosine = float(torch.nn.functional.cosine_similarity(got_V, wanted_V, dim=0))
    told = f"the corrected descent direction has cosine {cosine:.4f} with the policy gradient"
    assert_true(cosine >= 0.999, told, quantity="direction", magnitude=1 - cosine)


@check(
    "gradient.is_the_policy_gradient",
    needs=("token_logprobs", "policy_loss"),
    applies=_is_own,
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
    weighted_B = (rewards_B * probabilities_B.detach()).float() * 10
    batch = inputs.on_policy_batch(scored_BT, weighted_B, torch.ones_like(ids_BT, dtype=torch.bool))
    upstream_BT = gradient(adapter.policy_loss(inputs.fresh(batch)).loss, batch.logprobs)
    got_TV = gradient(logprobs_BT, logits_TV, upstream_BT)
    cosine = float(torch.nn.functional.cosine_similarity(-got_TV.flatten(), wanted_TV.flatten(), dim=0))
    told = f"the descent direction has cosine {cosine:.4f} with the policy gradient"
    assert_true(cosine >= 0.999, told, quantity="direction", magnitude=1 - cosine)


def _no_terms(rng: Generator) -> Iterator[Case]:
    changes = {"kl_coef": 0.0, "entropy_coef": 0.0}
    for shape in inputs.SHAPES:
        yield Case(shape[:2], changes=changes, batch=inputs.policy_batch(rng, *shape))


def _drawn_without_terms(conventions: Conventions, rng: Generator, size: int) -> Case:
    changes = {"kl_coef": 0.0, "entropy_coef": 0.0}
    return Case(changes=changes, batch=rows.policy_batch(rng, size, conventions.replace(**changes)))


@check("gradient.zero_advantage_moves_nothing", needs=("policy_loss",), cases=_no_terms, draws=_drawn_without_terms)
def zero_advantage_moves_nothing(adapter: Adapter, batch: PolicyBatch) -> None:
    """With advantages of zero, and without KL and entropy terms, loss and gradient are zero at any ratio.

    Silent because groups without a signal are common: a constant that is added to advantages, or a term that is not
    switched off, pushes the policy where nothing was learned. Look for whitening of advantages inside the loss, for
    epsilons, and for terms that a coefficient of zero does not remove.
    """
    batch = replace(batch, advantages=torch.zeros_like(batch.advantages))
    loss = adapter.policy_loss(inputs.fresh(batch)).loss
    with soft():
        assert_close(loss, torch.tensor(0.0), "with advantages of zero the loss is not zero")
    told = "with advantages of zero the gradient is not zero"
    assert_close(gradient(loss, batch.logprobs), torch.zeros(batch.mask.shape), told, quantity="gradient")


def _half_precisions() -> Iterator[Case]:
    # More tokens than half precision can count one by one.
    given = {"advantages_B": torch.tensor([0.5, -1.0, 1.5]), "lengths_B": torch.tensor([400, 37, 2200])}
    for dtype in ("bfloat16", "float16"):
        yield Case(dtype, changes={"kl_coef": 0.0, "entropy_coef": 0.0}, dtype=dtype, **given)


@check("gradient.half_precision", needs=("policy_loss",), cases=_half_precisions)
def half_precision(adapter: Adapter, advantages_B: Tensor, lengths_B: Tensor, dtype: str) -> None:
    """On policy, a batch in half precision gives the gradient of the same numbers in float32.

    Silent because sums in bfloat16 stop growing at 256 tokens of one: each update is then a multiple of what it should be,
    which depends on the lengths. Look for counts and sums in the dtype of the batch. Code that raises is not silent.
    """
    mask_BT = torch.arange(int(lengths_B.max())) < lengths_B.unsqueeze(1)
    gradients = []
    for kind in (torch.float32, getattr(torch, dtype)):
        logprobs_BT = torch.full(mask_BT.shape, -1.0, dtype=kind)
        batch = inputs.on_policy_batch(logprobs_BT, advantages_B.to(kind), mask_BT)
        output = unless_raised(adapter.policy_loss, inputs.fresh(batch))
        if output is None:
            return
        gradients.append(gradient(output.loss, batch.logprobs).float())
    assert_true(bool(gradients[0].isfinite().all()), "the gradient of a batch in float32 is not finite")
    told = f"the gradient of a batch in {dtype} is not that of the same batch in float32"
    within = 0.02, 0.02 * float(gradients[0].abs().max())
    assert_close(gradients[1], gradients[0], told, within=within, quantity="gradient")


def _one_reward(conventions: Conventions) -> Iterator[Case]:
    if conventions.advantage_baseline == "none" or conventions.is_own("advantage_baseline"):
        raise NotProvided("rewards are not centred, or on a baseline of one's own")
    groups = [replace(group, rewards=[1.0] * len(group.completions)) for group in (*PAIR, *GROUPS)]
    yield Case(changes={"kl_coef": 0.0, "entropy_coef": 0.0}, groups=groups)


@check("gradient.equal_rewards_move_nothing", needs=("train_step",), cases=_one_reward)
def equal_rewards_move_nothing(adapter: Adapter, groups: list[Group]) -> None:
    """If all completions of each prompt earned the same, and there is no KL and no entropy term, no gradient arrives.

    Silent because such groups are every other group late in training: what they add is noise, or the push of a term that
    was thought to be off. Look for a baseline over the wrong rows, for whitening over the batch, and for auxiliary losses.
    """
    start = scene(adapter, tiny_policy(), groups, is_clipped=None)
    watch = watched(start.state)
    adapter.train_step(start.state, copy.deepcopy(start.batch))
    largest = max(
        (float(each.abs().max()) for update in watch.updates for each in update.gradients.values()), default=0.0
    )
    told = f"with equal rewards in each group a gradient of up to {largest:.2g} reaches the optimizer"
    assert_true(largest < 1e-5, told, quantity="gradients", magnitude=largest)
