"""One optimizer update as a whole: the declared gradient reaches every parameter, once, at the scheduled learning rate."""

import torch
from torch import Generator, Tensor

from rlcanary.batch import CollatedBatch, Group
from rlcanary.checks.registry import check
from rlcanary.checks.snippet import Written, literal
from rlcanary.checks.subject import Call, Finding, NothingToCompare, Subject, close
from rlcanary.checks.training import GROUPS, PAIR, build, lead, named, new_state, reference_model, sampled, script
from rlcanary.checks.updates import Update, Watch, declared
from rlcanary.contract import NotProvided
from rlcanary.conventions import Conventions

# Gradients in float32 against float64; the largest entry of all parameters sets the scale.
RELATIVE, ABSOLUTE = 1e-3, 1e-4


def _step(subject: Subject, state: Written, batch: CollatedBatch) -> tuple[Call, Update]:
    """Train on one batch, which has to be one step of the state's optimizer."""
    watch = Watch(state.value)
    call = subject.call("train_step", state, batch)
    if len(watch.updates) != 1:
        lines = script(
            "watch = Watch(arguments[0])",
            "adapter.train_step(*arguments)",
            "assert len(watch.updates) == 1, len(watch.updates)",
        )
        told = f"one call of train_step made {len(watch.updates)} steps of state.optimizer"
        raise Finding(told, call.snippet(lines), "number of steps", abs(len(watch.updates) - 1))
    return call, watch.updates[0]


def _expect_gradients(
    call: Call, got: dict[str, Tensor], expected: dict[str, Tensor], message: str, source: list[str]
) -> None:
    """Compare gradients by parameter; `source` is Python that makes `expected`, a dictionary, in a snippet."""
    names = [name for name in expected if name in got]
    if not names:
        raise NothingToCompare("the state's model has none of the parameters of the model that it was made from")
    call.subject.compared(len(names))
    largest = max(float(expected[name].abs().max()) for name in names)
    wrong = [name for name in names if not close(got[name], expected[name], RELATIVE, ABSOLUTE * largest)]
    if not wrong:
        return
    both = [torch.cat([side[name].double().flatten() for name in names]) for side in (got, expected)]
    length = float(both[0].norm() / both[1].norm())
    cosine = float(torch.nn.functional.cosine_similarity(both[0], both[1], dim=0))
    lines = script(
        *source,
        "got = gradients_of(adapter, *arguments)",
        f"name = {wrong[0]!r}",
        f"torch.testing.assert_close(got[name].double(), expected[name].double(), rtol={RELATIVE}, "
        f"atol={ABSOLUTE * largest:.1e})",
    )
    raise Finding(
        f"{message}\n  {len(wrong)} of {len(names)} parameters have another gradient, {wrong[0]} for one; all together it "
        f"is {length:.4g} times as long as it should be, with a cosine of {cosine:.4f}",
        call.snippet(lines),
        "gradients",
        float((both[0] - both[1]).norm() / both[1].norm()),
    )


def _expect_declared(subject: Subject, batch: CollatedBatch, message: str, model: str = "tiny_llama()") -> None:
    """Train on a batch and compare the gradients with those that the reference computes in float64."""
    ref_model = reference_model(subject)
    call, update = _step(subject, new_state(subject, model, ref_model), batch)
    expected = declared(build(model), build(ref_model), batch, subject.conventions).gradients
    source = [f"expected = declared({model}, {ref_model}, arguments[1], adapter.conventions).gradients"]
    _expect_gradients(call, update.gradients, expected, f"{message} ({_terms(subject)})", source)


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
                _expect_declared(option, sampled(option, groups), "on policy, the gradient is not the declared one")


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
            batch = sampled(subject, groups, drift=0.5)
            _expect_declared(subject, batch, "with samples of an older policy the gradient is not the declared one")


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
    _expect_declared(subject, sampled(subject, PAIR), message, "tiny_llama(dropout=0.3).train()")


@check("step.gradient_norm_is_clipped", needs=("train_step",))
def gradient_norm_is_clipped(subject: Subject, rng: Generator) -> None:
    """With a max_grad_norm below it, the gradient keeps its direction and gets exactly that norm.

    Silent because a gradient that is clipped by parts, by rank or by parameter group points elsewhere, and one that is not
    clipped matters only on the one batch in a thousand. Look at what the norm is taken over, and when.
    """
    for limit in (0.1, subject.conventions.max_grad_norm):
        if limit is not None:
            with subject.case(f"max_grad_norm {limit:g}"):
                option = subject.configured(max_grad_norm=limit)
                message = f"with max_grad_norm {limit:g} the gradient is not the declared one"
                _expect_declared(option, sampled(option, GROUPS), message)


@check("step.gradients_start_anew", needs=("train_step",))
def gradients_start_anew(subject: Subject, rng: Generator) -> None:
    """The second update's gradient is that of its own batch alone.

    Silent because the sum of old gradients is a kind of momentum: training goes on, only with a larger and larger step.
    Look for `zero_grad`, where it stands, and which optimizer or model it is called on.
    """
    ref_model = reference_model(subject)
    # So small a step that the policy is still the one that sampled.
    state = new_state(subject, ref_model=ref_model, learning_rate=1e-7)
    batch = sampled(subject, PAIR)
    _step(subject, state, batch)
    expected = declared(state.value.model, build(ref_model), batch, subject.conventions).gradients
    call, update = _step(subject, state, batch)
    source = [
        "adapter.train_step(*arguments)",
        f"expected = declared(arguments[0].model, {ref_model}, arguments[1], adapter.conventions).gradients",
    ]
    message = "the gradient of the second update is not that of its batch"
    _expect_gradients(call, update.gradients, expected, message, source)


def _expect_same(
    subject: Subject, batch: CollatedBatch, other: CollatedBatch, message: str, between: list[str] | None = None
) -> None:
    """Train one state on each of two batches, which have to give the same gradients.

    `between` is Python that runs between the two, over `before`, the first state and batch.
    """
    ref_model = reference_model(subject)
    first_call, first = _step(subject, new_state(subject, ref_model=ref_model), batch)
    for line in between or []:
        exec(line, {"torch": torch, "adapter": subject.adapter, "before": first_call.given})
    call, second = _step(subject, new_state(subject, ref_model=ref_model), other)
    state, given = first_call.arguments
    source = [
        "before = [",
        f"    {literal(state)},",
        f"    {literal(given)},",
        "]",
        "expected = gradients_of(adapter, *before)",
        *(between or []),
    ]
    _expect_gradients(call, second.gradients, first.gradients, message, source)


@check("step.repeatable", needs=("train_step",))
def repeatable(subject: Subject, rng: Generator) -> None:
    """The same state and batch give the same update, whatever was trained or drawn in between.

    Silent because a step that depends on what ran before it, through a cache, a running mean or the random state, is
    merely noisy. Look for attributes that survive a step, and for random numbers in scoring.
    """
    batch = sampled(subject, PAIR)
    between = ["adapter.train_step(*before)", "torch.rand(7)"]
    _expect_same(subject, batch, batch, "the same state and batch gave another gradient after other work", between)


@check("step.row_order", needs=("train_step",))
def row_order(subject: Subject, rng: Generator) -> None:
    """The order of the groups in a batch, and of the completions in a group, does not change the update.

    Silent because rows are shuffled anyway. Look for a tensor that is sorted, filtered or balanced over workers while the
    rewards or the old logprobs beside it are not.
    """
    batch = sampled(subject, GROUPS)
    backwards = [
        Group(group.prompt_ids, list(group.completions)[::-1], list(group.rewards)[::-1]) for group in GROUPS[::-1]
    ]
    _expect_same(subject, batch, sampled(subject, backwards), "the order of the rows changed the gradient")


@check("step.padding", needs=("train_step",))
def padding(subject: Subject, rng: Generator) -> None:
    """Neither the amount of padding nor its id nor its side changes the update.

    Silent because the padding of a batch is set by its longest rows: what depends on it looks like noise between batches.
    Look for means over positions, attention to padding, and masks that compare ids with the padding id.
    """
    batch = sampled(subject, GROUPS)
    wider = sampled(subject, GROUPS, completion_len_buckets=[9], seq_len_buckets=[16])
    _expect_same(subject, batch, wider, "more padding changed the gradient")
    # The id 11 is also an ordinary token of these completions.
    other_id = sampled(subject, GROUPS, pad_token_id=11)
    _expect_same(subject, batch, other_id, "another padding id changed the gradient")
    with subject.case("padding on the left"):
        left = sampled(subject, GROUPS, prompt_padding="left")
        _expect_same(subject, batch, left, "padding on the left changed the gradient")


@check("step.batch_untouched", needs=("train_step",))
def batch_untouched(subject: Subject, rng: Generator) -> None:
    """Training on a batch leaves its tensors as they were.

    Silent because the first epoch is right; the second, or the metrics behind it, see normalised rewards or shifted ids.
    Look for operations in place on rewards, masks and logprobs.
    """
    state = new_state(subject, ref_model=reference_model(subject))
    call = subject.call("train_step", state, sampled(subject, PAIR))
    call.expect_inputs_untouched("train_step changed its batch in place")


@check("step.every_parameter_moves", needs=("train_step",))
def every_parameter_moves(subject: Subject, rng: Generator) -> None:
    """The first update moves every parameter that has a gradient.

    Silent because the loss of the rest falls all the same: a head that is in no optimizer stays at its random start, and a
    first learning rate of zero wastes a batch. Look at which parameters the optimizer was built from, on which model, and
    at the schedule's value at step 0.
    """
    state = new_state(subject, ref_model=reference_model(subject), learning_rate=1e-2)
    watch = Watch(state.value)
    call = subject.call("train_step", state, sampled(subject, PAIR))
    still = watch.standing_still()
    subject.compared(len(watch.driven()))
    if still or not watch.updates:
        rate = f"learning rate {watch.updates[0].learning_rates[0]:g}" if watch.updates else "no optimizer step"
        lines = script(
            "watch = Watch(arguments[0])",
            "adapter.train_step(*arguments)",
            "assert watch.updates",
            "assert watch.standing_still() == [], watch.standing_still()",
        )
        raise Finding(
            f"{len(still)} of {len(watch.before)} parameters have a gradient and did not move ({rate}): "
            f"{', '.join(still[:3])}{'…' if len(still) > 3 else ''}",
            call.snippet(lines),
            "parameters that stand still",
            len(still) / len(watch.before),
        )


def _train(subject: Subject, learning_rate: float, updates: int) -> tuple[Call, Watch, list[str]]:
    """Several updates on one batch -> the last call, what was seen, and Python that does the same."""
    state = new_state(subject, ref_model=reference_model(subject), learning_rate=learning_rate)
    watch = Watch(state.value)
    batch = sampled(subject, PAIR)
    calls = [subject.call("train_step", state, batch) for _ in range(updates)]
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
    subject.compared(len(watch.driven()))
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
    subject.compared(len(watch.driven()))
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
    state = new_state(subject, ref_model=reference_model(subject), learning_rate=1e-3, dressed="decaying({})")
    watch = Watch(state.value)
    batch = sampled(subject, PAIR)
    calls = [subject.call("train_step", state, batch) for _ in range(4)]
    got = [update.learning_rates[0] for update in watch.updates]
    expected = [1e-3 / (k + 1) for k in range(4)]
    subject.compared()
    if len(got) != 4 or not torch.allclose(torch.tensor(got), torch.tensor(expected), rtol=1e-3, atol=0):
        lines = script(
            "watch = Watch(arguments[0])",
            "for _ in range(4):",
            "    adapter.train_step(*arguments)",
            "got = torch.tensor([update.learning_rates[0] for update in watch.updates])",
            "expected = torch.tensor([1e-3 / (k + 1) for k in range(4)])",
            "torch.testing.assert_close(got, expected, rtol=1e-3, atol=0)",
        )
        shown = [", ".join(f"{rate:.3g}" for rate in rates) for rates in (got, expected)]
        raise Finding(
            f"four updates had other learning rates than their schedule, 1 / (k + 1), gives\n  got:      {shown[0]}\n"
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
    state = new_state(option, ref_model="nudged(tiny_llama())", learning_rate=1e-2)
    if state.value.ref_model is None:
        raise NotProvided("the state keeps no reference model")
    batch = sampled(option, PAIR)
    calls = [option.call("train_step", state, batch) for _ in range(2)]
    before = named(build("nudged(tiny_llama())"))
    for name, parameter in named(state.value.ref_model).items():
        subject.compared(name in before)
        if name in before and not torch.equal(before[name].to(parameter), parameter):
            lines = script(
                "for _ in range(2):",
                "    adapter.train_step(*arguments)",
                f"got = named(arguments[0].ref_model)[{name!r}]",
                f"expected = named(nudged(tiny_llama()))[{name!r}]",
                "torch.testing.assert_close(got, expected, rtol=0, atol=0)",
            )
            raise Finding(f"two updates changed {name} of the reference model", calls[-1].snippet(lines))


@check("step.direction", needs=("train_step",))
def direction(subject: Subject, rng: Generator) -> None:
    """After an update the completion with the positive advantage is likelier, compared with the other one.

    Silent because a policy that is pushed the wrong way moves as fast as one that is not. Look at the sign of the loss,
    of the advantages, and of what the optimizer does with the gradient (`maximize`).
    """
    option = subject if subject.conventions.entropy_coef == 0 else subject.configured(entropy_coef=0.0)
    state = new_state(option, ref_model=reference_model(option, other=False), learning_rate=1e-4)
    batch = sampled(option, PAIR)
    call = option.call("train_step", state, batch)
    before, after = lead(build("tiny_llama()"), batch), lead(state.value.model, batch)
    subject.compared()
    if not after > before:
        lines = script(
            "adapter.train_step(*arguments)",
            "assert lead(arguments[0].model, arguments[1]) > lead(tiny_llama(), arguments[1])",
        )
        raise Finding(
            f"the completion that earned 1 led the one that earned 0 by {before:.4f} nats before the update and by "
            f"{after:.4f} after it",
            call.snippet(lines),
            "lead",
            before - after,
        )
