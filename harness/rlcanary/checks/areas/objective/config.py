"""Options: every declared option has its effect, options differ from each other, and 0 and None keep their meaning."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, get_args

import torch
from torch import Generator, Tensor

from rlcanary import reference
from rlcanary.checks.asserts import assert_close, assert_metrics, gradient, soft, unless_raised
from rlcanary.checks.case import Case
from rlcanary.checks.check import check
from rlcanary.checks.examples import Draw
from rlcanary.checks.worlds import inputs, rows
from rlcanary.checks.worlds.oracle import double, exact_update
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.batch import LossOutput, PolicyBatch
from rlcanary.contract.conventions import (
    Aggregation,
    Baseline,
    Conventions,
    EpsMode,
    KlDirection,
    KlEstimator,
    Scale,
    SingletonGroup,
)


def _under(rng: Generator, *choices: dict[str, Any]) -> Iterator[Case]:
    for choice in choices:
        for shape in ((1, 1, (1,)), (3, 4, None), inputs.WITH_EMPTY_ROW):
            batch = inputs.policy_batch(rng, *shape)
            yield Case(batch, within=choice, changes=choice, batch=batch, told=Case(choice).label)


def _drawn_under(choices: Sequence[dict[str, Any]]) -> Draw:
    def draw(conventions: Conventions, rng: Generator, size: int) -> Case:
        choice = rows.one_of(rng, choices)
        batch = rows.policy_batch(rng, size, conventions.replace(**choice))
        return Case(changes=choice, batch=batch, told=Case(choice).label)

    return draw


def _assert_declared(adapter: Adapter, batch: PolicyBatch, told: str) -> tuple[LossOutput, dict[str, float]]:
    """Assert loss and gradient; return what the code gives, and the metrics that it should log."""
    expected, expected_BT = exact_update(batch, adapter.conventions)
    output = adapter.policy_loss(inputs.fresh(batch))
    with soft():
        assert_close(output.loss, expected.loss, f"with {told} the loss is another one")
    gradient_BT = gradient(output.loss, batch.logprobs)
    with soft():
        assert_close(gradient_BT, expected_BT, f"with {told} the gradient is another one", quantity="gradient")
    return output, expected.metrics


def _advantage_choices(conventions: Conventions) -> Iterator[Case]:
    rewards_B, group_ids_B = torch.tensor([1.0, 0.0, 1.0, -2.0, 10.0, 0.0, 0.0, 0.0]), torch.arange(8) // 4
    choices: tuple[dict[str, Any], ...] = (
        *({"advantage_scale": name} for name in ("group", "batch", "none")),
        {"advantage_baseline": "leave_one_out", "advantage_scale": "none"},
        {"advantage_baseline": "leave_one_out", "advantage_scale": "group", "advantage_std_of_others": False},
        {"advantage_ddof": 1 - conventions.advantage_ddof},
        {"reward_clip": 0.5},
    )
    for choice in choices:
        told = Case(choice).label
        yield Case(within=choice, changes=choice, rewards_B=rewards_B, group_ids_B=group_ids_B, told=told)
    # Deviations below and above the epsilon, none at all, and a prompt with one completion.
    rewards_B = torch.tensor([0.0, 0.05, 0.1, 1.0, 2.0, 3.0, 0.7, 0.7, 0.7, 2.0])
    group_ids_B = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2, 3])
    relative = [
        {"advantage_baseline": baseline, "advantage_scale": scale}
        for baseline in get_args(Baseline)
        for scale in get_args(Scale)
    ]
    alone = [{**choice, "singleton_group": name} for choice in relative for name in get_args(SingletonGroup)]
    divided = [
        {"advantage_baseline": baseline, "advantage_scale": "group", "advantage_eps_mode": mode, "advantage_eps": 0.2}
        for baseline in get_args(Baseline)
        for mode in get_args(EpsMode)
    ]
    for choice in (*alone, *divided):
        told = Case(choice).label
        yield Case("uneven groups", choice, changes=choice, rewards_B=rewards_B, group_ids_B=group_ids_B, told=told)
    yield from _other_settings()


def _other_settings() -> Iterator[Case]:
    """Yield uneven groups under every formula that the code may be set to."""
    # Sixteenths, whose sums are exact; in the group of three and in that of two the others of a row may be equal.
    rewards_B = torch.tensor([2.0, 0.0, 1.0, 1.0, 3.0, 0.5, 0.75, 0.5, 0.5, 0.25, 0.75, -4.0, 0.0625, 1.5])
    given = {"rewards_B": rewards_B, "group_ids_B": torch.tensor([5, 5, 5, 5, 5, 0, 0, 0, 3, 3, 3, 3, 1, 1])}

    def case(**changes: Any) -> Case:
        told = Case(changes).label
        return Case("uneven groups", changes, changes=changes, told=told, **given)

    for baseline, scale in product(get_args(Baseline), get_args(Scale)):
        changes = {"advantage_baseline": baseline, "advantage_scale": scale}
        for ddof in (0, 1) if scale != "none" else ():
            yield case(**changes, advantage_ddof=ddof)
        for mode in get_args(EpsMode) if scale != "none" else ():
            # Above the deviation of some groups and below that of others.
            yield case(**changes, advantage_eps_mode=mode, advantage_eps=0.4)
        if scale == "none":
            yield case(**changes)
    for clip in (0.5, 1.25):
        yield case(reward_clip=clip)


@check("config.advantage_options", needs=("advantages",), cases=_advantage_choices)
def advantage_options(adapter: Adapter, rewards_B: Tensor, group_ids_B: Tensor, told: str) -> None:
    """Each setting of baseline and scale computes its own formula: group, batch and none, mean and leave-one-out.

    Silent because every branch returns centred numbers: with two branches swapped, or one unreachable, the config says one
    thing and the run does another. Look at string comparisons, at `if scale:` on a string, and at the last `else`.
    """
    expected_B = reference.advantages(rewards_B.double(), group_ids_B, adapter.conventions)
    advantages_B = adapter.advantages(rewards_B, group_ids_B)
    assert_close(advantages_B, expected_B, f"with {told} advantages follow another formula", scale=10)


def _aggregations(rng: Generator) -> Iterator[Case]:
    names: tuple[dict[str, Any], ...] = tuple(
        {"aggregation": name} for name in get_args(Aggregation) if name != "constant"
    )
    choices = *names, {"aggregation": "constant", "aggregation_constant": 7.0}
    yield from _under(rng, *choices)
    # Two groups that differ in the number of their tokens, one without any, and none with any.
    for label, lengths in (
        ("uneven groups", (5, 1, 2, 1)),
        ("a group of nothing", (5, 1, 0, 0)),
        ("nothing", (0, 0, 0, 0)),
    ):
        batch = inputs.policy_batch(rng, 4, 5, lengths)
        for choice in choices:
            yield Case(label, within=choice, changes=choice, batch=batch, told=Case(choice).label)


@check("config.aggregation_options", needs=("policy_loss",), cases=_aggregations)
def aggregation_options(adapter: Adapter, batch: PolicyBatch, told: str) -> None:
    """Each aggregation weights tokens as defined, also when a row has no trained token.

    Silent because two aggregations differ only by how much long and short completions count: with the names swapped, or a
    sum divided by the length after all, the length bias stays and nothing fails. Look at what each branch divides by.
    """
    _assert_declared(adapter, batch, told)


_BOUNDS: tuple[dict[str, Any], ...] = (
    {"clip_low": 0.1, "clip_high": 0.4},
    {"clip_low": 0.4, "clip_high": 0.1},
    {"clip_low": None, "clip_high": None},
    {"dual_clip": 1.5},
    {"clip_bounds": "dynamic", "clip_low": 0.05, "clip_high": 0.1},
    {"objective": "cispo", "clip_low": 0.1, "clip_high": 0.4},
    {"objective": "cispo", "clip_low": None, "clip_high": 0.1},
)
_OBJECTIVES: tuple[dict[str, Any], ...] = (
    {"objective": "reinforce"},
    # Codebases have these two with the aggregation of their papers alone.
    {"objective": "gmpo", "clip_low": 0.1, "clip_high": 0.4, "aggregation": "sequence_mean"},
    {"objective": "sapo", "aggregation": "sequence_mean"},
    {
        "objective": "sapo",
        "aggregation": "sequence_mean",
        "sapo_temperature_positive": 2.0,
        "sapo_temperature_negative": 0.5,
    },
    {"off_policy_mask": 0.05},
    {"off_policy_mask": -0.05},
    *({"top_entropy": share} for share in (0.2, 0.6, 1.0)),
)
_CLIP_OPTIONS = (*_BOUNDS, *({"ratio_level": level} for level in ("sequence", "token")), *_OBJECTIVES)


def _clip_choices(conventions: Conventions, rng: Generator) -> Iterator[Case]:
    yield from _under(rng, *_CLIP_OPTIONS)
    for choice in _BOUNDS:
        for ratio, sign in product(inputs.ratios_around_bounds(conventions.replace(**choice)), (1.0, -1.0)):
            batch, told = inputs.one_row([math.log(ratio)], sign), Case(choice).label
            yield Case(
                f"ratio {ratio:.3g}", f"advantage {sign:g}", within=choice, changes=choice, batch=batch, told=told
            )


@check("config.clip_options", needs=("policy_loss",), cases=_clip_choices, draws=_drawn_under(_CLIP_OPTIONS))
def clip_options(adapter: Adapter, batch: PolicyBatch, told: str) -> None:
    """Both clipping bounds, the dual clip and the ratio level take effect, each on its own side.

    Silent because few tokens are clipped at all: a bound that is ignored or used on both sides changes a percent of the
    gradient. Look for the one epsilon used twice, and for the upper bound's default.
    """
    output, metrics = _assert_declared(adapter, batch, told)
    assert_metrics(output, metrics, f"with {told}")


_KL_OPTIONS: tuple[dict[str, Any], ...] = (
    *({"kl_coef": 0.5, "kl_estimator": name} for name in get_args(KlEstimator)),
    {"kl_coef": 0.5, "kl_input_clamp": 0.3},
    {"kl_coef": 0.5, "kl_output_clamp": 0.1},
    *({"kl_coef": 0.5, "kl_direction": name} for name in get_args(KlDirection)),
    {"kl_coef": 0.5, "kl_score_term": False, "kl_ratio_weighted": False},
    {"kl_coef": 0.5, "kl_score_term": True, "kl_ratio_weighted": False},
    {"kl_coef": 0.5, "kl_score_term": False, "kl_ratio_weighted": True},
    *({"kl_coef": weight} for weight in (0.0, 0.05, 1.0)),
    {"kl_coef": 0.5, "kl_placement": "reward"},
    *({"kl_coef": 0.5, "kl_aggregation": name} for name in ("token_mean", "sequence_mean")),
    # A clamp holds the weight of its token too, and its score-function part.
    *(
        {"kl_coef": 0.5, "kl_score_term": not is_weighted, "kl_ratio_weighted": is_weighted, clamp: bound}
        for is_weighted in (True, False)
        for clamp, bound in (("kl_output_clamp", 0.1), ("kl_input_clamp", 0.3))
    ),
)


def _kl_choices(rng: Generator) -> Iterator[Case]:
    yield from _under(rng, *_KL_OPTIONS)
    # So far from the reference, on both sides, that an exponential overflows unless the clamp comes before it.
    far_BT = torch.tensor([[-100.5, -0.5, -1.0], [-1.5, -0.25, -2.0]])
    batch = replace(
        inputs.policy_batch(rng, 2, 3, (3, 1)),
        logprobs=far_BT.clone().requires_grad_(),
        old_logprobs=far_BT - 0.1,
        ref_logprobs=torch.tensor([[-0.5, -100.5, -1.1], [-1.25, -0.5, -2.0]]),
    )
    for name in get_args(KlDirection):
        choice = {"kl_coef": 0.5, "kl_input_clamp": 0.3, "kl_direction": name}
        told = Case(choice).label
        yield Case("100 nats from the reference", within=choice, changes=choice, batch=batch, told=told)
    weighted = {"kl_coef": 0.5, "kl_score_term": False, "kl_ratio_weighted": True, "ratio_level": "sequence"}
    yield from _under(rng, weighted)


@check("config.kl_options", needs=("policy_loss",), cases=_kl_choices)
def kl_options(adapter: Adapter, batch: PolicyBatch, told: str) -> None:
    """The KL coefficient, estimator and placement take effect: KL in the reward adds no loss term.

    Silent because the coefficient is small: two switches tied together, or an estimator that falls back to the default,
    change the third digit. Look at `if not use_kl_loss`, and at names that are matched by prefix.
    """
    output, metrics = _assert_declared(adapter, batch, told)
    assert_metrics(output, {name: metrics[name] for name in ("kl",) if name in metrics}, f"with {told}")


_ENTROPY_OPTIONS: tuple[dict[str, Any], ...] = (
    *({"entropy_coef": weight} for weight in (0.1, 0.0, 1.0)),
    *({"entropy_coef": 0.1, "entropy_aggregation": name} for name in ("token_mean", "sequence_mean")),
)


def _entropy_choices(rng: Generator) -> Iterator[Case]:
    for choice in _ENTROPY_OPTIONS:
        yield from _under(rng, choice)
        batch = inputs.policy_batch(rng, 2, 3, (3, 1))
        assert batch.entropy is not None
        leaf_BT, told = batch.entropy.clone().requires_grad_(), Case(choice).label
        yield Case("gradient of the entropy", within=choice, changes=choice, batch=batch, told=told, entropy_BT=leaf_BT)


@check("config.entropy_option", needs=("policy_loss",), cases=_entropy_choices)
def entropy_option(adapter: Adapter, batch: PolicyBatch, told: str, entropy_BT: Tensor | None = None) -> None:
    """The entropy bonus is subtracted from the loss with its coefficient.

    Silent because with the sign wrong the policy merely collapses a little faster, as policies do, and without a gradient
    the bonus is only logged. Look at the sign, at `no_grad`, at the mask of the mean, and at a coefficient whose default
    is not zero.
    """
    if entropy_BT is None:
        _assert_declared(adapter, batch, told)
        return
    exact_BT = entropy_BT.detach().double().requires_grad_()
    exact = reference.policy_loss(replace(double(batch), entropy=exact_BT), adapter.conventions).loss
    loss = adapter.policy_loss(inputs.fresh(replace(batch, entropy=entropy_BT))).loss
    told = f"with {told} the gradient of the entropy is another one"
    assert_close(gradient(loss, entropy_BT), gradient(exact, exact_BT), told, quantity="gradient")


_CORRECTION_OPTIONS: tuple[dict[str, Any], ...] = (
    *(
        {"importance_level": level, "importance_mode": mode, "importance_low": 0.8, "importance_high": 1.1}
        for level in ("token", "sequence")
        for mode in ("truncate", "mask")
    ),
    {"importance_level": "none"},
)
# What concerns the policy term alone leaves the others as they are.
_BESIDE_OTHER_TERMS: tuple[dict[str, Any], ...] = tuple(
    {"kl_coef": 0.5, "entropy_coef": 0.1, **choice}
    for choice in (
        {"importance_level": "token", "importance_mode": "truncate", "importance_low": 0.8, "importance_high": 1.1},
        {"top_entropy": 0.6},
        {"off_policy_mask": 0.05},
    )
)


@check(
    "config.correction_options",
    needs=("policy_loss",),
    cases=lambda rng: _under(rng, *_CORRECTION_OPTIONS, *_BESIDE_OTHER_TERMS),
    draws=_drawn_under(_CORRECTION_OPTIONS),
)
def correction_options(adapter: Adapter, batch: PolicyBatch, told: str) -> None:
    """The correction for sampler mismatch weights the policy term, at its level and bound, and can be switched off.

    So do a mask of tokens far off policy, and one of high entropy, which the entropy bonus has too.

    Silent because weights near one change little until the engine drifts. Look at which tensors the weights multiply (the
    policy term, not the KL), and at a threshold that is read and never applied.
    """
    output, metrics = _assert_declared(adapter, batch, told)
    if adapter.conventions.kl_coef and adapter.conventions.entropy_coef:
        assert_metrics(output, {"policy_loss": metrics["policy_loss"]}, f"with {told}")


def _switched_off(rng: Generator) -> Iterator[Case]:
    off = {"kl_coef": 0.0, "entropy_coef": 0.0, "importance_level": "none"}
    batch = inputs.policy_batch(rng, 2, 3, (3, 1))
    for name in ("ref_logprobs", "sampler_logprobs", "entropy"):
        yield Case(name, changes=off, batch=batch, name=name)
        yield Case(f"{name} absent", changes=off, batch=batch, name=name, is_absent=True)


@check("config.zero_is_off", needs=("policy_loss",), cases=_switched_off)
def zero_is_off(adapter: Adapter, batch: PolicyBatch, name: str, is_absent: bool = False) -> None:
    """A coefficient of 0 switches its term off: the loss no longer depends on the term's inputs.

    Silent because `coefficient or default` turns an explicit 0 into the default: the ablation without KL is run with KL.
    Look for `or`, and for truth tests on numbers where None is meant.
    """
    changed = inputs.fresh(batch)
    if is_absent:
        setattr(changed, name, None)
    else:
        getattr(changed, name).sub_(3.0)
    before = adapter.policy_loss(inputs.fresh(batch)).loss
    output = unless_raised(adapter.policy_loss, changed) if is_absent else adapter.policy_loss(changed)
    if output is None:
        return  # code that is always given the values may stop without them
    after = output.loss
    told = f"with its coefficient at 0, {f'no {name}' if is_absent else f'3 nats less in {name}'} changed the"
    with soft():
        assert_close(after, before, f"{told} loss")
    before_BT, after_BT = gradient(before, batch.logprobs), gradient(after, changed.logprobs)
    assert_close(after_BT, before_BT, f"{told} gradient", quantity="gradient")
