"""Options: every declared option has its effect, options differ from each other, and 0 and None keep their meaning."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Generator

from rlcanary import reference
from rlcanary.checks.check import check
from rlcanary.checks.subject import Derived, Subject
from rlcanary.checks.worlds import inputs as cases
from rlcanary.checks.worlds.oracle import double, exact_loss
from rlcanary.contract.conventions import KlDirection


def _options(subject: Subject, *choices: dict[str, Any]) -> Iterator[Subject]:
    """Yield the subject under each choice that its adapter can be set to."""
    for choice in choices:
        with subject.case(choice):
            yield subject.configured(**choice)


def _expect_declared_loss(subject: Subject, rng: Generator, told: str) -> None:
    for rows, width, lengths in ((1, 1, (1,)), (2, 3, (3, 1)), cases.WITH_EMPTY_ROW):
        batch = cases.policy_batch(rng, rows, width, lengths)
        with subject.case(batch):
            loss, gradient_BT = exact_loss(batch, subject.conventions)
            call = subject.call("policy_loss", batch)
            call.expect(loss, f"with {told} the loss is another one")
            call.expect_gradient(gradient_BT, f"with {told} the gradient is another one", "logprobs")


@check("config.advantage_options", needs=("advantages",))
def advantage_options(subject: Subject, rng: Generator) -> None:
    """Each setting of baseline and scale computes its own formula: group, batch and none, mean and leave-one-out.

    Silent because every branch returns centred numbers: with two branches swapped, or one unreachable, the config says one
    thing and the run does another. Look at string comparisons, at `if scale:` on a string, and at the last `else`.
    """
    rewards_B = torch.tensor([1.0, 0.0, 1.0, 0.0, 10.0, 0.0, 0.0, 0.0])
    group_ids_B = torch.arange(8) // 4
    for option in _options(
        subject,
        {"advantage_scale": "group"},
        {"advantage_scale": "batch"},
        {"advantage_scale": "none"},
        {"advantage_baseline": "leave_one_out", "advantage_scale": "none"},
        {"advantage_ddof": 1 - subject.conventions.advantage_ddof},
        {"reward_clip": 0.5},
    ):
        with subject.case():
            call = option.call("advantages", rewards_B, group_ids_B)
            expected_B = reference.advantages(rewards_B.double(), group_ids_B, option.conventions)
            call.expect(expected_B, f"with {_told(option)} advantages follow another formula", scale=10)


@check("config.aggregation_options", needs=("policy_loss",))
def aggregation_options(subject: Subject, rng: Generator) -> None:
    """Each aggregation weights tokens as defined, also when a row has no trained token.

    Silent because two aggregations differ only by how much long and short completions count: with the names swapped, or a
    sum divided by the length after all, the length bias stays and nothing fails. Look at what each branch divides by.
    """
    names = (
        "token_mean",
        "sequence_mean",
        "sequence_mean_nonempty",
        "sequence_sum",
        "sequence_sum_nonempty",
        "group_token_mean",
    )
    choices = [{"aggregation": name} for name in names]
    for option in _options(subject, *choices, {"aggregation": "constant", "aggregation_constant": 7.0}):
        _expect_declared_loss(option, rng, _told(option))


@check("config.clip_options", needs=("policy_loss",))
def clip_options(subject: Subject, rng: Generator) -> None:
    """Both clipping bounds, the dual clip and the ratio level take effect, each on its own side.

    Silent because few tokens are clipped at all: a bound that is ignored or used on both sides changes a percent of the
    gradient. Look for the one epsilon used twice, and for the upper bound's default.
    """
    for option in _options(
        subject,
        {"clip_low": 0.1, "clip_high": 0.4},
        {"clip_low": 0.4, "clip_high": 0.1},
        {"clip_low": None, "clip_high": None},
        {"dual_clip": 1.5},
        {"ratio_level": "sequence"},
        {"ratio_level": "token"},
    ):
        _expect_declared_loss(option, rng, _told(option))


@check("config.kl_options", needs=("policy_loss",))
def kl_options(subject: Subject, rng: Generator) -> None:
    """The KL coefficient, estimator and placement take effect: KL in the reward adds no loss term.

    Silent because the coefficient is small: two switches tied together, or an estimator that falls back to the default,
    change the third digit. Look at `if not use_kl_loss`, and at names that are matched by prefix.
    """
    choices: list[dict[str, Any]] = [{"kl_coef": 0.5, "kl_estimator": name} for name in ("k1", "k2", "k3", "abs")]
    choices += [{"kl_coef": 0.5, "kl_input_clamp": 0.3}, {"kl_coef": 0.5, "kl_output_clamp": 0.1}]
    choices += [{"kl_coef": 0.5, "kl_direction": name} for name in get_args(KlDirection)]
    choices += [
        {"kl_coef": 0.5, "kl_score_term": score, "kl_ratio_weighted": weighted}
        for score, weighted in ((False, False), (True, False), (False, True))
    ]
    for option in _options(
        subject, *choices, {"kl_coef": 0.0}, {"kl_coef": 0.05}, {"kl_coef": 0.5, "kl_placement": "reward"}
    ):
        _expect_declared_loss(option, rng, _told(option))


@check("config.entropy_option", needs=("policy_loss",))
def entropy_option(subject: Subject, rng: Generator) -> None:
    """The entropy bonus is subtracted from the loss with its coefficient.

    Silent because with the sign wrong the policy merely collapses a little faster, as policies do, and without a gradient
    the bonus is only logged. Look at the sign, at `no_grad`, at the mask of the mean, and at a coefficient whose default
    is not zero.
    """
    for option in _options(subject, {"entropy_coef": 0.1}, {"entropy_coef": 0.0}):
        _expect_declared_loss(option, rng, _told(option))
        _expect_entropy_gradient(option, rng)


def _expect_entropy_gradient(subject: Subject, rng: Generator) -> None:
    batch = cases.policy_batch(rng, 2, 3, (3, 1))
    assert batch.entropy is not None
    batch = replace(batch, entropy=batch.entropy.requires_grad_())
    exact = double(batch)
    assert exact.entropy is not None
    entropy_BT = exact.entropy.requires_grad_()
    gradient_BT = torch.zeros_like(entropy_BT)
    if subject.conventions.entropy_coef:
        (gradient_BT,) = torch.autograd.grad(reference.policy_loss(exact, subject.conventions).loss, entropy_BT)
    with subject.case("gradient of the entropy"):
        call = subject.call("policy_loss", batch)
        call.expect_gradient(
            gradient_BT, f"with {_told(subject)} the gradient of the entropy is another one", "entropy"
        )


@check("config.correction_options", needs=("policy_loss",))
def correction_options(subject: Subject, rng: Generator) -> None:
    """The correction for sampler mismatch weights the policy term, at its level and bound, and can be switched off.

    Silent because weights near one change little until the engine drifts. Look at which tensors the weights multiply (the
    policy term, not the KL), and at a threshold that is read and never applied.
    """
    bounds = {"importance_low": 0.8, "importance_high": 1.1}
    choices: list[dict[str, Any]] = [
        {"importance_level": level, "importance_mode": mode, **bounds}
        for level in ("token", "sequence")
        for mode in ("truncate", "mask")
    ]
    for option in _options(subject, *choices, {"importance_level": "none"}):
        _expect_declared_loss(option, rng, _told(option))


@check("config.zero_is_off", needs=("policy_loss",))
def zero_is_off(subject: Subject, rng: Generator) -> None:
    """A coefficient of 0 switches its term off: the loss no longer depends on the term's inputs.

    Silent because `coefficient or default` turns an explicit 0 into the default: the ablation without KL is run with KL.
    Look for `or`, and for truth tests on numbers where None is meant.
    """
    off = subject.configured(kl_coef=0.0, entropy_coef=0.0, importance_level="none")
    batch = cases.policy_batch(rng, 2, 3, (3, 1))
    before = off.call("policy_loss", batch)
    for name in ("ref_logprobs", "sampler_logprobs", "entropy"):
        with subject.case(name):
            call = off.call("policy_loss", replace(batch, **{name: getattr(batch, name) - 3.0}))
            told = f"with its coefficient at 0, 3 nats less in {name} changed the"
            call.expect(before.value, f"{told} loss", derived=Derived(before))
            call.expect_gradient(before.gradient("logprobs"), f"{told} gradient", "logprobs", derived=Derived(before))


def _told(subject: Subject) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in subject.changes.items()) or "the declared conventions"
