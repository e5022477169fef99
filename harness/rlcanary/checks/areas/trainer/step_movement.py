"""One optimizer update as a whole: each parameter moves by the optimizer's full step, and nothing else moves."""

import copy
from typing import Any

import torch

from rlcanary.checks.asserts import assert_close, assert_true
from rlcanary.checks.case import Case
from rlcanary.checks.check import check
from rlcanary.checks.worlds.training.descent import scene, some, watched, with_kl
from rlcanary.checks.worlds.training.states import decaying, lead, named, nats, policy_gap, precision, scheduled_rates
from rlcanary.checks.worlds.training.tiny_trainer import PAIR, state_of
from rlcanary.checks.worlds.training.updates import Watch, declared
from rlcanary.contract.adapter import Adapter, NotProvided
from rlcanary.contract.layers import copied


@check("step.every_parameter_moves", needs=("train_step",), worlds=("tied_and_biased",))
def every_parameter_moves(adapter: Adapter, model: Any) -> None:
    """The first update moves every parameter that has a gradient.

    Silent because the loss still falls through the other parameters: a head that is in no optimizer stays at its random
    start, and a first learning rate of zero wastes a batch. Look at the parameters and the model that the optimizer was
    built from, and at the schedule's value at step 0.
    """
    start = scene(adapter, model, learning_rate=1e-2)
    gradients = declared(start.state.model, start.ref_model, start.batch, adapter.conventions).gradients
    watch = Watch(start.state)
    adapter.train_step(start.state, start.batch)
    still = watch.standing_still(gradients)
    rate = f"learning rate {watch.updates[0].learning_rates[0]:g}" if watch.updates else "no optimizer step"
    told = f"{len(still)} of {len(gradients)} parameters have a gradient and did not move ({rate}): {some(still)}"
    share = len(still) / max(len(gradients), 1)
    holds = watch.updates and not still
    assert_true(holds, told, quantity="parameters that stand still", magnitude=share, compared=len(gradients))


def _train(adapter: Adapter, model: Any, learning_rate: float) -> Watch:
    start = scene(adapter, model, learning_rate=learning_rate)
    watch = watched(start.state)
    for _ in range(4):
        adapter.train_step(start.state, copy.deepcopy(start.batch))
    return watch


@check("step.small_learning_rate", needs=("train_step",))
def small_learning_rate(adapter: Adapter, model: Any) -> None:
    """At a learning rate of 1e-6 the parameters move by the optimizer's full step.

    Silent because an update below the resolution of bfloat16 rounds to nothing: the loss is finite, the gradient norm
    normal, the reward flat. Look for weights that are held in half precision without a float32 master copy.
    """
    watch = _train(adapter, model, learning_rate=1e-6)
    share = watch.share_moved()
    told = f"four updates at learning rate 1e-6 moved the parameters {share:.1%} of the way that the optimizer asks for"
    assert_true(share > 0.9, told, quantity="way moved", magnitude=abs(1 - share), compared=len(watch.held))


@check("step.only_the_optimizer_moves", needs=("train_step",), worlds=("part_frozen", "bfloat16"))
def only_the_optimizer_moves(adapter: Adapter, model: Any) -> None:
    """Only the optimizer, with its moments, moves parameters over several updates.

    Silent because weights that are also rounded, averaged or reloaded still roughly follow the gradient, and so does an
    optimizer that loses its moments at each step. Look for casts and copies of weights after `optimizer.step()`, and
    for an optimizer that is made or emptied inside the loop.
    """
    frozen = [name for name, parameter in named(model).items() if not parameter.requires_grad]
    watch = _train(adapter, model, learning_rate=1e-2)
    moved = [name for name in watch.moved() if name in frozen]
    told = f"{len(moved)} parameters that were frozen when the state was made moved: {some(moved)}"
    assert_true(not moved, told, quantity="frozen parameters", magnitude=len(moved), compared=len(frozen))
    astray, total = watch.astray(), len(watch.before)
    told = (
        f"after four updates {len(astray)} of {total} parameters are not where the optimizer takes them: {some(astray)}"
    )
    share = len(astray) / total
    assert_true(not astray, told, quantity="parameters astray", magnitude=share, compared=len(watch.held))


@check(
    "step.learning_rate_schedule",
    needs=("train_step",),
    cases=lambda: [Case("its own schedule", decays=False), Case("1 / (k + 1)", decays=True)],
)
def learning_rate_schedule(adapter: Adapter, model: Any, decays: bool) -> None:
    """Update k has the schedule's learning rate for k, and the schedule advances once per update.

    Silent because a schedule that runs too fast, too slow or one step ahead still looks plausible. Look at how often
    `scheduler.step()` is called per `optimizer.step()`, and whether warm-up is counted in updates, batches or samples.
    """
    start = scene(adapter, model)
    state = decaying(start.state) if decays else start.state
    expected = scheduled_rates(state, 4)
    watch = Watch(state)
    for _ in range(4):
        adapter.train_step(state, copy.deepcopy(start.batch))
    got = [list(update.learning_rates) for update in watch.updates]
    told = "four updates had other learning rates than their schedule gives"
    assert_close(got, torch.tensor(expected), told, within=(1e-3, 0.0), quantity="learning rates")


@check("step.reference_model_stays", needs=("train_step",), cases=with_kl)
def reference_model_stays(adapter: Adapter, model: Any) -> None:
    """Training does not change the reference model's weights.

    Silent because a reference that follows the policy makes the KL small, which looks healthy. Look for a
    reference that shares tensors with the policy, or that is in the optimizer or in the weight sync.
    """
    start = scene(adapter, model, learning_rate=1e-2)
    if start.state.ref_model is None:
        raise NotProvided("the state keeps no reference model")
    before = copy.deepcopy(named(start.state.ref_model))
    for _ in range(6):
        adapter.train_step(start.state, copy.deepcopy(start.batch))
    after = named(start.state.ref_model)
    changed = [name for name in after if name not in before or not torch.equal(before[name], after[name])]
    told = f"six updates changed {some(changed)} of the reference model"
    assert_true(not changed, told, quantity="reference model", compared=len(after))


@check("step.direction", needs=("train_step",), cases=lambda: [Case(changes={"entropy_coef": 0.0})])
def direction(adapter: Adapter, model: Any) -> None:
    """An update makes the completion with positive advantage likelier relative to the other one.

    Silent because a policy that is pushed the wrong way moves as fast as one that is not. Look at the sign of the loss,
    of the advantages, and at the optimizer's `maximize` option.
    """
    # In half precision a smaller step rounds to nothing.
    rate = 1e-4 if precision(state_of(adapter, copied(model)).model) in (torch.float32, torch.float64) else 2e-3
    start = scene(adapter, model, PAIR, learning_rate=rate, other_reference=False)
    before = lead(start.state.model, start.batch)
    adapter.train_step(start.state, copy.deepcopy(start.batch))
    after = lead(start.state.model, start.batch)
    told = f"the rewarded completion led the other by {before:.4f} nats before the update and by {after:.4f} after it"
    assert_true(after > before, told, quantity="lead", magnitude=before - after)


@check("step.same_policy", needs=("train_step",), worlds=("config_dtype",))
def same_policy(adapter: Adapter, model: Any) -> None:
    """A new state scores completions like the model it was made from, also after negligibly small updates.

    Silent because a policy that starts from other weights, or is reloaded wrongly after its first update, still trains:
    its gradients are right for its wrong weights. Look for loading by name that ignores missing weights, for wrappers,
    and for changes to frozen weights between updates.
    """
    start = scene(adapter, model, learning_rate=1e-9)
    for told in ("a new state", "after one update at learning rate 1e-9 a state", "after two such updates a state"):
        distance = policy_gap(start.state, start.policy, start.batch)
        told += f" scores a completion's token {distance:.3g} nats off the model it was made from"
        assert_true(distance < nats(start.state.model), told, quantity="nats", magnitude=distance)
        adapter.train_step(start.state, copy.deepcopy(start.batch))
