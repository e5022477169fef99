"""One optimizer update as a whole: the declared gradient reaches every parameter, once, at the scheduled learning rate.

Each parameter moves by the optimizer's full step, and nothing else moves.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Generator

from rlcanary.checks.asserts import assert_true, assert_unchanged
from rlcanary.checks.case import Case
from rlcanary.checks.check import check
from rlcanary.checks.devices import cuda_generators
from rlcanary.checks.worlds.groups import sampled as drawn_groups
from rlcanary.checks.worlds.training.descent import (
    Scene,
    assert_gradients,
    expect_declared,
    expect_same,
    scene,
    sides,
    step_gradients,
    twin,
    with_kl,
    with_others,
)
from rlcanary.checks.worlds.training.states import in_precision_of, is_coarse, nudged
from rlcanary.checks.worlds.training.tiny_trainer import (
    GROUPS,
    PAIR,
    TOOLS,
    UNEVEN,
    damped_policy,
    sampled,
    state_of,
    tiny_policy,
)
from rlcanary.checks.worlds.training.updates import declared
from rlcanary.contract.adapter import Adapter, NotProvided
from rlcanary.contract.batch import Group
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.layers import copied


def _each_side(conventions: Conventions) -> Iterator[Case]:
    yield from (Case(told, is_clipped=is_clipped) for told, is_clipped in sides(conventions))


def _off_policy(conventions: Conventions) -> Iterator[Case]:
    for groups in (PAIR, GROUPS):
        for told, is_clipped in sides(conventions):
            yield Case(f"{len(groups)} prompts", told, groups=groups, is_clipped=is_clipped)


def _older_samples(conventions: Conventions) -> Iterator[Case]:
    yield from _off_policy(conventions)
    (other,) = {"sampler", "trainer"} - {conventions.old_logprobs}
    # A correction for the sampler has an effect where the ratio is taken against the trainer's logprobs.
    corrected = {"old_logprobs": "trainer", "importance_level": "token", "importance_high": 1.1}
    credit = ({"token_credit": "returns", "discount": 0.8}, {"baseline_weighting": "tokens"}, {"whitening": "mean_std"})
    for choice in ({"old_logprobs": other}, corrected, {"aggregation": "group_token_mean"}, *credit):
        yield Case(choice, changes=choice, groups=UNEVEN, is_clipped=False)


def _on_policy(conventions: Conventions) -> Iterator[Case]:
    for choice in ({}, {"temperature": 0.6}, {"kl_coef": 0.3}, {"temperature": 0.6, "kl_coef": 0.3}):
        for case in _off_policy(conventions):
            yield Case(choice, case.label, changes=choice, **case.inputs)
    yield Case("tool tokens", groups=TOOLS, is_clipped=False)
    yield Case("groups of 3, 5 and 2", groups=UNEVEN, is_clipped=False)
    kl = {"kl_coef": conventions.kl_coef or 0.3}
    # In the reward, the rounding of the KL would be divided by a tiny spread.
    in_loss: dict[str, Any] = {**kl, "kl_placement": "loss"}
    bonus: dict[str, Any] = {"kl_coef": 0.0, "entropy_coef": 0.1}
    along_rows: dict[str, Any] = {"kl_coef": 0.3, "kl_placement": "reward", "token_credit": "returns", "discount": 0.8}
    yield Case(along_rows, changes=along_rows, groups=UNEVEN, is_clipped=False)
    equal = [replace(each, rewards=[0.5] * 4) for each in GROUPS]
    for told, is_clipped in sides(conventions):
        for estimator, weight in ((conventions.kl_estimator, 0.3), ("k1", 1.0)):
            changes = {"kl_coef": weight, "kl_placement": "reward", "kl_estimator": estimator}
            yield Case("tool tokens", told, changes, changes=changes, groups=[*GROUPS, *TOOLS], is_clipped=is_clipped)
        for label, changes in (("equal rewards", in_loss), ("entropy alone", bonus)):
            yield Case(label, told, changes=changes, groups=equal, is_clipped=is_clipped)
        yield Case("given reference logprobs", told, changes=kl, groups=GROUPS, is_clipped=is_clipped, is_given=True)


def _drawn(rng: Generator, size: int) -> Case:
    return Case(groups=drawn_groups(rng, min(size, 4)), is_clipped=False)


@check("step.declared_gradient", needs=("train_step",), cases=_on_policy, draws=_drawn)
def declared_gradient(
    adapter: Adapter, model: Any, groups: list[Group], is_clipped: bool | None, is_given: bool = False
) -> None:
    """On policy, the gradient that reaches the optimizer is that of the declared objective, at any temperature.

    Silent because the step can be wrong although each part is right: a temperature that one path omits, micro-batches
    whose gradients are weighted wrongly, a division after backward, a loss in half precision. The logged loss is finite
    and falls. Look at everything between the batch and `optimizer.step()`.
    """
    start = scene(adapter, model, groups, is_clipped=is_clipped, brings_reference=is_given)
    expect_declared(adapter, start, "on policy, the gradient is not the declared one")


def _kl_in_reward(conventions: Conventions) -> str | None:
    if conventions.kl_coef and conventions.kl_placement == "reward":
        return "the KL in the reward may be that of the older policy or of this one"
    return None


@check(
    "step.off_policy_gradient",
    needs=("train_step",),
    cases=_older_samples,
    applies=_kl_in_reward,
    worlds=("router", "capped_logits", "scaled_logits", "lora", "bfloat16"),
    draws=_drawn,
)
def off_policy_gradient(adapter: Adapter, model: Any, groups: list[Group], is_clipped: bool | None) -> None:
    """On samples of an older policy, ratios use the declared old logprobs and are clipped as declared.

    Silent because a ratio of 1 looks healthy: a ratio against logprobs that the trainer has just computed corrects for
    nothing, and clipping at other bounds trains on other tokens. Look at which logprobs the loss is given as old ones,
    and declare `old_logprobs` if they are the trainer's.
    """
    start = scene(adapter, model, groups, drift=0.5, is_clipped=is_clipped)
    expect_declared(adapter, start, "with samples of an older policy the gradient is not the declared one")


def _drops_out(conventions: Conventions) -> str | None:
    return "updates keep dropout on" if conventions.training_dropout else None


def _without_and_with_reference(conventions: Conventions) -> list[Case]:
    return [Case(), *with_kl(conventions)]


@check("step.dropout_is_off", needs=("train_step",), cases=_without_and_with_reference, applies=_drops_out)
def dropout_is_off(adapter: Adapter) -> None:
    """The update of a model with dropout, in training mode, is computed without dropout, as it was sampled.

    Silent because the sampler has no dropout: logprobs under a random mask make every ratio differ from 1, tokens are
    clipped by chance, and only a LoRA config mentions the 0.1. Look for a missing `eval()` before old and reference
    logprobs, and declare `training_dropout` if the loss keeps it on purpose.
    """
    start = scene(adapter, tiny_policy(dropout=0.3).train())
    message = "with dropout 0.3 in the model, the gradient is not that of the policy that sampled"
    expect_declared(adapter, start, message)


def _modes() -> Iterator[Case]:
    for is_on in (True, False):
        for old_logprobs in ("trainer", "sampler"):
            changes: dict[str, Any] = {"training_dropout": is_on, "old_logprobs": old_logprobs}
            yield Case(changes, changes=changes)


@check("step.training_mode", needs=("train_step",), cases=_modes)
def training_mode(adapter: Adapter) -> None:
    """Updates run in training mode if `training_dropout` is declared and else in evaluation mode; scoring never does.

    Silent because most layers are the same in both modes, and the others differ by noise. A layer that is smaller in
    training mode shows it without chance. Look for `eval()` before old logprobs that is not undone, so that from the second
    update on nothing drops out, and for old logprobs under dropout.
    """
    start = scene(adapter, damped_policy().train(), learning_rate=1e-7)
    if is_coarse(start.state.model) and _lies_at_a_bound(start, adapter.conventions):
        raise NotProvided("a ratio lies at a bound of clipping, and half precision may take it across")
    expect_declared(
        adapter, start, "with a layer that is smaller in training mode, the gradient is not the declared one"
    )
    expect_declared(adapter, with_others(adapter, start), "in the second update the mode is another one")


def _lies_at_a_bound(start: Scene, conventions: Conventions) -> bool:
    """Tell whether bounds a third nearer or further make another gradient."""

    def gradients(scale: float) -> Any:
        bounds = {name: getattr(conventions, name) for name in ("clip_low", "clip_high")}
        moved = conventions.replace(**{name: scale * bound for name, bound in bounds.items() if bound is not None})
        return declared(start.state.model, start.ref_model, start.batch, moved).gradients

    nearer, further = gradients(2 / 3), gradients(4 / 3)
    return any(not torch.equal(nearer[name], further[name]) for name in nearer)


def _drops_nothing(conventions: Conventions) -> str | None:
    return None if conventions.training_dropout else "updates have no dropout"


@check("step.reference_has_no_dropout", needs=("train_step",), cases=with_kl)
def reference_has_no_dropout(adapter: Adapter) -> None:
    """The reference model scores without its dropout, whether or not the policy keeps its own.

    Silent because the KL to a random part of the reference is a KL: it is noisy, and larger than the policy has moved. Look
    for one switch to training mode around both models, as with a reference that is the policy without its adapters.
    """
    policy = tiny_policy()
    ref_model = nudged(tiny_policy(dropout=0.3)).eval()
    state = state_of(adapter, *copied((policy, ref_model)))
    start = Scene(state, sampled(state.model, adapter.conventions), policy, in_precision_of(state, ref_model))
    expect_declared(adapter, start, "with dropout 0.3 in the reference model, the gradient is not the declared one")


@check("step.dropout_is_on", needs=("train_step",), applies=_drops_nothing)
def dropout_is_on(adapter: Adapter) -> None:
    """Dropout is on in updates if `training_dropout` is declared: updates of equal states differ with the random state.

    Silent because a policy trains well without its dropout, only not as configured. Look for an `eval()` before old
    logprobs that is not undone.
    """
    gradients = []
    for seed in (1, 2):
        start = scene(adapter, tiny_policy(dropout=0.3).train())
        with torch.random.fork_rng(devices=cuda_generators()):
            torch.manual_seed(seed)
            by_parameter = step_gradients(adapter, start)
        gradients.append(torch.cat([gradient.double().flatten() for gradient in by_parameter.values()]))
    difference = float((gradients[0] - gradients[1]).norm() / gradients[0].norm())
    told = (
        "with dropout 0.3 in the model and training_dropout declared, two random states gave gradients that differ by "
        f"{difference:.2g} of their length"
    )
    assert_true(difference > 1e-2, told, quantity="gradients")


def _bounds(conventions: Conventions) -> Iterator[Case]:
    for limit in (0.1, conventions.max_grad_norm):
        if limit is not None:
            for told, is_clipped in (("above", True), ("below", False)):
                label = f"{told} max_grad_norm {limit:g}"
                yield Case(label, changes={"max_grad_norm": limit}, told=label, is_clipped=is_clipped)


@check("step.gradient_norm_is_clipped", needs=("train_step",), cases=_bounds, worlds=("tied_and_biased", "lora"))
def gradient_norm_is_clipped(adapter: Adapter, model: Any, told: str, is_clipped: bool) -> None:
    """A gradient above max_grad_norm is scaled to exactly that norm; a smaller one is not changed.

    Silent because a gradient that is clipped by parts, by rank or by parameter group points elsewhere, and one that is not
    clipped matters only on the one batch in a thousand. Look at the tensors that the norm is taken over, and at when it
    is taken.
    """
    start = scene(adapter, model, GROUPS, is_clipped=is_clipped)
    expect_declared(adapter, start, f"{told} the gradient is not the declared one")


def _several_updates(conventions: Conventions) -> Iterator[Case]:
    yield Case(is_clipped=False)
    yield Case("above max_grad_norm", changes={"max_grad_norm": conventions.max_grad_norm or 0.1}, is_clipped=True)
    for case in with_kl(conventions):
        yield Case("with a reference", changes=case.changes, is_clipped=False)


@check("step.gradients_start_anew", needs=("train_step",), cases=_several_updates)
def gradients_start_anew(adapter: Adapter, model: Any, is_clipped: bool) -> None:
    """Each update's gradient comes from its own batch alone, clipped anew: also of other completions of the same items.

    Silent because the sum of old gradients acts like momentum, and logprobs of another completion are logprobs. Look for
    `zero_grad`, where it stands, for parameters that are listed once and used up, and for scores cached by item or shape.
    """
    start = scene(adapter, model, GROUPS, learning_rate=1e-7, is_clipped=is_clipped)
    step_gradients(adapter, start)
    expect_declared(adapter, with_others(adapter, start), "the gradient of the second update is not that of its batch")
    expect_declared(adapter, start, "the gradient of the third update is not that of its batch")


@check("step.repeatable", needs=("train_step",), cases=_each_side)
def repeatable(adapter: Adapter, model: Any, is_clipped: bool | None) -> None:
    """The same state and batch give the same update, regardless of training or random draws in between.

    Silent because a step that depends on earlier calls, through a cache, a running mean or the random state, only looks
    noisy. Look for attributes that survive a step, and for random numbers in scoring.
    """
    start = scene(adapter, model, is_clipped=is_clipped)
    first = step_gradients(adapter, start)
    step_gradients(adapter, start)
    torch.rand(7)
    second = step_gradients(adapter, twin(adapter, start, GROUPS))
    message = "the same state and batch gave another gradient after other work"
    assert_gradients(second, first, start.state.model, message)


@check("step.row_order", needs=("train_step",), cases=_each_side)
def row_order(adapter: Adapter, model: Any, is_clipped: bool | None) -> None:
    """The order of the groups in a batch, and of the completions in a group, does not change the update.

    Silent because rows are shuffled anyway. Look for a tensor that is sorted, filtered or balanced over workers while the
    rewards or the old logprobs beside it are not.
    """
    backwards = [
        Group(group.prompt_ids, list(group.completions)[::-1], list(group.rewards)[::-1]) for group in GROUPS[::-1]
    ]
    expect_same(adapter, model, is_clipped, backwards, "the order of the rows changed the gradient", {})


def _paddings(conventions: Conventions) -> Iterator[Case]:
    layouts: dict[str, dict[str, Any]] = {
        "more padding": {"completion_len_buckets": [9], "seq_len_buckets": [16]},
        # The id 11 is also an ordinary token of these completions.
        "another padding id": {"pad_token_id": 11},
        "padding on the left": {"prompt_padding": "left"},
    }
    for told, layout in layouts.items():
        for side, is_clipped in sides(conventions):
            yield Case(told, side, told=told, layout=layout, is_clipped=is_clipped)


@check("step.padding", needs=("train_step",), cases=_paddings, worlds=("learned_positions",))
def padding(adapter: Adapter, model: Any, told: str, layout: dict[str, Any], is_clipped: bool | None) -> None:
    """The amount, id and side of the padding do not change the update.

    Silent because the longest rows of a batch set its padding: a dependence on it looks like noise between batches.
    Look for means over positions, attention to padding, and masks that compare ids with the padding id.
    """
    expect_same(adapter, model, is_clipped, GROUPS, f"{told} changed the gradient", layout)


@check("step.batch_untouched", needs=("train_step",))
def batch_untouched(adapter: Adapter, model: Any) -> None:
    """Training on a batch does not modify its tensors.

    Silent because the first epoch is right; the second, or the metrics computed later, see normalised rewards or
    shifted ids. Look for operations in place on rewards, masks and logprobs.
    """
    start = scene(adapter, model)
    before = copy.deepcopy(start.batch)
    adapter.train_step(start.state, start.batch)
    assert_unchanged(start.batch, before, "train_step changed its batch in place")
