"""One optimizer update as a whole: the declared gradient reaches every parameter, once, at the scheduled learning rate."""

import copy
from typing import Any

import torch
from torch import Generator

from rlcanary.checks.check import check
from rlcanary.checks.snippet import literal
from rlcanary.checks.subject import Call, Finding, Subject
from rlcanary.checks.worlds.descent import expect_gradients, scene, sides, take_step, watched
from rlcanary.checks.worlds.states import lead, named, nats, policy_gap, precision, scheduled_rates
from rlcanary.checks.worlds.tiny_trainer import GROUPS, PAIR, build, new_state, reference_model, sampled, script
from rlcanary.checks.worlds.updates import Watch, declared
from rlcanary.contract.adapter import NotProvided
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

    Silent because each part can be right and the step still wrong: a temperature that one path leaves out, micro-batches
    whose gradients add up to another weight, a division after backward, a loss in half precision. The logged loss is
    finite and falls. Look at everything between the batch and `optimizer.step()`.
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
    """On samples of an older policy, ratios are taken against the declared old logprobs and clipped as declared.

    Silent because a ratio of 1 is what one hopes to see: whoever takes it against logprobs that the trainer has just
    computed corrects for nothing, and whoever clips at other bounds trains on other tokens. Look at which logprobs the
    loss is given as old ones, and declare `old_logprobs` if they are the trainer's.
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
    """With dropout in the model, in training mode, the update is still that of the policy that sampled.

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
    """With `training_dropout` declared and dropout in the model, updates of equal states differ with the random state.

    Silent because a policy without its dropout trains well, only on other noise than its config says. Look for an `eval()`
    before old logprobs without its way back.
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
    """A gradient above max_grad_norm keeps its direction and gets exactly that norm; one below it is left as it is.

    Silent because a gradient that is clipped by parts, by rank or by parameter group points elsewhere, and one that is not
    clipped matters only on the one batch in a thousand. Look at what the norm is taken over, and when.
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
    """The second update's gradient is that of its own batch alone.

    Silent because the sum of old gradients is a kind of momentum: training goes on, only with a larger and larger step.
    Look for `zero_grad`, where it stands, and which optimizer or model it is called on.
    """
    # So small a step that the policy is still the one that sampled.
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
    """Train one state on a batch and its equal on the same completions otherwise laid out; gradients have to be the same.

    Args:
        subject: whose states they are.
        message: the property in the words of this case.
        groups: what was sampled.
        others: the same in another order.
        between: Python that runs between the two, over `before`, the first state and batch.
        layout: options of `sampled` for the second batch.
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
    """The same state and batch give the same update, whatever was trained or drawn in between.

    Silent because a step that depends on what ran before it, through a cache, a running mean or the random state, is
    merely noisy. Look for attributes that survive a step, and for random numbers in scoring.
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
    """Neither the amount of padding nor its id nor its side changes the update.

    Silent because the padding of a batch is set by its longest rows: what depends on it looks like noise between batches.
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
    """Training on a batch leaves its tensors as they were.

    Silent because the first epoch is right; the second, or the metrics behind it, see normalised rewards or shifted ids.
    Look for operations in place on rewards, masks and logprobs.
    """
    start = scene(subject)
    call = subject.call("train_step", start.state, start.batch)
    call.expect_inputs_untouched("train_step changed its batch in place")


@check("step.every_parameter_moves", needs=("train_step",))
def every_parameter_moves(subject: Subject, rng: Generator) -> None:
    """The first update moves every parameter that has a gradient.

    Silent because the loss of the rest falls all the same: a head that is in no optimizer stays at its random start, and a
    first learning rate of zero wastes a batch. Look at which parameters the optimizer was built from, on which model, and
    at the schedule's value at step 0.
    """
    start = scene(subject, learning_rate=1e-2)
    state, source = (
        start.state.value,
        f"declared(arguments[0].model, {start.ref_model}, arguments[1], adapter.conventions)",
    )
    gradients = declared(state.model, build(start.ref_model), start.batch, subject.conventions).gradients
    watch = Watch(state)
    call = subject.call("train_step", start.state, start.batch)
    still = watch.standing_still(gradients)
    subject.compared(len(gradients))
    if still or not watch.updates:
        rate = f"learning rate {watch.updates[0].learning_rates[0]:g}" if watch.updates else "no optimizer step"
        lines = script(
            f"gradients = {source}.gradients",
            "watch = Watch(arguments[0])",
            "adapter.train_step(*arguments)",
            "assert watch.updates",
            "assert watch.standing_still(gradients) == [], watch.standing_still(gradients)",
        )
        raise Finding(
            f"{len(still)} of {len(gradients)} parameters have a gradient and did not move ({rate}): "
            f"{', '.join(still[:3])}{'…' if len(still) > 3 else ''}",
            call.snippet(lines),
            "parameters that stand still",
            len(still) / len(gradients),
        )


def _train(subject: Subject, learning_rate: float, updates: int) -> tuple[Call, Watch, list[str]]:
    """Several updates on one batch -> the last call, what was seen, and Python that does the same."""
    start = scene(subject, learning_rate=learning_rate)
    watch = watched(start.state.value)
    calls = [subject.call("train_step", start.state, start.batch) for _ in range(updates)]
    lines = script("watch = Watch(arguments[0])", f"for _ in range({updates}):", "    adapter.train_step(*arguments)")
    return calls[-1], watch, lines


@check("step.small_learning_rate", needs=("train_step",))
def small_learning_rate(subject: Subject, rng: Generator) -> None:
    """At a learning rate of 1e-6 the parameters move as far as the optimizer asks.

    Silent because an update below the resolution of bfloat16 rounds to nothing: the loss is finite, the gradient norm
    normal, the reward flat. Look for weights that are held in half precision without a float32 master copy.
    """
    call, watch, lines = _train(subject, learning_rate=1e-6, updates=4)
    share = watch.share_moved()
    subject.compared(len(watch.held))
    if not share > 0.9:
        raise Finding(
            f"four updates at learning rate 1e-6 moved the parameters {share:.1%} of the way that the optimizer asks for",
            call.snippet([*lines, "assert watch.share_moved() > 0.9, watch.share_moved()"]),
            "way moved",
            abs(1 - share),
        )


@check("step.only_the_optimizer_moves", needs=("train_step",))
def only_the_optimizer_moves(subject: Subject, rng: Generator) -> None:
    """After several updates each parameter is where its optimizer, with its moments, takes it.

    Silent because weights that are rounded, averaged or reloaded on the side still follow the gradient, roughly, and so
    does an optimizer whose moments are lost at each step. Look for casts and copies of weights after `optimizer.step()`,
    and for an optimizer that is made or emptied inside the loop.
    """
    call, watch, lines = _train(subject, learning_rate=1e-2, updates=4)
    astray = watch.astray()
    subject.compared(len(watch.held))
    if astray:
        raise Finding(
            f"after four updates {len(astray)} of {len(watch.before)} parameters are not where the optimizer takes them: "
            f"{', '.join(astray[:3])}{'…' if len(astray) > 3 else ''}",
            call.snippet([*lines, "assert watch.astray() == [], watch.astray()"]),
            "parameters astray",
            len(astray) / len(watch.before),
        )


@check("step.learning_rate_schedule", needs=("train_step",))
def learning_rate_schedule(subject: Subject, rng: Generator) -> None:
    """Update k has the learning rate that the schedule gives for k, and the schedule moves on once per update.

    Silent because a schedule that runs too fast, too slow or one ahead is still a schedule. Look at how often
    `scheduler.step()` is called per `optimizer.step()`, and whether warm-up is counted in updates, batches or samples.
    """
    for told, dressed in (("its own schedule", "{}"), ("1 / (k + 1)", "decaying({})")):
        with subject.case(told):
            _expect_scheduled(subject, dressed)


def _expect_scheduled(subject: Subject, dressed: str) -> None:
    """Demand that four updates have the learning rates that the state's scheduler gives when it is stepped alone."""
    start = scene(subject, dressed=dressed)
    expected = scheduled_rates(start.state.value, 4)
    watch = Watch(start.state.value)
    calls = [subject.call("train_step", start.state, start.batch) for _ in range(4)]
    got = [list(update.learning_rates) for update in watch.updates]
    subject.compared(len(expected))
    if len(got) != 4 or not torch.allclose(torch.tensor(got), torch.tensor(expected), rtol=1e-3, atol=0):
        lines = script(
            "expected = scheduled_rates(arguments[0], 4)",
            "watch = Watch(arguments[0])",
            "for _ in range(4):",
            "    adapter.train_step(*arguments)",
            "got = [list(update.learning_rates) for update in watch.updates]",
            "torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=1e-3, atol=0)",
        )
        shown = [", ".join(f"{rates[0]:.3g}" for rates in side) for side in (got, expected)]
        raise Finding(
            f"four updates had other learning rates than their schedule gives\n  got:      {shown[0]}\n"
            f"  expected: {shown[1]}",
            calls[-1].snippet(lines),
        )


@check("step.reference_model_stays", needs=("train_step",))
def reference_model_stays(subject: Subject, rng: Generator) -> None:
    """Training leaves the reference model's weights as they are.

    Silent because a reference that follows the policy makes the KL small, which is what one wants to see. Look for a
    reference that shares tensors with the policy, or that is in the optimizer or in the weight sync.
    """
    option = subject if subject.conventions.kl_coef else subject.configured(kl_coef=0.3)
    start = scene(option, learning_rate=1e-2)
    if start.state.value.ref_model is None:
        raise NotProvided("the state keeps no reference model")
    before = copy.deepcopy(named(start.state.value.ref_model))
    calls = [option.call("train_step", start.state, start.batch) for _ in range(2)]
    for name, parameter in named(start.state.value.ref_model).items():
        subject.compared()
        if name not in before or not torch.equal(before[name], parameter):
            lines = script(
                "import copy",
                "before = copy.deepcopy(named(arguments[0].ref_model))",
                "for _ in range(2):",
                "    adapter.train_step(*arguments)",
                f"got = named(arguments[0].ref_model)[{name!r}]",
                f"torch.testing.assert_close(got, before[{name!r}], rtol=0, atol=0)",
            )
            raise Finding(f"two updates changed {name} of the reference model", calls[-1].snippet(lines))


@check("step.direction", needs=("train_step",))
def direction(subject: Subject, rng: Generator) -> None:
    """After an update the completion with the positive advantage is likelier, compared with the other one.

    Silent because a policy that is pushed the wrong way moves as fast as one that is not. Look at the sign of the loss,
    of the advantages, and of what the optimizer does with the gradient (`maximize`).
    """
    option = subject if subject.conventions.entropy_coef == 0 else subject.configured(entropy_coef=0.0)
    # In half precision a smaller step rounds to nothing.
    rate = 1e-4 if precision(new_state(option).value.model) in (torch.float32, torch.float64) else 2e-3
    start = scene(option, learning_rate=rate, other_reference=False)
    before = lead(start.state.value.model, start.batch)
    call = option.call("train_step", start.state, start.batch)
    after = lead(start.state.value.model, start.batch)
    subject.compared()
    if not after > before:
        lines = script(
            "before = lead(arguments[0].model, arguments[1])",
            "adapter.train_step(*arguments)",
            "assert lead(arguments[0].model, arguments[1]) > before",
        )
        raise Finding(
            f"the completion that earned 1 led the one that earned 0 by {before:.4f} nats before the update and by "
            f"{after:.4f} after it",
            call.snippet(lines),
            "lead",
            before - after,
        )


@check("step.same_policy", needs=("train_step",))
def same_policy(subject: Subject, rng: Generator) -> None:
    """A new state scores completions as the model that it was made from, and still does after updates too small to matter.

    Silent because a policy that starts from other weights, or is reloaded wrongly after its first update, trains on: its
    gradients are right for the weights that it has. Look for weights that are loaded by name without a word about those
    that are missing, for wrappers, and for what happens to frozen weights between updates.
    """
    start = scene(subject, learning_rate=1e-9)
    state, call = start.state.value, Call(subject, "train_step", (start.state, start.batch), [], None)
    steps: list[str] = []
    for told in ("a new state", "after one update at learning rate 1e-9 a state", "after two such updates a state"):
        distance = policy_gap(state, build(start.policy), start.batch)
        subject.compared()
        if not distance < nats(state.model):
            lines = script(
                *steps,
                f"got = policy_gap(arguments[0], {start.policy}, arguments[1])",
                f"assert got < {nats(state.model):.2g}, got",
            )
            raise Finding(
                f"{told} gives a completion's token a logprob that is {distance:.3g} nats off that of the model that it was "
                "made from",
                call.snippet(lines),
                "nats",
                distance,
            )
        call = subject.call("train_step", start.state, start.batch)
        steps.append("adapter.train_step(*arguments)")
