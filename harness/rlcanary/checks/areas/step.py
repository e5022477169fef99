"""One optimizer update as a whole: the declared gradient reaches every parameter, once, at the scheduled learning rate."""

from typing import Any

import torch
from torch import Generator

from rlcanary.checks.check import check
from rlcanary.checks.literal import literal
from rlcanary.checks.subject import Finding, Subject
from rlcanary.checks.worlds.descent import expect_gradients, scene, sides, take_step
from rlcanary.checks.worlds.tiny_trainer import GROUPS, PAIR, build, new_state, reference_model, sampled, script
from rlcanary.checks.worlds.updates import declared
from rlcanary.contract.batch import Group
from rlcanary.contract.conventions import Conventions


def _expect_declared(subject: Subject, groups: list[Group], message: str, **options: Any) -> None:
    """Train on a batch and compare the gradients with those of the objective on the state's own model, in float64."""
    start = scene(subject, groups, **options)
    model, ref_model = start.state.value.model, build(start.ref_model)
    expected = declared(model, ref_model, start.batch, subject.conventions).gradients
    call, update = take_step(subject, start.state, start.batch)
    source = [
        f"expected = declared(arguments[0].model, {start.ref_model}, arguments[1], adapter.conventions).gradients"
    ]
    expect_gradients(call, update.gradients, expected, f"{message} ({_terms(subject)})", source)


def _terms(subject: Subject) -> str:
    conventions = subject.conventions
    terms = [f"temperature {conventions.temperature:g}", conventions.aggregation]
    terms += [f"kl_coef {conventions.kl_coef:g} in the {conventions.kl_placement}"] if conventions.kl_coef else []
    terms += [f"ratio against the {conventions.old_logprobs}'s logprobs"]
    return ", ".join(terms)


@check("step.declared_gradient", needs=("train_step",))
def declared_gradient(subject: Subject, rng: Generator) -> None:
    """On policy, the gradient that reaches the optimizer is that of the declared objective, at any temperature.

    Silent because the step can be wrong although each part is right: a temperature that one path omits, micro-batches
    whose gradients are weighted wrongly, a division after backward, a loss in half precision. The logged loss is finite
    and falls. Look at everything between the batch and `optimizer.step()`.
    """
    for choice in ({}, {"temperature": 0.6}, {"kl_coef": 0.3}, {"temperature": 0.6, "kl_coef": 0.3}):
        for groups in (PAIR, GROUPS):
            with subject.case(choice, f"{len(groups)} prompts"):
                option = subject.configured(**choice)
                for side in sides(option):
                    message = "on policy, the gradient is not the declared one"
                    _expect_declared(option, groups, message, is_clipped=side)


def _kl_in_reward(conventions: Conventions) -> str | None:
    if conventions.kl_coef and conventions.kl_placement == "reward":
        return "the KL in the reward may be that of the older policy or of this one"
    return None


@check("step.off_policy_gradient", needs=("train_step",), applies=_kl_in_reward)
def off_policy_gradient(subject: Subject, rng: Generator) -> None:
    """On samples of an older policy, ratios use the declared old logprobs and are clipped as declared.

    Silent because a ratio of 1 looks healthy: a ratio against logprobs that the trainer has just computed corrects for
    nothing, and clipping at other bounds trains on other tokens. Look at which logprobs the loss is given as old ones,
    and declare `old_logprobs` if they are the trainer's.
    """
    for groups in (PAIR, GROUPS):
        with subject.case(f"{len(groups)} prompts"):
            message = "with samples of an older policy the gradient is not the declared one"
            for side in sides(subject):
                _expect_declared(subject, groups, message, drift=0.5, is_clipped=side)


def _drops_out(conventions: Conventions) -> str | None:
    return "updates keep dropout on" if conventions.training_dropout else None


@check("step.dropout_is_off", needs=("train_step",), applies=_drops_out)
def dropout_is_off(subject: Subject, rng: Generator) -> None:
    """The update of a model with dropout, in training mode, is computed without dropout, as it was sampled.

    Silent because the sampler has no dropout: logprobs under a random mask make every ratio differ from 1, tokens are
    clipped by chance, and only a LoRA config mentions the 0.1. Look for a missing `eval()` before old and reference
    logprobs, and declare `training_dropout` if the loss keeps it on purpose.
    """
    message = "with dropout 0.3 in the model, the gradient is not that of the policy that sampled"
    _expect_declared(subject, PAIR, message, model="tiny_llama(dropout=0.3).train()")


def _drops_nothing(conventions: Conventions) -> str | None:
    return None if conventions.training_dropout else "updates have no dropout"


@check("step.dropout_is_on", needs=("train_step",), applies=_drops_nothing)
def dropout_is_on(subject: Subject, rng: Generator) -> None:
    """Dropout is on in updates if `training_dropout` is declared: updates of equal states differ with the random state.

    Silent because a policy trains well without its dropout, only not as configured. Look for an `eval()` before old
    logprobs that is not undone.
    """
    gradients = []
    for seed in (1, 2):
        start = scene(subject, model="tiny_llama(dropout=0.3).train()")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            call, update = take_step(subject, start.state, start.batch)
        gradients.append(torch.cat([gradient.double().flatten() for gradient in update.gradients.values()]))
    subject.compared()
    difference = float((gradients[0] - gradients[1]).norm() / gradients[0].norm())
    if not difference > 1e-2:
        lines = script(
            f"other = {start.state.expression}",
            "torch.manual_seed(1)",
            "first = gradients_of(adapter, *arguments)",
            "torch.manual_seed(2)",
            "second = gradients_of(adapter, other, arguments[1])",
            "assert any(not torch.allclose(first[name], second[name], rtol=1e-2) for name in first)",
        )
        raise Finding(
            "with dropout 0.3 in the model and training_dropout declared, two random states gave gradients that differ by "
            f"{difference:.2g} of their length",
            call.snippet(lines),
            "gradients",
        )


@check("step.gradient_norm_is_clipped", needs=("train_step",))
def gradient_norm_is_clipped(subject: Subject, rng: Generator) -> None:
    """A gradient above max_grad_norm is scaled to exactly that norm; a smaller one is not changed.

    Silent because a gradient that is clipped by parts, by rank or by parameter group points elsewhere, and one that is not
    clipped matters only on the one batch in a thousand. Look at the tensors that the norm is taken over, and at when it
    is taken.
    """
    for limit in (0.1, subject.conventions.max_grad_norm):
        if limit is not None:
            for is_clipped in (True, False):
                side = "above" if is_clipped else "below"
                with subject.case(f"{side} max_grad_norm {limit:g}"):
                    option = subject.configured(max_grad_norm=limit)
                    message = f"{side} max_grad_norm {limit:g} the gradient is not the declared one"
                    _expect_declared(option, GROUPS, message, is_clipped=is_clipped)


@check("step.gradients_start_anew", needs=("train_step",))
def gradients_start_anew(subject: Subject, rng: Generator) -> None:
    """An update's gradient comes from its own batch alone.

    Silent because the sum of old gradients acts like momentum: training goes on, only with growing steps.
    Look for `zero_grad`, where it stands, and which optimizer or model it is called on.
    """
    # The step is so small that the policy is still the one that sampled.
    start = scene(subject, learning_rate=1e-7)
    state, batch = start.state, start.batch
    take_step(subject, state, batch)
    expected = declared(state.value.model, build(start.ref_model), batch, subject.conventions).gradients
    call, update = take_step(subject, state, batch)
    source = [
        "adapter.train_step(*arguments)",
        f"expected = declared(arguments[0].model, {start.ref_model}, arguments[1], adapter.conventions).gradients",
    ]
    message = "the gradient of the second update is not that of its batch"
    expect_gradients(call, update.gradients, expected, message, source)


def _expect_same(
    subject: Subject,
    message: str,
    groups: list[Group],
    others: list[Group] | None = None,
    between: list[str] | None = None,
    **layout: Any,
) -> None:
    """Train equal states on the same completions in two layouts, and demand equal gradients.

    Args:
        subject: the subject that makes the states.
        message: the property in the words of this case.
        groups: the sampled groups.
        others: the same in another order.
        between: Python that runs between the two, over `before`, the first state and batch.
        layout: options for `sampled` for the second batch.
    """
    for side in sides(subject):
        start = scene(subject, groups, is_clipped=side)
        first_call, first = take_step(subject, start.state, start.batch)
        for line in between or []:
            exec(line, {"torch": torch, "adapter": subject.adapter, "before": first_call.given})
        second_state = new_state(subject, start.policy, reference_model(subject, start.policy))
        batch = sampled(second_state.value.model, subject.conventions, others or groups, **layout)
        call, second = take_step(subject, second_state, batch)
        source = [
            "before = [",
            f"    {literal(start.state)},",
            f"    {literal(start.batch)},",
            "]",
            "expected = gradients_of(adapter, *before)",
            *(between or []),
        ]
        expect_gradients(call, second.gradients, first.gradients, message, source)


@check("step.repeatable", needs=("train_step",))
def repeatable(subject: Subject, rng: Generator) -> None:
    """The same state and batch give the same update, regardless of training or random draws in between.

    Silent because a step that depends on earlier calls, through a cache, a running mean or the random state, only looks
    noisy. Look for attributes that survive a step, and for random numbers in scoring.
    """
    between = ["adapter.train_step(*before)", "torch.rand(7)"]
    _expect_same(subject, "the same state and batch gave another gradient after other work", PAIR, between=between)


@check("step.row_order", needs=("train_step",))
def row_order(subject: Subject, rng: Generator) -> None:
    """The order of the groups in a batch, and of the completions in a group, does not change the update.

    Silent because rows are shuffled anyway. Look for a tensor that is sorted, filtered or balanced over workers while the
    rewards or the old logprobs beside it are not.
    """
    backwards = [
        Group(group.prompt_ids, list(group.completions)[::-1], list(group.rewards)[::-1]) for group in GROUPS[::-1]
    ]
    _expect_same(subject, "the order of the rows changed the gradient", GROUPS, backwards)


@check("step.padding", needs=("train_step",))
def padding(subject: Subject, rng: Generator) -> None:
    """The amount, id and side of the padding do not change the update.

    Silent because the longest rows of a batch set its padding: a dependence on it looks like noise between batches.
    Look for means over positions, attention to padding, and masks that compare ids with the padding id.
    """
    message = "more padding changed the gradient"
    _expect_same(subject, message, GROUPS, completion_len_buckets=[9], seq_len_buckets=[16])
    # The id 11 is also an ordinary token of these completions.
    _expect_same(subject, "another padding id changed the gradient", GROUPS, pad_token_id=11)
    with subject.case("padding on the left"):
        _expect_same(subject, "padding on the left changed the gradient", GROUPS, prompt_padding="left")


@check("step.batch_untouched", needs=("train_step",))
def batch_untouched(subject: Subject, rng: Generator) -> None:
    """Training on a batch does not modify its tensors.

    Silent because the first epoch is right; the second, or the metrics computed later, see normalised rewards or
    shifted ids. Look for operations in place on rewards, masks and logprobs.
    """
    start = scene(subject)
    call = subject.call("train_step", start.state, start.batch)
    call.expect_inputs_untouched("train_step changed its batch in place")
