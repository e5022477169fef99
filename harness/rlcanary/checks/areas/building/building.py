"""The state that a run starts from: what is trained, by which optimizer, at which rates, and against which reference."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from rlcanary import reference
from rlcanary.checks.asserts import assert_close, assert_equal, assert_true, leave_out, soft
from rlcanary.checks.case import Case
from rlcanary.checks.check import check, other_values
from rlcanary.checks.worlds.training.descent import with_kl
from rlcanary.checks.worlds.training.run_starts import (
    LORA,
    built,
    gap,
    give_gradient,
    gradients,
    moved_tensors,
    rate_bounds,
    targets,
    train,
    with_gradient,
)
from rlcanary.checks.worlds.training.states import named, nats, own_logprobs, scheduled_rates, started
from rlcanary.checks.worlds.training.tiny_trainer import GROUPS, PAIR, sampled, tiny_policy
from rlcanary.checks.worlds.training.updates import descended
from rlcanary.contract.adapter import Adapter, NotProvided
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.records.building import LoraSettings, RunSettings

SCHEDULES = {
    "constant": RunSettings(total_updates=5),
    "constant behind a warm-up": RunSettings(warmup_updates=3, total_updates=6),
    "linear to zero": RunSettings(rate_shape="linear", total_updates=10),
    "linear behind a warm-up, to a tenth": RunSettings(
        learning_rate=3e-4, warmup_updates=4, rate_shape="linear", total_updates=12, final_share=0.1
    ),
    "cosine behind a warm-up": RunSettings(warmup_updates=5, rate_shape="cosine", total_updates=25),
    "cosine to a half": RunSettings(rate_shape="cosine", total_updates=10, final_share=0.5),
}


def _schedules() -> Iterator[Case]:
    for told, settings in SCHEDULES.items():
        yield Case(told, settings=settings)


@check("building.learning_rates", needs=("build",), cases=_schedules)
def learning_rates(adapter: Adapter, model: Any, settings: RunSettings) -> None:
    """The rate of every update is that of the declared warm-up and fall, to within one update, in all parameter groups.

    Silent because any falling curve looks like a schedule. One that counts samples, micro-batches or epochs instead of
    updates never leaves its warm-up or never falls, one from which the warm-up is taken twice arrives early and trains
    the rest at its end, and one that starts at zero without a warm-up wastes an update. Look at the unit of each number
    that the scheduler is given, and at whether its length has the warm-up in it.
    """
    rates = scheduled_rates(built(adapter, settings, model), settings.total_updates)
    wrong = []
    for update, of_groups in enumerate(rates):
        low, high = rate_bounds(settings, update)
        slack = 1e-3 * settings.learning_rate
        wrong += [(update, rate, low, high) for rate in of_groups if not low - slack <= rate <= high + slack]
    update, rate, low, high = (wrong or [(0, 0.0, 0.0, 0.0)])[0]
    told = f"update {update}, counted from 0, has the learning rate {rate:.4g}, allowed are {low:.4g} to {high:.4g}"
    assert_true(not wrong, told, quantity="learning rate", compared=len(rates))


def _stops() -> Iterator[Case]:
    for told, stop in (
        ("constant behind a warm-up", 2),
        ("linear behind a warm-up, to a tenth", 2),
        ("cosine behind a warm-up", 7),
    ):
        yield Case(f"{told}, stopped after {stop}", settings=SCHEDULES[told], stop=stop)


@check("building.resumed_rates", needs=("build", "train_step", "save_checkpoint", "load_checkpoint"), cases=_stops)
def resumed_rates(adapter: Adapter, model: Any, settings: RunSettings, stop: int) -> None:
    """A run that is resumed into a newly built state goes on at the rates of the run without a stop.

    Silent because a schedule that starts again warms up again, and one that is advanced twice is only further along.
    Look at whether the scheduler's state is saved, loaded and then advanced once more to the step of the checkpoint, and
    at a length that a resumed run computes from the updates that are left.
    """
    whole = built(adapter, settings, model)
    train(adapter, whole, model, stop)
    with TemporaryDirectory() as folder:
        adapter.save_checkpoint(whole, Path(folder))
        resumed = adapter.load_checkpoint(built(adapter, settings, model), Path(folder))
    left = settings.total_updates - stop
    expected, got = (torch.tensor(scheduled_rates(state, left)) for state in (whole, resumed))
    told = f"[update, group] learning rates of a run of {settings.total_updates} updates that was stopped after {stop}"
    assert_close(got, expected, told, quantity="learning rate")


def _decays(conventions: Conventions) -> Iterator[Case]:
    for weight_decay in (0.0, 0.5):
        yield Case(f"weight decay {weight_decay}", settings=RunSettings(learning_rate=0.1, weight_decay=weight_decay))
    for decayed in other_values(conventions, {"decayed": ("all", "matrices")}):
        yield Case(decayed, changes=decayed, settings=RunSettings(learning_rate=0.1, weight_decay=0.5))


@check(
    "building.weight_decay",
    needs=("build",),
    cases=_decays,
    alternatives=lambda conventions: other_values(conventions, {"decayed": ("all", "matrices")}),
    worlds=("tied_and_biased",),
)
def weight_decay(adapter: Adapter, model: Any, settings: RunSettings) -> None:
    """An update without gradient takes rate × weight decay off each weight that is declared to decay, and off no other.

    Silent because the policy is pulled to zero slowly, whatever the rewards say. Look for an optimizer's default that is not
    zero (0.01 in torch's AdamW), for Adam in place of AdamW, and for names of norms and biases that match none of the
    model's.
    """
    state = built(adapter, settings, model)
    tensors, parameters = moved_tensors(state), named(model)
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        give_gradient(state, name, tensor, torch.zeros_like(tensor))
    state.optimizer.step()
    for name, tensor in tensors.items():
        if name not in parameters:
            leave_out(f"{name} is a parameter of the built state alone")
            continue
        decays = adapter.conventions.decayed == "all" or parameters[name].ndim >= 2
        left = 1 - settings.learning_rate * settings.weight_decay * decays
        with soft():
            told = f"{name} after an update without gradient at rate {settings.learning_rate}, decay {settings.weight_decay}"
            assert_close(tensor, left * before[name], told, quantity=f"weights, {'decayed' if decays else 'others'}")


def _optimizers() -> Iterator[Case]:
    for changes in ({}, {"betas": (0.5, 0.7)}, {"eps": 0.1}, {"learning_rate": 3e-4}):
        yield Case(changes, settings=replace(RunSettings(learning_rate=0.01), **changes))


@check("building.optimizer", needs=("build",), cases=_optimizers)
def optimizer(adapter: Adapter, model: Any, settings: RunSettings) -> None:
    """Three updates by given gradients move each parameter as AdamW with these betas, eps and rate does.

    Silent because training works with other betas too, only noisier or slower; with the eps of another library the rate of
    small gradients is another. Look for options that are parsed and not passed on, and for parameters in two groups.
    """
    state = built(adapter, settings, model)
    tensors = moved_tensors(state)
    expected = {name: tensor.detach().double().clone() for name, tensor in tensors.items()}
    means = {name: torch.zeros_like(value) for name, value in expected.items()}
    squares = copy.deepcopy(means)
    (slow, slower), generator = settings.betas, torch.Generator().manual_seed(0)
    for update in (1, 2, 3):
        for name, tensor in tensors.items():
            gradient = torch.randn(tensor.shape, generator=generator)
            give_gradient(state, name, tensor, gradient)
            means[name].lerp_(gradient.double(), 1 - slow)
            squares[name].lerp_(gradient.double().square(), 1 - slower)
            root = (squares[name] / (1 - slower**update)).sqrt() + settings.eps
            expected[name] -= settings.learning_rate * means[name] / (1 - slow**update) / root
        state.optimizer.step()
    for name, tensor in tensors.items():
        with soft():
            told = f"{name} after three updates of AdamW with betas {settings.betas} and eps {settings.eps}"
            assert_close(tensor, expected[name].to(tensor.dtype), told, quantity="weights")


def _frozen() -> Iterator[Case]:
    for frozen in ((), ("embed",), ("layers.0.", "norm")):
        yield Case(
            f"frozen {', '.join(frozen) or 'nothing'}",
            settings=RunSettings(learning_rate=0.01, weight_decay=0.1, frozen=frozen),
        )


@check("building.trained_parts", needs=("build", "train_step"), cases=_frozen, worlds=("tied_and_biased",))
def trained_parts(adapter: Adapter, model: Any, settings: RunSettings) -> None:
    """An update moves every parameter that has a gradient and is not frozen, no other one, and leaves tied weights tied.

    Silent because the rest of the model learns in their place. A head or a critic that is in no optimizer stays as it was
    loaded while its loss is logged; a frozen part that is frozen after the optimizer was built may decay. Look at which
    object's parameters the optimizer is given, at what is wrapped or frozen after it was, and at patterns that match no
    name.
    """
    trained = with_gradient(model)
    state = built(adapter, settings, model)
    before = {name: parameter.detach().clone() for name, parameter in named(state.model).items()}
    if not trained <= before.keys():
        raise NotProvided("the parameters of state.model have other names than those of the model")
    train(adapter, state, model, 1)
    got = {name for name, parameter in named(state.model).items() if not torch.equal(parameter, before[name])}
    expected = {name for name in trained if not any(part in name for part in settings.frozen)}
    with soft():
        assert_equal(sorted(got), sorted(expected), "the update moves these parameters", quantity="trained parameters")
    if getattr(model.config, "tie_word_embeddings", False):
        embedding, head = state.model.get_input_embeddings(), state.model.get_output_embeddings()
        assert_equal(torch.equal(embedding.weight, head.weight), True, "embedding and output layer are still tied")


def _starts() -> Iterator[Case]:
    for told, changes in (
        ("all is trained", {}),
        ("adapters", {"lora": LORA}),
        ("frozen embedding", {"frozen": ("embed",)}),
        ("gradient checkpointing", {"gradient_checkpointing": True}),
    ):
        yield Case(told, settings=replace(RunSettings(learning_rate=1e-9), **changes))


@check("building.starts_as_the_model", needs=("build",), cases=_starts, worlds=("tied_and_biased",))
def starts_as_the_model(adapter: Adapter, model: Any, settings: RunSettings) -> None:
    """Before its first update, and behind a tiny one, the policy computes what the loaded model does, adapters included.

    Silent because a policy that starts elsewhere trains too, from worse rewards. Look for weights that are not loaded or are
    initialised again, for masters made before the weights were loaded, which the first update writes over them, for a
    rounding to half precision, and for adapters of which neither matrix starts at zero.
    """
    if settings.lora is not None:
        targets(model, settings.lora)
    state = built(adapter, settings, model)
    for told in ("the built policy", "after an update at the learning rate 1e-9 the policy"):
        far = gap(state.model, model)
        told += f" differs from the loaded model by {far:.3g} nats"
        assert_true(far <= nats(state.model), told, quantity="logprobs", magnitude=far)
        started(state)


def _adapters() -> Iterator[Case]:
    for rank, alpha, names in ((2, 6.0, ("q_proj", "v_proj")), (4, 2.0, ("o_proj",)), (1, 1.0, ("q_proj",))):
        lora = LoraSettings(rank, alpha, names)
        yield Case(f"rank {rank}, alpha {alpha:g}, {', '.join(names)}", lora=lora)


@check("building.adapters_are_trained_alone", needs=("build", "train_step"), cases=_adapters)
def adapters_are_trained_alone(adapter: Adapter, model: Any, lora: LoraSettings) -> None:
    """With LoRA the trained parameters are A and B of the declared rank on the declared layers, and the rest stays.

    Silent because an adapter of another rank, on fewer layers, or beside a base that is trained as well learns too. Look
    for targets that match no layer, for norms or heads that stay trained, and for an optimizer that was built before the
    base was frozen.
    """
    count = sum(lora.rank * (layer.in_features + layer.out_features) for layer in targets(model, lora))
    state = built(adapter, RunSettings(learning_rate=0.01, weight_decay=0.1, lora=lora), model)
    trained = sum(each.numel() for each in state.model.parameters() if each.requires_grad)
    with soft():
        assert_equal(trained, count, "entries of the trained parameters", quantity="trained parameters")
    before = copy.deepcopy(named(state.model))
    # B starts at zero, so A has no gradient before the second update.
    train(adapter, state, model, 2)
    for name, parameter in named(state.model).items():
        stays = not before[name].requires_grad
        told = f"{name}, which requires {'no ' * stays}gradient, {'moves' if stays else 'does not move'} in two updates"
        with soft():
            assert_true(torch.equal(parameter, before[name]) == stays, told, quantity="frozen" if stays else "adapters")


@check("building.adapter_scale", needs=("build",), cases=_adapters)
def adapter_scale(adapter: Adapter, model: Any, lora: LoraSettings) -> None:
    """An adapted layer computes with W + alpha / rank × B A.

    Silent because at the start B is zero and any scale is right; later the scale is a factor of the learning rate, and an
    engine that merges adapters by the definition samples from another policy. Look for alpha without the rank, for a scale
    that is applied to A and to B, and for layers beyond the targets.
    """
    state = built(adapter, RunSettings(lora=lora), model)
    with torch.no_grad():
        for parameter in state.model.parameters():
            if parameter.requires_grad:
                parameter.fill_(0.1)
        # Every entry of B A is rank × 0.1 × 0.1, wherever A and B lie and however they are laid out.
        for layer in targets(model, lora):
            layer.weight += lora.alpha * 0.1**2
    far = gap(state.model, model)
    told = f"with 0.1 in all of A and B, logprobs differ by {far:.3g} nats from those of W + alpha / rank * B A"
    assert_true(far <= nats(state.model), told, quantity="logprobs", magnitude=far)


@check("building.small_updates_are_kept", needs=("build",), worlds=("bfloat16",))
def small_updates_are_kept(adapter: Adapter, model: Any) -> None:
    """Small updates in one direction add up in what the optimizer moves, also for a model loaded in bfloat16.

    Silent because loss and gradient are finite and the largest weights never move: an update below half of the last bit of a
    bfloat16 weight is rounded away each time. Look at the dtype in which the model is loaded, or to which it is cast before
    its optimizer is built without float32 masters.
    """
    rate, updates = 5e-5, 40
    state = built(adapter, RunSettings(learning_rate=rate), model)
    tensors = [tensor for group in state.optimizer.param_groups for tensor in group["params"]]
    before = [tensor.detach().double().clone() for tensor in tensors]
    for tensor in (*named(state.model).values(), *tensors):
        tensor.grad = descended(state.optimizer, tensor, torch.ones_like(tensor))
    for _ in range(updates):
        state.optimizer.step()
    went = sum(float((old - new.detach()).sum()) for old, new in zip(before, tensors, strict=True))
    share = went / (rate * updates * sum(tensor.numel() for tensor in tensors))
    told = f"weights move {share:.3g} times as far as {updates} updates of {rate} in one direction"
    assert_true(0.8 <= share <= 1.2, told, quantity="distance", magnitude=abs(share - 1))


def _checkpointed() -> Iterator[Case]:
    for told, changes in (
        ("all is trained", {}),
        ("frozen embedding", {"frozen": ("embed",)}),
        ("adapters", {"lora": LORA}),
    ):
        settings = replace(RunSettings(), gradient_checkpointing=True, **changes)
        yield Case(told, settings=settings)


@check("building.gradient_checkpointing", needs=("build",), cases=_checkpointed)
def gradient_checkpointing(adapter: Adapter, model: Any, settings: RunSettings) -> None:
    """Gradient checkpointing changes no gradient.

    Silent because it is a matter of memory, and the loss is the same. A reentrant checkpoint whose input needs no gradient,
    as behind a frozen embedding, gives none to the layers inside, and only warns. Look for `use_reentrant` and for
    `enable_input_require_grads`.
    """
    if settings.lora is not None:
        targets(model, settings.lora)
    plain = built(adapter, replace(settings, gradient_checkpointing=False), model)
    saving = built(adapter, settings, model)
    with torch.no_grad():
        for parameter, other in zip(saving.model.parameters(), plain.model.parameters(), strict=True):
            parameter.copy_(other)
    batch, _ = reference.make_batch(PAIR, 0)
    expected, got = (gradients(state.model, batch, training=True) for state in (plain, saving))
    for name, gradient in expected.items():
        with soft():
            message = f"the gradient of {name} with gradient checkpointing is not that without"
            assert_close(got[name], gradient, message, scale=float(gradient.abs().max()), quantity="gradient")


def _references(conventions: Conventions) -> Iterator[Case]:
    for case in with_kl(conventions):
        for told, lora in (("all is trained", None), ("adapters", LORA)):
            settings = RunSettings(learning_rate=0.01, lora=lora)
            yield Case(told, changes=case.changes, settings=settings)


@check("building.reference_model", needs=("build", "train_step"), cases=_references)
def reference_model(adapter: Adapter, model: Any, settings: RunSettings) -> None:
    """The reference model computes what the loaded model does, before the updates and after them.

    Silent because a reference that follows the policy, or shares tensors with it, gives a KL of nearly zero and no pull at
    all; one with other weights pulls elsewhere. Look for a reference made without a copy, at tensors shared by tying or
    merging, and for adapters that the reference's forward pass does not leave out.
    """
    if settings.lora is not None:
        targets(model, settings.lora)
    state = built(adapter, settings, model)
    if state.ref_model is None:
        raise NotProvided("the state has no ref_model")
    batch, _ = reference.make_batch(GROUPS, 0)
    far = gap(state.ref_model, model)
    with soft():
        told = f"the reference model differs from the loaded one by {far:.3g} nats"
        assert_true(far <= nats(state.ref_model), told, quantity="logprobs", magnitude=far)
    before_BT = own_logprobs(state.ref_model, batch)
    train(adapter, state, model, 2)
    after_BT = own_logprobs(state.ref_model, batch)
    told = "after two updates the reference model gives other logprobs"
    assert_close(after_BT, before_BT, told, where=batch.completion_mask, quantity="logprobs after updates")


def _without_dropout(conventions: Conventions) -> Iterator[Case]:
    for case in with_kl(conventions):
        yield Case(changes={**case.changes, "training_dropout": False})


@check("building.kl_starts_at_zero", needs=("build", "train_step"), cases=_without_dropout)
def kl_starts_at_zero(adapter: Adapter) -> None:
    """The first update of a run logs a KL of zero, also where the model has dropout.

    Silent because a KL term that starts above zero falls, which looks like a policy that stays near its reference. Look
    for a reference model in training mode or in another precision, and for weights that only one of the two models loads.
    """
    model = tiny_policy(dropout=0.5)
    state = built(adapter, RunSettings(), model)
    metrics = adapter.train_step(state, sampled(model, adapter.conventions))
    if "kl" not in metrics:
        raise NotProvided("kl is not logged")
    told = f"the first update logs a kl of {metrics['kl']:.3g}"
    assert_true(abs(metrics["kl"]) <= nats(state.model), told, quantity="kl", magnitude=abs(metrics["kl"]))
