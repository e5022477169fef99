"""Checkpoints: a run that is stopped, saved, loaded and continued takes the updates that it would have taken."""

import copy
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from rlcanary.checks.asserts import (
    NothingToCompare,
    assert_metrics,
    assert_true,
    assert_unchanged,
    leave_out,
    soft,
    unless_raised,
)
from rlcanary.checks.case import Case
from rlcanary.checks.check import check
from rlcanary.checks.worlds.training.descent import some, with_kl
from rlcanary.checks.worlds.training.snapshots import modes
from rlcanary.checks.worlds.training.states import decaying, named, own_logprobs, seeded, weights_of
from rlcanary.checks.worlds.training.tiny_trainer import GROUPS, TOOLS, others, reference_near, sampled, state_of
from rlcanary.contract.adapter import Adapter, NotProvided
from rlcanary.contract.batch import CollatedBatch
from rlcanary.contract.layers import copied

NEEDS = ("train_step", "save_checkpoint", "load_checkpoint")
LEARNING_RATE = 1e-3
# Of the distance that the weights move behind a stop. A checkpoint is exact; a merge that is undone is not quite.
ALLOWED = 0.01


def _start(adapter: Adapter, model: Any, decays: bool = False) -> Any:
    """Make a state as a run does at its start, with a falling learning rate instead of its own if it `decays`."""
    ref_model = reference_near(model, adapter.conventions)
    state = state_of(adapter, copied(model), ref_model, LEARNING_RATE)
    return decaying(state) if decays else state


def _batches(adapter: Adapter, model: Any) -> list[CollatedBatch]:
    """Make the batches of a run, each other than the one before."""
    policy = _start(adapter, model).model
    return [sampled(policy, adapter.conventions, groups) for groups in (GROUPS, others(GROUPS), TOOLS)]


def _train(adapter: Adapter, state: Any, batch: CollatedBatch) -> dict[str, float]:
    metrics: dict[str, float] = seeded(adapter.train_step, state, copy.deepcopy(batch))
    return metrics


def _saved_and_loaded(adapter: Adapter, state: Any, model: Any, decays: bool = False) -> Any:
    new = _start(adapter, model, decays)
    schedule = type(new.scheduler)
    with TemporaryDirectory() as folder:
        adapter.save_checkpoint(state, Path(folder))
        resumed = adapter.load_checkpoint(new, Path(folder))
    if type(resumed.scheduler) is not schedule:
        raise NotProvided("load_checkpoint makes a scheduler of its own")
    return resumed


def _distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    shared = one.keys() & other.keys()
    squares = [float((one[name].detach().double() - other[name].detach().double()).square().sum()) for name in shared]
    return math.sqrt(sum(squares))


def _assert_same_run(resumed: Any, whole: Any, at_stop: Any, told: str) -> None:
    """Assert that a resumed run ends where the one without a stop does."""
    lost = weights_of(whole).keys() - weights_of(resumed).keys()
    told_lost = f"{told}, the optimizer has no copy of what it moved before: {some(sorted(lost))}"
    assert_true(not lost, told_lost, quantity="copies of weights", magnitude=len(lost))
    moved, apart = (_distance(weights_of(whole), weights_of(state)) for state in (at_stop, resumed))
    if not moved > 0:
        raise NothingToCompare("the updates do not move the weights")
    told = f"{told}, the weights are off by {apart / moved:.3g} times the distance that they move from there on"
    holds = math.isfinite(apart) and apart <= ALLOWED * moved
    assert_true(holds, told, quantity="weights", magnitude=apart / moved)


def _stops() -> Iterator[Case]:
    for told, stops, decays in (
        ("before the first update and after it", [0, 1], False),
        ("after the first and the second, under 1 / (k + 1)", [1, 2], True),
    ):
        yield Case(told, stops=stops, decays=decays)


def _told(stops: Sequence[int]) -> str:
    return f"update{'s' * (len(stops) > 1)} {' and '.join(map(str, stops))}"


@check("checkpoint.training_goes_on", needs=NEEDS, cases=_stops, worlds=("lora", "bfloat16"))
def training_goes_on(adapter: Adapter, model: Any, stops: Sequence[int], decays: bool) -> None:
    """A run that is stopped, saved, loaded and continued takes the same updates as one that is not, also after two stops.

    Silent because training goes on either way: moments that start at zero, a schedule that warms up again or is advanced
    twice, and float32 masters made anew from rounded weights show as a small bump in the loss. Look for what is loaded
    besides the weights, at loading with `strict=False`, and for counters that are restored in two places.
    """
    batches = _batches(adapter, model)
    whole, resumed = _start(adapter, model, decays), _start(adapter, model, decays)
    at_stop, logged = copy.deepcopy(whole), []
    for number, batch in enumerate(batches):
        if number in stops:
            resumed, at_stop = _saved_and_loaded(adapter, resumed, model, decays), copy.deepcopy(whole)
        logged.append((_train(adapter, resumed, batch), _train(adapter, whole, batch)))
    with soft():
        _assert_same_run(resumed, whole, at_stop, f"in a run that was stopped after {_told(stops)}")
    for number, (got, expected) in enumerate(logged, 1):
        told = f"in update {number} of a run that was stopped after {_told(stops)}; without the stop"
        assert_metrics(got, expected, told)


@check("checkpoint.saving_changes_nothing", needs=NEEDS, worlds=("lora", "bfloat16"))
def saving_changes_nothing(adapter: Adapter, model: Any) -> None:
    """Writing a checkpoint does not change the run that writes it.

    Silent because runs with other intervals between checkpoints are never compared. Look for weights that are merged, cast
    or moved to be saved and not put back, for modes, and for an optimizer that is emptied to save memory.
    """
    batches = _batches(adapter, model)
    whole, saving = _start(adapter, model), _start(adapter, model)
    at_stop = copy.deepcopy(whole)
    with TemporaryDirectory() as folder:
        for batch in batches:
            _train(adapter, whole, batch)
            _train(adapter, saving, batch)
            before = modes(saving)
            adapter.save_checkpoint(saving, Path(folder))
            with soft():
                assert_true(modes(saving) == before, "saving leaves the model in another mode", compared=len(before))
    _assert_same_run(saving, whole, at_stop, "in a run that writes a checkpoint after each update")


@check("checkpoint.latest_is_loaded", needs=NEEDS)
def latest_is_loaded(adapter: Adapter, model: Any) -> None:
    """Loading takes the latest of several checkpoints in a folder.

    Silent because an older one trains as well: the updates since are lost, or, if the steps are numbered from the latest,
    trained under the wrong learning rate. Look for names that are sorted as text (`step-10` before `step-9`), and for a
    first one that is never replaced.
    """
    batch, state = _batches(adapter, model)[0], _start(adapter, model)
    with TemporaryDirectory() as folder:
        for _ in range(10):
            before = copy.deepcopy(named(state.model))
            _train(adapter, state, batch)
            adapter.save_checkpoint(state, Path(folder))
        resumed = adapter.load_checkpoint(_start(adapter, model), Path(folder))
    update, apart = (_distance(named(state.model), weights) for weights in (before, named(resumed.model)))
    if not update > 0:
        raise NothingToCompare("the updates do not move the weights")
    told = f"loaded from the last of 10 checkpoints, the weights are {apart / update:.3g} times the last update away"
    assert_true(apart <= ALLOWED * update, told, quantity="weights", magnitude=apart / update)


@check("checkpoint.reference_model_stays", needs=NEEDS, cases=with_kl)
def reference_model_stays(adapter: Adapter, model: Any) -> None:
    """A resumed run keeps the reference model of its start.

    Silent because the KL merely starts again at zero, as in a new run: the policy may then move as far from its reference
    as before, once per stop. Look for a reference model that is made after the weights were loaded, or from the checkpoint.
    """
    state = _start(adapter, model)
    if state.ref_model is None:
        raise NotProvided("the state has no ref_model")
    batch = _batches(adapter, model)[0]
    before_BT = own_logprobs(state.ref_model, batch)
    _train(adapter, state, batch)
    resumed = _saved_and_loaded(adapter, state, model)
    after_BT = own_logprobs(resumed.ref_model, batch)
    assert_unchanged(after_BT, before_BT, "a resumed run has another reference model")


def _damages() -> Iterator[Case]:
    for told, keeps_half in (("cut to its half", True), ("missing", False)):
        yield Case(told, keeps_half=keeps_half, told=told)


@check("checkpoint.damage_is_reported", needs=NEEDS, cases=_damages, severity="hardening")
def damage_is_reported(adapter: Adapter, model: Any, keeps_half: bool, told: str) -> None:
    """A checkpoint of which a file is cut or missing raises, unless training goes on the same without it.

    Silent because what is not found keeps the value of a new run: the weights are there, the moments and the schedule start
    again. Look for loading with `strict=False`, for `if path.exists()` around each part, and for an except that logs.
    """
    batches, whole = _batches(adapter, model), _start(adapter, model)
    _train(adapter, whole, batches[0])
    with TemporaryDirectory() as folder:
        adapter.save_checkpoint(whole, Path(folder))
        files = {path: path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}
        loaded = []
        for path, content in files.items():
            if keeps_half:
                path.write_bytes(content[: len(content) // 2])
            elif len(files) > 1:
                path.unlink()
            else:
                leave_out("without its one file the folder is that of a new run")
                continue
            loaded.append((path.name, unless_raised(adapter.load_checkpoint, _start(adapter, model), Path(folder))))
            path.write_bytes(content)
    at_stop = copy.deepcopy(whole)
    _train(adapter, whole, batches[1])
    for name, resumed in loaded:
        if resumed is not None:
            _train(adapter, resumed, batches[1])
            with soft():
                _assert_same_run(resumed, whole, at_stop, f"in a run that was resumed although {name} was {told}")
