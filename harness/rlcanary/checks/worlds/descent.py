"""One update of a state: its starting point, the update itself, and the comparison of its gradients."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlcanary.checks.literal import Written
from rlcanary.checks.subject import Call, Finding, Subject, close
from rlcanary.checks.worlds.states import precision
from rlcanary.checks.worlds.tiny_trainer import PAIR, build, new_state, reference_model, sampled, script
from rlcanary.checks.worlds.updates import Update, Watch, declared
from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.batch import CollatedBatch, Group


@dataclass(frozen=True)
class Scene:
    """The starting point of an update.

    Attributes:
        state: the state to train.
        batch: completions that the state's model sampled.
        policy: Python for the model that the state was made from.
        ref_model: Python for the reference model, in the precision in which the state has its own.
    """

    state: Written
    batch: CollatedBatch
    policy: str
    ref_model: str


def scene(
    subject: Subject,
    groups: Sequence[Group] = PAIR,
    model: str = "tiny_llama()",
    drift: float = 0.0,
    learning_rate: float = 1e-3,
    is_clipped: bool | None = False,
    dressed: str = "{}",
    other_reference: bool = True,
    **layout: Any,
) -> Scene:
    """A state and a batch on one side of the declared max_grad_norm.

    A clipped gradient has the bound's norm, which hides any factor. So the model is scaled down until its gradient norm
    is at most half the bound. When the clipping itself is tested, it is scaled until it is at least twice the bound.

    Args:
        subject: the subject that makes the state.
        groups: the sampled groups.
        model: Python for the policy.
        drift: largest difference of an older policy's logprobs from these, in nats.
        learning_rate: the state's learning rate.
        is_clipped: true for a gradient norm above the bound, false for one below; None takes the model as it is.
        dressed: Python that modifies the state, with {} in its place.
        other_reference: whether the reference model, if the conventions need one, differs from the policy.
        layout: options for `sampled`.

    Raises:
        NotProvided: no gradient of such a model lies on this side of the bound.
    """
    limit, factor = subject.conventions.max_grad_norm, 1.0
    for _ in range(8):
        form = "{}" if factor == 1 else f"toned({{}}, {factor:.3g})"
        policy, given = form.format(model), reference_model(subject, form.format("tiny_llama()"), other_reference)
        state = new_state(subject, policy, given, learning_rate, dressed)
        ref_model = own_precision(state.value, given)
        batch = sampled(state.value.model, subject.conventions, groups, drift, **layout)
        if limit is None or is_clipped is None:
            return Scene(state, batch, policy, ref_model)
        norm = declared(state.value.model, build(ref_model), batch, subject.conventions).metrics["grad_norm"]
        if norm > 2 * limit if is_clipped else norm < limit / 2:
            return Scene(state, batch, policy, ref_model)
        factor *= (4 if is_clipped else 0.25) * limit / max(norm, 1e-3 * limit)
    raise NotProvided(f"no gradient of the tiny model is {'above' if is_clipped else 'below'} max_grad_norm {limit:g}")


def sides(subject: Subject) -> tuple[bool | None, ...]:
    """Return the values of `is_clipped` to try: the model as it is and, if there is a max_grad_norm, one below it."""
    return (None,) if subject.conventions.max_grad_norm is None else (None, False)


def own_precision(state: Any, ref_model: str) -> str:
    """Write Python for a reference model, rounded as the state rounds its own."""
    dtype = precision(state.model if state.ref_model is None else state.ref_model)
    return ref_model if ref_model == "None" or dtype == torch.float32 else f"{ref_model}.to({dtype})"


def take_step(subject: Subject, state: Written, batch: CollatedBatch) -> tuple[Call, Update]:
    """Train on one batch, which has to be one step of the state's optimizer."""
    watch = watched(state.value)
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


def tolerances(model: Any) -> tuple[float, float]:
    """Relative and absolute tolerance of gradients against float64; the largest entry of all is the unit of the second.

    In half precision they are 24 roundings: a correct bfloat16 trainer with float32 masters deviates by up to 12.
    """
    rounding = torch.finfo(precision(model)).eps
    return max(1e-3, 24 * rounding), max(1e-4, 24 * rounding)


def expect_gradients(
    call: Call, got: dict[str, Tensor], expected: dict[str, Tensor], message: str, source: list[str]
) -> None:
    """Compare gradients by parameter; `source` is Python that makes `expected`, a dictionary, in a snippet."""
    if not expected:
        raise Finding("no parameter of state.model requires a gradient", call.snippet(["assert gradients_of"]))
    call.subject.compared(len(expected))
    relative, absolute = tolerances(call.given[0].model)
    absolute *= max(float(gradient.abs().max()) for gradient in expected.values())
    wrong = [name for name in expected if not close(got[name], expected[name], relative, absolute)]
    if not wrong:
        return
    both = [torch.cat([side[name].double().flatten() for name in expected]) for side in (got, expected)]
    length = float(both[0].norm() / both[1].norm())
    cosine = float(torch.nn.functional.cosine_similarity(both[0], both[1], dim=0))
    lines = script(
        *source,
        "got = gradients_of(adapter, *arguments)",
        f"name = {wrong[0]!r}",
        f"torch.testing.assert_close(got[name].double(), expected[name].double(), rtol={relative:.2g}, "
        f"atol={absolute:.2g})",
    )
    raise Finding(
        f"{message}\n  {len(wrong)} of {len(expected)} parameters have another gradient, {wrong[0]} for one; all together "
        f"it is {length:.4g} times as long as it should be, with a cosine of {cosine:.4f}",
        call.snippet(lines),
        "gradients",
        float((both[0] - both[1]).norm() / both[1].norm()),
    )
