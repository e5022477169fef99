"""Options: every declared option has its effect, options differ from each other, and 0 and None keep their meaning."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Generator, Tensor

from rlcanary import reference
from rlcanary.checks.asserts import assert_close, gradient
from rlcanary.checks.case import Case
from rlcanary.checks.check import check
from rlcanary.checks.worlds import inputs
from rlcanary.checks.worlds.oracle import double, exact_loss
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.batch import PolicyBatch
from rlcanary.contract.conventions import Aggregation, Conventions, KlDirection


def _batches(rng: Generator, *options: dict[str, Any]) -> Iterator[Case]:
    """Yield small batches under each of the options."""
    for changes in options:
        told = ", ".join(f"{name}={value!r}" for name, value in changes.items())
        for shape in ((1, 1, (1,)), (2, 3, (3, 1)), inputs.WITH_EMPTY_ROW):
            batch = inputs.policy_batch(rng, *shape)
            yield Case(f"{told}; {list(batch.mask.shape)}", changes=changes, batch=batch, told=told)


def assert_declared_loss(adapter: Adapter, batch: PolicyBatch, told: str) -> None:
    """Assert that loss and gradient are those of the adapter's conventions."""
    expected, expected_BT = exact_loss(batch, adapter.conventions)
    loss = adapter.policy_loss(batch).loss
    assert_close(loss, expected, f"with {told} the loss is another one")
    gradient_BT = gradient(loss, batch.logprobs)
    assert_close(gradient_BT, expected_BT, f"with {told} the gradient is another one", quantity="gradient")


def _advantage_options(conventions: Conventions) -> Iterator[Case]:
    options: tuple[dict[str, Any], ...] = (
        {"advantage_scale": "group"},
        {"advantage_scale": "batch"},
        {"advantage_scale": "none"},
        {"advantage_baseline": "leave_one_out", "advantage_scale": "none"},
        {"advantage_ddof": 1 - conventions.advantage_ddof},
        {"reward_clip": 0.5},
    )
    rewards_B = torch.tensor([1.0, 0.0, 1.0, 0.0, 10.0, 0.0, 0.0, 0.0])
    for changes in options:
        yield Case(changes, changes=changes, rewards_B=rewards_B, group_ids_B=torch.arange(8) // 4)


@check("config.advantage_options", needs=("advantages",), cases=_advantage_options)
def advantage_options(adapter: Adapter, rewards_B: Tensor, group_ids_B: Tensor) -> None:
    """Each setting of baseline and scale computes its own formula: group, batch and none, mean and leave-one-out.

    Silent because every branch returns centred numbers: with two branches swapped, or one unreachable, the config says one
    thing and the run does another. Look at string comparisons, at `if scale:` on a string, and at the last `else`.
    """
    advantages_B = adapter.advantages(rewards_B.clone(), group_ids_B.clone())
    expected_B = reference.advantages(rewards_B.double(), group_ids_B, adapter.conventions)
    assert_close(advantages_B, expected_B, "with these options advantages follow another formula", scale=10)


def _aggregations(rng: Generator) -> Iterator[Case]:
    names = [name for name in get_args(Aggregation) if name != "constant"]
    constant = {"aggregation": "constant", "aggregation_constant": 7.0}
    return _batches(rng, *({"aggregation": name} for name in names), constant)


@check("config.aggregation_options", needs=("policy_loss",), cases=_aggregations)
def aggregation_options(adapter: Adapter, batch: PolicyBatch, told: str) -> None:
    """Each aggregation weights tokens as defined, also when a row has no trained token.

    Silent because two aggregations differ only by how much long and short completions count: with the names swapped, or a
    sum divided by the length after all, the length bias stays and nothing fails. Look at what each branch divides by.
    """
    assert_declared_loss(adapter, batch, told)


def _clips(rng: Generator) -> Iterator[Case]:
    return _batches(
        rng,
        {"clip_low": 0.1, "clip_high": 0.4},
        {"clip_low": 0.4, "clip_high": 0.1},
        {"clip_low": None, "clip_high": None},
        {"dual_clip": 1.5},
        {"ratio_level": "sequence"},
        {"ratio_level": "token"},
    )


@check("config.clip_options", needs=("policy_loss",), cases=_clips)
def clip_options(adapter: Adapter, batch: PolicyBatch, told: str) -> None:
    """Both clipping bounds, the dual clip and the ratio level take effect, each on its own side.

    Silent because few tokens are clipped at all: a bound that is ignored or used on both sides changes a percent of the
    gradient. Look for the one epsilon used twice, and for the upper bound's default.
    """
    assert_declared_loss(adapter, batch, told)


def _kls(rng: Generator) -> Iterator[Case]:
    choices: list[dict[str, Any]] = [{"kl_estimator": name} for name in ("k1", "k2", "k3", "abs")]
    choices += [{"kl_input_clamp": 0.3}, {"kl_output_clamp": 0.1}]
    choices += [{"kl_direction": name} for name in get_args(KlDirection)]
    choices += [
        {"kl_score_term": score, "kl_ratio_weighted": weighted}
        for score, weighted in ((False, False), (True, False), (False, True))
    ]
    on = [{"kl_coef": 0.5, **choice} for choice in choices]
    return _batches(rng, *on, {"kl_coef": 0.0}, {"kl_coef": 0.05}, {"kl_coef": 0.5, "kl_placement": "reward"})


@check("config.kl_options", needs=("policy_loss",), cases=_kls)
def kl_options(adapter: Adapter, batch: PolicyBatch, told: str) -> None:
    """The KL coefficient, estimator and placement take effect: KL in the reward adds no loss term.

    Silent because the coefficient is small: two switches tied together, or an estimator that falls back to the default,
    change the third digit. Look at `if not use_kl_loss`, and at names that are matched by prefix.
    """
    assert_declared_loss(adapter, batch, told)


def _entropies(rng: Generator) -> Iterator[Case]:
    return _batches(rng, {"entropy_coef": 0.1}, {"entropy_coef": 0.0})


@check("config.entropy_option", needs=("policy_loss",), cases=_entropies)
def entropy_option(adapter: Adapter, batch: PolicyBatch, told: str) -> None:
    """The entropy bonus is subtracted from the loss with its coefficient.

    Silent because with the sign wrong the policy merely collapses a little faster, as policies do, and without a gradient
    the bonus is only logged. Look at the sign, at `no_grad`, at the mask of the mean, and at a coefficient whose default
    is not zero.
    """
    assert_declared_loss(adapter, batch, told)
    entropy_BT = torch.ones_like(batch.logprobs).detach().requires_grad_()
    exact_BT = entropy_BT.detach().double().requires_grad_()
    exact = reference.policy_loss(replace(double(batch), entropy=exact_BT), adapter.conventions)
    gradient_BT = gradient(adapter.policy_loss(replace(batch, entropy=entropy_BT)).loss, entropy_BT)
    told = f"with {told} the gradient of the entropy is another one"
    assert_close(gradient_BT, gradient(exact.loss, exact_BT), told, quantity="gradient of the entropy")


def _corrections(rng: Generator) -> Iterator[Case]:
    bounds = {"importance_low": 0.8, "importance_high": 1.1}
    choices: list[dict[str, Any]] = [
        {"importance_level": level, "importance_mode": mode, **bounds}
        for level in ("token", "sequence")
        for mode in ("truncate", "mask")
    ]
    return _batches(rng, *choices, {"importance_level": "none"})


@check("config.correction_options", needs=("policy_loss",), cases=_corrections)
def correction_options(adapter: Adapter, batch: PolicyBatch, told: str) -> None:
    """The correction for sampler mismatch weights the policy term, at its level and bound, and can be switched off.

    Silent because weights near one change little until the engine drifts. Look at which tensors the weights multiply (the
    policy term, not the KL), and at a threshold that is read and never applied.
    """
    assert_declared_loss(adapter, batch, told)


def _terms(rng: Generator) -> Iterator[Case]:
    batch = inputs.policy_batch(rng, 2, 3, (3, 1))
    off = {"kl_coef": 0.0, "entropy_coef": 0.0, "importance_level": "none"}
    for name in ("ref_logprobs", "sampler_logprobs", "entropy"):
        other = replace(batch, **{name: getattr(batch, name) - 3.0})
        yield Case(name, changes=off, batch=batch, other=other, name=name)


@check("config.zero_is_off", needs=("policy_loss",), cases=_terms)
def zero_is_off(adapter: Adapter, batch: PolicyBatch, other: PolicyBatch, name: str) -> None:
    """A coefficient of 0 switches its term off: the loss no longer depends on the term's inputs.

    Silent because `coefficient or default` turns an explicit 0 into the default: the ablation without KL is run with KL.
    Look for `or`, and for truth tests on numbers where None is meant.
    """
    before, loss = adapter.policy_loss(batch).loss, adapter.policy_loss(other).loss
    told = f"with its coefficient at 0, 3 nats less in {name} changed the"
    assert_close(loss, before, f"{told} loss")
    gradients_BT = gradient(loss, other.logprobs), gradient(before, batch.logprobs)
    assert_close(*gradients_BT, f"{told} gradient", quantity="gradient")
