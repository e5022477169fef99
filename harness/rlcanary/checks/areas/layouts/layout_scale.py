"""One update in any layout of ranks and micro-batches: the same gradient, norm, learning rate and metrics."""

from collections.abc import Iterator
from typing import Any

from rlcanary.checks.asserts import NothingToCompare, assert_equal, assert_metrics, soft
from rlcanary.checks.case import Case
from rlcanary.checks.check import check
from rlcanary.checks.worlds.layouts import (
    ALL_AT_ONCE,
    LAYOUTS,
    LONG_ROWS_FIRST,
    NOTHING_IN_THE_LAST,
    layout_step,
    layouts_of,
    told,
)
from rlcanary.checks.worlds.training.descent import (
    Scene,
    assert_gradients,
    scene,
    step_gradients,
    terms,
    twin,
    watched,
    with_others,
)
from rlcanary.checks.worlds.training.states import decaying, scheduled_rates
from rlcanary.checks.worlds.training.tiny_trainer import GROUPS
from rlcanary.checks.worlds.training.updates import declared
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.batch import Group
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.records.layouts import Layout
from rlcanary.tiny_models import tiny_mixtral

NEEDS = ("sharded_update",)


def _parts_of_the_objective(conventions: Conventions) -> Iterator[Case]:
    yield from layouts_of(LONG_ROWS_FIRST)
    other = "sequence_mean" if conventions.aggregation == "token_mean" else "token_mean"
    for changes in (
        {"aggregation": other},
        {"entropy_coef": 0.1},
        {"advantage_scale": "batch"},
        {"ratio_level": "sequence"},
    ):
        yield Case(changes, changes=changes, groups=LONG_ROWS_FIRST, layout=ALL_AT_ONCE)
    kl = _with_kl(conventions)
    yield Case("given reference logprobs", changes=kl, groups=LONG_ROWS_FIRST, layout=ALL_AT_ONCE, is_given=True)
    for layout, changes in ((Layout(micro_batches=2), {}), (Layout(data_parallel=2), kl), (ALL_AT_ONCE, kl)):
        label = f"a piece of no token, {told(layout)}"
        yield Case(label, changes, changes=changes, groups=NOTHING_IN_THE_LAST, layout=layout)


def _with_kl(conventions: Conventions) -> dict[str, Any]:
    return {"kl_coef": conventions.kl_coef or 0.3, "kl_placement": "loss"}


@check("layout_scale.declared_gradient", needs=NEEDS, cases=_parts_of_the_objective)
def declared_gradient(
    adapter: Adapter, model: Any, groups: list[Group], layout: Layout, is_given: bool = False
) -> None:
    """In every layout the gradient that reaches the optimizer is the declared one, however unevenly tokens lie on the ranks.

    Silent because a gradient that is too large by a number of ranks is another learning rate, and one of a mean of means
    points nearly the same way: the config trains on one node and not on eight. Look at what each rank divides by, at what
    the framework averages or multiplies on top, and at statistics that are reduced over only some of the ranks.
    """
    start = scene(adapter, model, groups, brings_reference=is_given)
    message = f"in {told(layout)} the gradient is not the declared one ({terms(adapter.conventions)})"
    _expect_declared(adapter, start, layout, message)


def _expect_declared(adapter: Adapter, start: Scene, layout: Layout, message: str) -> None:
    """Train on the batch in this layout, and assert that the gradient is the declared one."""
    expected = declared(start.state.model, start.ref_model, start.batch, adapter.conventions).gradients
    got, _ = layout_step(adapter, start, layout)
    assert_gradients(got, expected, start.state.model, message)


@check("layout_scale.layouts_agree", needs=NEEDS, cases=lambda: layouts_of(GROUPS))
def layouts_agree(adapter: Adapter, model: Any, groups: list[Group], layout: Layout) -> None:
    """Every layout gives the gradient of the update in one piece.

    Silent because each layout trains, with another learning rate or other weights of its rows for each. This holds whatever
    the objective is, so it needs no declaration. Look at what each piece is divided by, and at losses that the ranks of a
    group all have and that count once for each.
    """
    start = scene(adapter, model, groups)
    expected, _ = layout_step(adapter, start, Layout())
    got, _ = layout_step(adapter, twin(adapter, start, groups), layout)
    assert_gradients(got, expected, start.state.model, f"{told(layout)} give another gradient than one piece")


def _divided_experts() -> Iterator[Case]:
    for layout in (Layout(data_parallel=2, expert_parallel=2), Layout(2, 1, 2, expert_parallel=2, micro_batches=2)):
        yield Case(told(layout), layout=layout)


@check("layout_scale.experts", needs=NEEDS, cases=_divided_experts)
def experts(adapter: Adapter, layout: Layout) -> None:
    """Experts that are divided among ranks get the declared gradient, as what every rank has does.

    Silent because an expert sees the tokens of all ranks that share it: averaged over data-parallel ranks like the rest of
    the model, its gradient is too small or too large by their number, and only the experts learn at another rate. Look at
    the group of ranks over which gradients of experts are reduced, and at what they are divided by.
    """
    start = scene(adapter, tiny_mixtral(), LONG_ROWS_FIRST)
    message = f"in {told(layout)} the gradient of a model with experts is not the declared one"
    _expect_declared(adapter, start, layout, message)


@check("layout_scale.one_piece_is_train_step", needs=("sharded_update", "train_step"))
def one_piece_is_train_step(adapter: Adapter, model: Any) -> None:
    """The update in one piece is that of `train_step`, in gradient and metrics.

    Silent because each path trains. Look for what only one of them does: a temperature, a mask, a divisor, a clip.
    """
    start = scene(adapter, model)
    other = twin(adapter, start, GROUPS)
    got, metrics = layout_step(adapter, start, Layout())
    with soft():
        assert_gradients(got, step_gradients(adapter, other), start.state.model, "one piece gives another gradient")
    logged = adapter.train_step(twin(adapter, start, GROUPS).state, start.batch)
    assert_metrics(metrics, {name: float(value) for name, value in logged.items()}, "in train_step")


def _bounds(conventions: Conventions) -> Iterator[Case]:
    limit = conventions.max_grad_norm or 0.1
    for layout, is_clipped in [*((each, True) for each in LAYOUTS), (ALL_AT_ONCE, False)]:
        label = f"{'above' if is_clipped else 'below'} max_grad_norm {limit:g}"
        given = {"groups": LONG_ROWS_FIRST, "layout": layout, "is_clipped": is_clipped}
        yield Case(label, told(layout), changes={"max_grad_norm": limit}, **given)


@check("layout_scale.norm_is_clipped", needs=NEEDS, cases=_bounds)
def norm_is_clipped(adapter: Adapter, model: Any, groups: list[Group], layout: Layout, is_clipped: bool) -> None:
    """In every layout the norm that is clipped is that of the whole gradient, summed over all pieces.

    Silent because a gradient that each rank, shard or micro-batch clips by its own norm is clipped, only to another length
    or direction. Look at which ranks the squares are summed over, at parameters that several ranks hold and that count more
    than once, and at when the norm is taken.
    """
    start = scene(adapter, model, groups, is_clipped=is_clipped)
    message = f"in {told(layout)} a gradient {'above' if is_clipped else 'below'} max_grad_norm is not the declared one"
    _expect_declared(adapter, start, layout, message)


def _logged(conventions: Conventions) -> Iterator[Case]:
    yield from layouts_of(LONG_ROWS_FIRST)
    yield Case(
        "with KL, long rows last", changes=_with_kl(conventions), groups=LONG_ROWS_FIRST[::-1], layout=ALL_AT_ONCE
    )


@check("layout_scale.metrics", severity="dashboard", needs=NEEDS, cases=_logged)
def metrics(adapter: Adapter, model: Any, groups: list[Group], layout: Layout) -> None:
    """In every layout logged metrics are those of the whole update, and the loss is that of one piece.

    Silent because metrics affect only people's decisions: those of rank 0 are plausible, means of means favour ranks with
    few tokens, sums count what several ranks have in common once for each. Look at the ranks that each number is reduced
    over, and at token counts of one rank's part of the rows.
    """
    start = scene(adapter, model, groups, drift=0.3)
    expected = declared(start.state.model, start.ref_model, start.batch, adapter.conventions).metrics
    if adapter.conventions.kl_coef and adapter.conventions.kl_placement == "reward":
        # The KL in the reward may be that of the older policy or of this one.
        del expected["grad_norm"]
    expected["lr"] = scheduled_rates(start.state, 1)[0][0]
    _, whole = layout_step(adapter, twin(adapter, start, groups, drift=0.3), Layout())
    _, logged = layout_step(adapter, start, layout)
    if not expected.keys() & logged.keys():
        raise NothingToCompare(f"logs none of {', '.join(expected)}")
    assert_metrics(logged, expected, f"in {told(layout)}; of the whole update")
    assert_metrics(logged, {"loss": whole["loss"]} if "loss" in whole else {}, f"in {told(layout)}; in one piece")


def _several_pieces() -> Iterator[Case]:
    for layout in (Layout(micro_batches=2), ALL_AT_ONCE):
        yield Case(told(layout), layout=layout)


@check("layout_scale.updates_start_anew", needs=NEEDS, cases=_several_pieces)
def updates_start_anew(adapter: Adapter, model: Any, layout: Layout) -> None:
    """In every layout a second update has the gradient of its own batch, and the learning rate has moved on by one step.

    Silent because old gradients act like momentum, and a schedule that is stepped with each micro-batch or rank is a
    schedule. Look for `zero_grad` and `scheduler.step()` inside the loop over pieces.
    """
    start = scene(adapter, model, GROUPS, learning_rate=1e-7)
    decaying(start.state)
    rates = [f"{each[0]:.4g}" for each in scheduled_rates(start.state, 2)]
    watch = watched(start.state)
    layout_step(adapter, start, layout)
    second = with_others(adapter, start)
    expected = declared(second.state.model, second.ref_model, second.batch, adapter.conventions).gradients
    got, _ = layout_step(adapter, second, layout)
    with soft():
        message = f"learning rates of two updates in {told(layout)}"
        assert_equal(
            [f"{each.learning_rates[0]:.4g}" for each in watch.updates], rates, message, quantity="learning rate"
        )
    message = f"in {told(layout)} the second update's gradient is not that of its batch"
    assert_gradients(got, expected, second.state.model, message)
