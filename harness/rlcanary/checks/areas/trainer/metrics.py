"""Metrics: identities that hold on policy, values that can be recomputed, and curves that move."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Generator

from rlcanary.checks.asserts import NothingToCompare, assert_true, soft
from rlcanary.checks.case import Case
from rlcanary.checks.check import check
from rlcanary.checks.worlds import inputs
from rlcanary.checks.worlds.groups import sampled as drawn_groups
from rlcanary.checks.worlds.training.states import decaying, in_precision_of, nudged, precision, scheduled_rates
from rlcanary.checks.worlds.training.tiny_trainer import GROUPS, PAIR, TOOLS, reference_near, sampled, state_of
from rlcanary.checks.worlds.training.updates import declared
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.batch import CollatedBatch, Group, PolicyBatch
from rlcanary.contract.conventions import Conventions, KlPlacement
from rlcanary.contract.layers import copied

# Metrics that need no model to compute.
FROM_THE_BATCH = ("lr", "reward", "tokens")


def _assert_logged(adapter: Adapter, state: Any, batch: CollatedBatch, expected: dict[str, float], told: str) -> None:
    """Assert the metrics of an update that are both logged and expected."""
    metrics = adapter.train_step(state, batch)
    logged = {name: float(value) for name, value in metrics.items() if name in expected}
    if not logged:
        raise NothingToCompare(f"logs none of {', '.join(expected)}")
    rounding, wrong = torch.finfo(precision(state.model)).eps, {}
    for name, got in logged.items():
        # A model's outputs are as exact as its weights; the absolute part covers logprobs of the order of ten in a mean
        # that cancels.
        eps = 0.0 if name in FROM_THE_BATCH else rounding
        # A learning rate is a small number.
        absolute = 1e-7 if name in FROM_THE_BATCH else max(1e-4, 5 * eps)
        difference = abs(got - expected[name])
        if not difference <= max(1e-3, 10 * eps) * abs(expected[name]) + absolute:
            wrong[name] = difference / (abs(expected[name]) or 1.0)
    values = "; ".join(f"{name} is {logged[name]:.6g}, not {expected[name]:.6g}" for name in wrong)
    assert_true(
        not wrong,
        f"{told}: {values}",
        quantity=f"metrics {', '.join(wrong)}",
        magnitude=max(wrong.values(), default=0.0),
        compared=len(logged),
    )


def _temperatures() -> Iterator[Case]:
    for choice in ({}, {"temperature": 0.6}):
        yield Case(choice, changes=choice)


@check("metrics.on_policy_identities", needs=("train_step",), cases=_temperatures)
def on_policy_identities(adapter: Adapter, model: Any) -> None:
    """On the first update of a policy that equals its reference, ratios are 1, nothing is clipped and the KL is 0.

    Silent because a ratio of 1.02 or a clip fraction of 0.3 % looks like rounding. The cause is old logprobs from
    another pass, temperature or precision, or a trainer that did not start from the given weights. Look at every logged
    ratio, clip fraction and KL of step 0 before anything else.
    """
    state = state_of(adapter, copied(model), model)
    batch = sampled(state.model, adapter.conventions, PAIR)
    expected = dict.fromkeys(("ratio_mean", "ratio_min", "ratio_max", "mult_prob_error"), 1.0)
    expected |= dict.fromkeys(("clip_fraction_low", "clip_fraction_high", "dual_clip_fraction"), 0.0)
    expected |= {"clip_fraction": 0.0, "kl": 0.0, "approx_kl": 0.0}
    _assert_logged(adapter, state, batch, expected, "on policy, with a reference that equals the policy")


def _batches() -> Iterator[Case]:
    for groups in (PAIR, GROUPS):
        yield Case(f"{len(groups)} prompts", groups=groups)
    yield Case("tool tokens", groups=TOOLS)


def _batches_and_older_policies(conventions: Conventions) -> Iterator[Case]:
    yield from _batches()
    for changes in ({}, {"kl_coef": conventions.kl_coef or 0.3}):
        yield Case("an older policy", changes, changes=changes, groups=GROUPS, drift=0.5)
    yield Case("tool tokens of an older policy", groups=TOOLS, drift=0.5)
    of_the_trainer = {"old_logprobs": "trainer"}
    yield Case("tool tokens of an older policy", of_the_trainer, changes=of_the_trainer, groups=TOOLS, drift=0.5)
    yield Case("behind two updates on other rows", groups=GROUPS, earlier=2)
    # A run may watch a KL that it does not train.
    for changes in ({"kl_coef": 0.0}, *({"kl_coef": 0.3, "kl_placement": place} for place in get_args(KlPlacement))):
        yield Case("a reference model", changes, changes=changes, groups=GROUPS, has_reference=True)
    yield Case("tool tokens, a reference model", changes={"kl_coef": 0.3}, groups=TOOLS, has_reference=True)


def _drawn(rng: Generator, size: int) -> Case:
    return Case(groups=drawn_groups(rng, min(size, 4)))


@check("metrics.recomputed", needs=("train_step",), cases=_batches_and_older_policies, worlds=("router",), draws=_drawn)
def recomputed(
    adapter: Adapter,
    model: Any,
    groups: list[Group],
    drift: float = 0.0,
    has_reference: bool = False,
    earlier: int = 0,
) -> None:
    """The logged loss, learning rate, gradient norm, reward, KL, entropy, ratios and tokens are those of this update.

    Silent because a dashboard affects only people's decisions. Look for a learning rate that is read after the schedule
    has moved on, rewards before their weights, means over padding or tool tokens, the metrics of one worker,
    a variable that was reused before it was logged, numbers of earlier updates in a list that nobody empties, and a KL that
    is only computed where it is trained.
    """
    ref_model = nudged(copied(model).eval()) if has_reference else reference_near(model, adapter.conventions)
    state = state_of(adapter, model, copied(ref_model))
    if state.scheduler is not None:
        state = decaying(state)
    for _ in range(earlier):
        adapter.train_step(state, sampled(state.model, adapter.conventions, PAIR))
    batch = sampled(state.model, adapter.conventions, groups, drift)
    metrics = declared(state.model, in_precision_of(state, ref_model), batch, adapter.conventions).metrics
    if drift and adapter.conventions.kl_coef and adapter.conventions.kl_placement == "reward":
        # The KL in the reward may be that of the older policy or of this one.
        metrics = {name: value for name, value in metrics.items() if name not in ("grad_norm", "policy_loss", "loss")}
    expected = metrics | {"lr": scheduled_rates(state, 1)[0][0]}
    _assert_logged(adapter, state, batch, expected, "computed again from the batch, logged metrics differ")


def _near_and_far(rng: Generator) -> Iterator[Case]:
    near = inputs.policy_batch(rng, 2, 3, (3, 2))
    near = replace(near, ref_logprobs=near.logprobs.detach() - 0.05, sampler_logprobs=near.old_logprobs - 0.05)
    assert near.entropy is not None
    far = replace(
        near,
        old_logprobs=near.old_logprobs - 0.6,
        ref_logprobs=near.logprobs.detach() - 0.6,
        sampler_logprobs=near.old_logprobs - 1.2,
        entropy=near.entropy + 1,
    )
    yield Case(near=near, far=far)


@check("metrics.move", needs=("policy_loss",), cases=_near_and_far)
def move(adapter: Adapter, near: PolicyBatch, far: PolicyBatch) -> None:
    """Each logged metric changes where its quantity does: KL, entropy and ratios of two batches far apart differ.

    Silent because a curve that is flat at zero or one is what one hopes for: a metric of a placeholder, of a detached
    copy, or of the wrong pair of logprobs never moves. Look for defaults that are never filled in, and for a KL between
    logprobs of the same model.
    """
    before, after = (adapter.policy_loss(inputs.fresh(each)).metrics for each in (near, far))
    clamp = adapter.conventions.log_ratio_clamp
    # A tight clamp holds the ratios of both batches.
    ratios = () if clamp is not None and clamp < 1 else ("ratio_mean", "ratio_min", "ratio_max")
    logprobs = ("old_logprob", "ref_logprob", "sampler_logprob")  # the policy's are those of both batches
    for name in ("kl", "entropy", *ratios, *logprobs, "mult_prob_error", "approx_kl"):
        if name in before and name in after:
            first, second = float(before[name]), float(after[name])
            told = f"the metric {name} is {first:.6g} for both of two batches that are far apart"
            with soft():
                assert_true(abs(first - second) > 1e-4 or math.isnan(first - second), told, quantity=f"metric {name}")
