"""One update of a state: its starting point, the update itself, and the comparison of its gradients."""

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlcanary.checks.asserts import Finding, assert_true
from rlcanary.checks.case import Case
from rlcanary.checks.closeness import close
from rlcanary.checks.worlds.training.states import in_precision_of, precision, toned
from rlcanary.checks.worlds.training.tiny_trainer import (
    GROUPS,
    others,
    reference_near,
    sampled,
    state_of,
    with_reference,
)
from rlcanary.checks.worlds.training.updates import Watch, declared, gradient_norm
from rlcanary.contract.adapter import Adapter, NotProvided
from rlcanary.contract.batch import CollatedBatch, Group
from rlcanary.contract.conventions import PIECES, Conventions
from rlcanary.contract.layers import copied


@dataclass(frozen=True)
class Scene:
    """The starting point of an update.

    Attributes:
        state: the state to train.
        batch: completions that the state's model sampled.
        policy: a model equal to the one that the state was made from.
        ref_model: the reference model, in the precision in which the state has its own; None without a KL term.
    """

    state: Any
    batch: CollatedBatch
    policy: Any
    ref_model: Any


def scene(
    adapter: Adapter,
    model: Any,
    groups: Sequence[Group] = GROUPS,
    *,
    drift: float = 0.0,
    learning_rate: float = 1e-3,
    is_clipped: bool | None = False,
    other_reference: bool = True,
    brings_reference: bool = False,
) -> Scene:
    """Make a state and a batch on one side of the declared max_grad_norm.

    A clipped gradient has the bound's norm, which hides any factor. So the model is scaled down until its gradient norm
    is at most half the bound. When the clipping itself is tested, it is scaled until it is at least twice the bound.

    Args:
        adapter: makes the state.
        model: the policy.
        groups: the sampled groups.
        drift: largest difference of an older policy's logprobs from these, in nats.
        learning_rate: the state's learning rate.
        is_clipped: true for a gradient norm above the bound, false for one below; None takes the model as it is.
        other_reference: whether the reference model, if the conventions need one, differs from the policy.
        brings_reference: whether the batch brings the logprobs of such a model, and that of the state equals the policy.

    Raises:
        NotProvided: no gradient of such a model lies on this side of the bound.
    """
    conventions, factor = adapter.conventions, 1.0
    limit = conventions.max_grad_norm
    for _ in range(8):
        policy = toned(copied(model), factor)
        ref_model = reference_near(policy, conventions, other_reference and not brings_reference)
        own_policy, own_reference = copied((policy, ref_model))
        state = state_of(adapter, own_policy, own_reference, learning_rate)
        batch = sampled(state.model, conventions, groups, drift)
        if brings_reference:
            batch = with_reference(batch, reference_near(policy, conventions), conventions)
        start = Scene(state, batch, policy, in_precision_of(state, ref_model))
        if limit is None or is_clipped is None:
            return start
        norm = _gradient_norm(adapter, start, groups)
        if norm > 2 * limit if is_clipped else norm < limit / 2:
            return start
        factor *= math.sqrt((4 if is_clipped else 0.25) * limit / max(norm, 1e-3 * limit))
    raise NotProvided(f"no gradient of such a model is {'above' if is_clipped else 'below'} max_grad_norm {limit:g}")


def _gradient_norm(adapter: Adapter, start: Scene, groups: Sequence[Group]) -> float:
    """Return the declared norm; where a piece is "custom", that of the code itself, which is at most max_grad_norm."""
    if "custom" not in (getattr(adapter.conventions, name) for name in PIECES):
        norm: float = declared(start.state.model, start.ref_model, start.batch, adapter.conventions).metrics[
            "grad_norm"
        ]
        return norm
    return gradient_norm(step_gradients(adapter, twin(adapter, start, groups)))


def twin(adapter: Adapter, start: Scene, groups: Sequence[Group], **layout: Any) -> Scene:
    """Make an equal state again, with the same completions in another order or layout (options for `sampled`)."""
    ref_model = reference_near(start.policy, adapter.conventions)
    state = state_of(adapter, *copied((start.policy, ref_model)))
    return Scene(state, sampled(state.model, adapter.conventions, groups, **layout), start.policy, ref_model)


def sides(conventions: Conventions) -> list[tuple[str, bool | None]]:
    """Return label and `is_clipped` of the scenes to try: the model as it is, and one below max_grad_norm, if any."""
    return [("", None), ("below max_grad_norm", False)][: 1 if conventions.max_grad_norm is None else 2]


def with_kl(conventions: Conventions) -> Iterator[Case]:
    """Yield the case of a KL term: of the declared weight, or of 0.3 where none is declared."""
    yield Case(changes={"kl_coef": conventions.kl_coef or 0.3})


def terms(conventions: Conventions) -> str:
    """Describe the terms of the declared objective."""
    words = [f"temperature {conventions.temperature:g}", conventions.aggregation]
    words += [f"kl_coef {conventions.kl_coef:g} in the {conventions.kl_placement}"] if conventions.kl_coef else []
    return ", ".join([*words, f"ratio against the {conventions.old_logprobs}'s logprobs"])


def some(names: Sequence[str]) -> str:
    """List the first three of these names."""
    return ", ".join(names[:3]) + "…" * (len(names) > 3)


def step_gradients(adapter: Adapter, start: Scene) -> dict[str, Tensor]:
    """Train on the batch -> the gradients in the one step of the state's optimizer, by parameter."""
    watch = watched(start.state)
    adapter.train_step(start.state, copy.deepcopy(start.batch))
    steps = len(watch.updates)
    told = f"one call of train_step made {steps} steps of state.optimizer"
    assert_true(steps == 1, told, quantity="number of steps", magnitude=abs(steps - 1))
    return watch.updates[0].gradients


def watched(state: Any) -> Watch:
    """Watch a state whose optimizer moves the model's parameters or copies of them.

    Raises:
        NotProvided: it moves other tensors, such as one flat buffer, whose gradients belong to no parameter.
    """
    watch = Watch(state)
    if watch.unknown:
        raise NotProvided(
            f"{watch.unknown} tensors of state.optimizer are neither parameters of state.model nor copies"
        )
    return watch


def assert_gradients(got: dict[str, Tensor], expected: dict[str, Tensor], model: Any, message: str) -> None:
    """Assert that gradients by parameter agree.

    In half precision the tolerance is 24 roundings: a correct bfloat16 trainer with float32 masters deviates by up to
    12. The largest entry of all gradients is the unit of the absolute tolerance.

    Args:
        got: the gradients in the optimizer's step.
        expected: those that the property demands.
        model: the model in training, for the precision.
        message: the property in the words of this case.

    Raises:
        Finding: one of them differs, or there is none.
    """
    if not expected:
        raise Finding("no parameter of state.model requires a gradient")
    rounding = 24 * torch.finfo(precision(model)).eps
    unit = max(float(gradient.abs().max()) for gradient in expected.values())
    if math.isnan(unit):
        raise Finding(f"{message}\n  nothing to compare with: the other gradient is NaN already", "gradients")
    relative, absolute = max(1e-3, rounding), max(1e-4, rounding) * unit
    wrong = [name for name in expected if not close(got[name], expected[name], relative, absolute)]
    got_P, expected_P = (torch.cat([each[name].double().flatten() for name in expected]) for each in (got, expected))
    length = float(got_P.norm() / expected_P.norm())
    cosine = float(torch.nn.functional.cosine_similarity(got_P, expected_P, dim=0))
    told = (
        f"{message}\n  {len(wrong)} of {len(expected)} parameters have another gradient, {some(wrong[:1])} for one; all "
        f"together it is {length:.4g} times as long as it should be, with a cosine of {cosine:.4f}"
    )
    magnitude = float((got_P - expected_P).norm() / expected_P.norm())
    assert_true(not wrong, told, quantity="gradients", magnitude=magnitude, compared=len(expected))


def with_others(adapter: Adapter, start: Scene) -> Scene:
    """Return the same state with a batch of other completions of the items in `GROUPS`."""
    return replace(start, batch=sampled(start.state.model, adapter.conventions, others(GROUPS)))


def expect_declared(adapter: Adapter, start: Scene, message: str) -> None:
    """Train on the batch, and assert that the gradient is the declared one."""
    expected = declared(start.state.model, start.ref_model, start.batch, adapter.conventions).gradients
    got = step_gradients(adapter, start)
    assert_gradients(got, expected, start.state.model, f"{message} ({terms(adapter.conventions)})")


def expect_same(
    adapter: Adapter, model: Any, is_clipped: bool | None, groups: list[Group], message: str, layout: dict[str, Any]
) -> None:
    """Assert that these groups in this layout (options for `sampled`) give the gradient that `GROUPS` gives."""
    start = scene(adapter, model, GROUPS, is_clipped=is_clipped)
    first = step_gradients(adapter, start)
    second = step_gradients(adapter, twin(adapter, start, groups, **layout))
    assert_gradients(second, first, start.state.model, message)
