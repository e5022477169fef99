"""Parameters after optimizer updates: each one moves by the optimizer's full step, and nothing else moves.

The checks belong to the area `step`; those of the gradient that reaches the optimizer are in `step.py`.
"""

import copy

import torch
from torch import Generator

from rlcanary.checks.check import check
from rlcanary.checks.subject import Call, Finding, Subject
from rlcanary.checks.worlds.descent import scene, watched
from rlcanary.checks.worlds.states import lead, named, nats, policy_gap, precision, scheduled_rates
from rlcanary.checks.worlds.tiny_trainer import build, new_state, script
from rlcanary.checks.worlds.updates import Watch, declared
from rlcanary.contract.adapter import NotProvided


@check("step.every_parameter_moves", needs=("train_step",))
def every_parameter_moves(subject: Subject, rng: Generator) -> None:
    """The first update moves every parameter that has a gradient.

    Silent because the loss still falls through the other parameters: a head that is in no optimizer stays at its random
    start, and a first learning rate of zero wastes a batch. Look at the parameters and the model that the optimizer was
    built from, and at the schedule's value at step 0.
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
    """Make several updates on one batch -> the last call, the watch on them, and Python that does the same."""
    start = scene(subject, learning_rate=learning_rate)
    watch = watched(start.state.value)
    calls = [subject.call("train_step", start.state, start.batch) for _ in range(updates)]
    lines = script("watch = Watch(arguments[0])", f"for _ in range({updates}):", "    adapter.train_step(*arguments)")
    return calls[-1], watch, lines


@check("step.small_learning_rate", needs=("train_step",))
def small_learning_rate(subject: Subject, rng: Generator) -> None:
    """At a learning rate of 1e-6 the parameters move by the optimizer's full step.

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
    """Only the optimizer, with its moments, moves parameters over several updates.

    Silent because weights that are also rounded, averaged or reloaded still roughly follow the gradient, and so does an
    optimizer that loses its moments at each step. Look for casts and copies of weights after `optimizer.step()`, and
    for an optimizer that is made or emptied inside the loop.
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
    """Update k has the schedule's learning rate for k, and the schedule advances once per update.

    Silent because a schedule that runs too fast, too slow or one step ahead still looks plausible. Look at how often
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
    """Training does not change the reference model's weights.

    Silent because a reference that follows the policy makes the KL small, which looks healthy. Look for a
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
    """An update makes the completion with positive advantage likelier relative to the other one.

    Silent because a policy that is pushed the wrong way moves as fast as one that is not. Look at the sign of the loss,
    of the advantages, and at the optimizer's `maximize` option.
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
    """A new state scores completions like the model it was made from, also after negligibly small updates.

    Silent because a policy that starts from other weights, or is reloaded wrongly after its first update, still trains:
    its gradients are right for its wrong weights. Look for loading by name that ignores missing weights, for wrappers,
    and for changes to frozen weights between updates.
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
