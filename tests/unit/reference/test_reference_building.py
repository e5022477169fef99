"""The start of a run, each part derived a second time: torch's schedulers, merged weights, plans counted by hand."""

from collections.abc import Callable

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler

from rlcanary import tiny_models
from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.records.building import LoraSettings, PlanSettings, RunSettings
from rlcanary.reference.building import LoraLinear, build, rate_share
from rlcanary.reference.data.run_plan import run_plan

LORA = LoraSettings(rank=2, alpha=6.0, targets=("q_proj",))


def rates_of(make: Callable[..., LRScheduler], *arguments: float) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler, rates = make(optimizer, *arguments), []
    for _ in range(12):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_rates_fall_as_those_of_torch_do() -> None:
    cosine = RunSettings(rate_shape="cosine", total_updates=12, final_share=0.25)
    assert [rate_share(cosine, update) for update in range(12)] == pytest.approx(rates_of(CosineAnnealingLR, 12, 0.25))
    linear = RunSettings(rate_shape="linear", total_updates=12, final_share=0.25)
    assert [rate_share(linear, update) for update in range(12)] == pytest.approx(rates_of(LinearLR, 1.0, 0.25, 12))


def test_warmup_rises_in_equal_steps_and_belongs_to_the_schedule() -> None:
    settings = RunSettings(warmup_updates=3, rate_shape="linear", total_updates=7, final_share=0.5)
    expected = [0.25, 0.5, 0.75, 1.0, 0.875, 0.75, 0.625, 0.5, 0.5]
    assert [rate_share(settings, update) for update in range(9)] == pytest.approx(expected)
    assert rate_share(RunSettings(warmup_updates=3), 1000) == 1


def test_adapters_are_those_of_merged_weights() -> None:
    layer = LoraLinear(torch.nn.Linear(5, 3), rank=2, alpha=8.0)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(layer(x), layer.base(x))
    torch.nn.init.constant_(layer.lora_B, 0.3)
    merged = layer.base.weight + 8 / 2 * layer.lora_B @ layer.lora_A
    torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, merged, layer.base.bias))


def test_trained_are_all_parameters_all_that_are_not_frozen_or_the_adapters() -> None:
    def trained(settings: RunSettings) -> set[str]:
        state = build(settings, tiny_models.tiny_llama(), Conventions())
        moved = {id(each) for group in state.optimizer.param_groups for each in group["params"]}
        names = {name for name, each in state.model.named_parameters() if each.requires_grad}
        assert names == {name for name, each in state.model.named_parameters() if id(each) in moved}
        return names

    everything = {name for name, _ in tiny_models.tiny_llama().named_parameters()}
    assert trained(RunSettings()) == everything
    assert everything - trained(RunSettings(frozen=("lm_head",))) == {"lm_head.weight"}
    layers = [f"model.layers.{index}.self_attn.q_proj.lora_{part}" for index in (0, 1) for part in "AB"]
    assert trained(RunSettings(lora=LORA)) == set(layers)


def test_decay_is_of_the_declared_parameters() -> None:
    for decayed, expected in (("all", 1.0), ("matrices", 0.0)):
        conventions = Conventions().replace(decayed=decayed)
        state = build(RunSettings(weight_decay=1.0), tiny_models.tiny_llama(), conventions)
        decays = {
            each.ndim: group["weight_decay"] for group in state.optimizer.param_groups for each in group["params"]
        }
        assert decays == {2: 1.0, 1: expected}


def test_reference_model_is_a_copy_where_there_is_a_kl_term() -> None:
    assert build(RunSettings(), tiny_models.tiny_llama(), Conventions()).ref_model is None
    state = build(RunSettings(lora=LORA), tiny_models.tiny_llama().bfloat16(), Conventions(kl_coef=0.1))
    own = {each.data_ptr() for each in state.model.parameters()}
    for parameter in state.ref_model.parameters():
        assert parameter.data_ptr() not in own
        assert (parameter.dtype, parameter.requires_grad) == (torch.float32, False)


def test_layers_that_are_not_there_are_declined() -> None:
    with pytest.raises(NotProvided, match="no linear layer"):
        build(RunSettings(lora=LoraSettings(2, 6.0, ("query",))), tiny_models.tiny_llama(), Conventions())
    with pytest.raises(NotProvided, match="cannot checkpoint"):
        build(RunSettings(gradient_checkpointing=True), torch.nn.Linear(2, 2), Conventions())


def test_plan_counted_by_hand() -> None:
    conventions = Conventions(data_order="sequential", epochs_per_rollout=2, mini_batches=3)
    plan = run_plan(PlanSettings(5, 2, epochs=2, ranks=2), conventions)
    assert plan.batches == [[[0], [2], [0], [2]], [[1], [3], [1], [3]]]
    assert (plan.updates, plan.schedule_updates) == (24, 24)
    kept = run_plan(PlanSettings(5, 2, epochs=2, drop_last=False), conventions.replace(schedule_advances="rollout"))
    assert kept.batches == [[[0, 1], [2, 3], [4], [0, 1], [2, 3], [4]]]
    assert (kept.updates, kept.schedule_updates) == (36, 6)
    limited = run_plan(PlanSettings(5, 2, epochs=2, max_batches=3), conventions)
    assert limited.batches == [[[0, 1], [2, 3], [0, 1]]]
    assert (limited.updates, limited.schedule_updates) == (18, 18)
    with pytest.raises(ValueError, match="less than one batch"):
        run_plan(PlanSettings(1, 2), conventions)
