"""Adapters: engines get weights that do what the adapted model does, and layers that cannot have one are refused."""

import copy
from typing import Any

import pytest
import torch

from rlcanary.errors import UserError
from rlcanary.grpo.lora import add_adapters, merged_weights, target_layers
from rlcanary.grpo.plan.models import LoraSettings
from rlcanary.grpo.plan.optimizer import OptimizerSettings
from rlcanary.grpo.training.trainer import new_state, refresh_reference
from rlcanary.tiny_models import tiny_gpt2, tiny_llama

IDS = torch.tensor([[5, 6, 7, 8]])


def adapted(model: Any, **settings: Any) -> Any:
    """With a B that is not zero."""
    add_adapters(model, LoraSettings(**settings), seed=0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
    return model


@pytest.mark.parametrize("targets", [None, ("q_proj", "lm_head")])
def test_merged_weights_do_what_the_adapted_model_does_and_leave_it_alone(targets: Any) -> None:
    model, plain = adapted(tiny_llama(), rank=3, alpha=5.0, targets=targets), tiny_llama()
    before = copy.deepcopy(model.state_dict())
    unadapted = plain(IDS).logits
    plain.load_state_dict(merged_weights(model))
    torch.testing.assert_close(plain(IDS).logits, model(IDS).logits, atol=1e-5, rtol=0)
    assert not torch.allclose(unadapted, model(IDS).logits, atol=0.01)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_adapters_of_a_bfloat16_model_are_merged_in_float32_and_have_float32_masters() -> None:
    model = adapted(tiny_llama().to(torch.bfloat16))
    merged = merged_weights(model)["model.layers.0.self_attn.q_proj.weight"]
    layer = model.model.layers[0].self_attn.q_proj
    assert torch.equal(merged, layer.weight.float() + 2 * layer.lora_B.float() @ layer.lora_A.float())
    assert {each.dtype for each in new_state(model, OptimizerSettings()).masters.parameters} == {torch.float32}


def test_the_reference_model_shares_the_frozen_weights_alone() -> None:
    state = new_state(adapted(tiny_llama()), OptimizerSettings())
    refresh_reference(state)
    pairs = zip(state.model.parameters(), state.ref_model.parameters(), strict=True)
    assert all((one is other) != one.requires_grad for one, other in pairs)


@pytest.mark.parametrize(
    ("make", "targets", "said"),
    [
        (tiny_llama, ("q_proj", "query"), "no linear layer named 'query', there are down_proj, gate_proj, k_proj"),
        (lambda: tiny_llama(tied=True), ("lm_head",), "the output layer shares its weight with the embedding"),
        (tiny_gpt2, None, "no linear layer for adapters"),
    ],
)
def test_a_layer_that_cannot_have_an_adapter_is_refused(make: Any, targets: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        target_layers(make(), LoraSettings(targets=targets))
